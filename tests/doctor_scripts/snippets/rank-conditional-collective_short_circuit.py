# expect: rank-conditional-collective
from trainer import *


class Job(Trainer):
    def done(self, epoch):
        loss = torch.zeros(1)
        self.is_main() and dist.all_reduce(loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
