# expect: find-unused-unneeded
from trainer import *


class Job(Trainer):
    def run(self, epochs):
        self.model = DistributedDataParallel(self.net, device_ids=[self.local], find_unused_parameters=True)
        super().run(epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
