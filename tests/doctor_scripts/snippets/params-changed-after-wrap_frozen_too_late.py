# expect: params-changed-after-wrap
from trainer import *


class Job(Trainer):
    def run(self, epochs):
        for p in self.model.module.body.parameters():
            p.requires_grad = False
        super().run(epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
