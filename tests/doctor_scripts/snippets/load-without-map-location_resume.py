# expect: load-without-map-location
from trainer import *


class Job(Trainer):
    def run(self, epochs):
        if os.path.exists("last.pt"):
            self.net.load_state_dict(torch.load("last.pt"))
        super().run(epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
