# expect: save-on-all-ranks
from trainer import *


class Job(Trainer):
    def save(self, name, **more):
        torch.save({"model": self.net.state_dict(), **more}, os.path.join("runs", name))

    def done(self, epoch):
        self.save(f"epoch_{epoch}.pt", epoch=epoch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
