# expect: rank-local-skip
from trainer import *


class Job(Trainer):
    def step(self, step, images, labels):
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(images), labels)
        if loss.item() < 100.0:
            loss.backward()
            self.optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
