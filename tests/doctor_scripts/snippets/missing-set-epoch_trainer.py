# expect: missing-set-epoch
from trainer import *


class Job(Trainer):
    def batches(self, epoch):
        for images, labels in self.loader:
            yield images, labels


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
