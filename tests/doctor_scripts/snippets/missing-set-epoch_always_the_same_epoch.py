# expect: missing-set-epoch
from trainer import *


class Job(Trainer):
    def batches(self, epoch):
        self.sampler.set_epoch(0)
        yield from self.loader


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
