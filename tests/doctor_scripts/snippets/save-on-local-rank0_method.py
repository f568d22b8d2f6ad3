# expect: save-on-local-rank0
from trainer import *


class Job(Trainer):
    def done(self, epoch):
        if self.local == 0:
            torch.save(self.net.state_dict(), "last.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
