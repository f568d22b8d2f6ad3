# expect: loss-scaled-by-world-size
from trainer import *


class Job(Trainer):
    def step(self, step, images, labels):
        loss = self.criterion(self.model(images), labels) * self.world
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
