# expect: accumulation-not-normalised
from trainer import *


class Job(Trainer):
    def step(self, step, images, labels):
        loss = self.criterion(self.model(images), labels)
        loss.backward()
        if (step + 1) % 4 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
