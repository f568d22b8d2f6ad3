# expect: resume-on-one-rank
from trainer import *


class Job(Trainer):
    def run(self, epochs):
        if self.is_main() and os.path.exists("last.pt"):
            state = torch.load("last.pt", map_location="cpu")
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        super().run(epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
