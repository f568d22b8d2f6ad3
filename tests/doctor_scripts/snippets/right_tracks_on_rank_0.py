# expect: clean
from trainer import *


class Job(Trainer):
    def run(self, epochs):
        import wandb

        if self.is_main():
            wandb.init(project="nets")
        wandb_mode = wandb.init(mode="disabled" if self.rank else "online")
        super().run(epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
