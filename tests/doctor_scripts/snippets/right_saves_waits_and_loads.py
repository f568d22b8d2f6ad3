# expect: clean
from trainer import *


class Job(Trainer):
    def done(self, epoch):
        path = f"epoch{epoch}.pt"
        if self.is_main():
            torch.save({"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}, path)
        dist.barrier()
        state = torch.load(path, map_location=f"cuda:{self.local}", weights_only=True)
        self.model.module.load_state_dict(state["model"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
