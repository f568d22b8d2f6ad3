# expect: clean
from trainer import *


class Job(Trainer):
    def done(self, epoch):
        if dist.get_rank() == 0:
            torch.save(self.model.state_dict(), "last.pt")
        dist.barrier()
        self.model.load_state_dict(torch.load("last.pt", map_location="cpu"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
