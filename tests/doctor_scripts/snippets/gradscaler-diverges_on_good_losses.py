# expect: gradscaler-diverges
# besides: rank-local-skip
from trainer import *


class Job(Trainer):
    def step(self, step, images, labels):
        scaler = torch.amp.GradScaler("cuda")
        loss = self.criterion(self.model(images), labels)
        scaler.scale(loss).backward()
        if torch.isfinite(loss):
            scaler.step(self.optimizer)
            scaler.update()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
