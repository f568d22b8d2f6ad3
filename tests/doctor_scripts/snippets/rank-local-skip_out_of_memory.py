# expect: rank-local-skip
from trainer import *


class Job(Trainer):
    def run(self, epochs):
        for epoch in range(epochs):
            for images, labels in self.batches(epoch):
                try:
                    self.step(0, images, labels)
                except RuntimeError:
                    continue
        stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
