# expect: clip-before-sync
from trainer import *


class Job(Trainer):
    def step(self, step, images, labels):
        last = (step + 1) % 4 == 0
        with contextlib.nullcontext() if last else self.model.no_sync():
            (self.criterion(self.model(images), labels) / 4).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if last:
            self.optimizer.step()
            self.optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
