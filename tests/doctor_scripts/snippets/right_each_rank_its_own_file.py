# expect: clean
from trainer import *


class Job(Trainer):
    def done(self, epoch):
        torch.save(torch.get_rng_state(), os.path.join("rng", "rank%d.pt" % self.rank))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
