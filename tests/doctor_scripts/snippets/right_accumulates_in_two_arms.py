# expect: clean
from trainer import *


class Job(Trainer):
    def micro(self, images, labels):
        loss = self.criterion(self.model(images), labels)
        (loss * (1.0 / self.accumulate)).backward()

    def step(self, step, images, labels):
        if (step + 1) % 8 != 0:
            with self.model.no_sync():
                self.micro(images, labels)
        else:
            self.micro(images, labels)
            self.optimizer.step()
            self.optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
