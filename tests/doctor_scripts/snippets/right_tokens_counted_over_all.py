# expect: clean
from trainer import *


class Job(Trainer):
    def step(self, step, images, labels):
        losses = F.cross_entropy(self.model(images), labels, reduction="sum")
        tokens = (labels != 0).sum()
        dist.all_reduce(tokens)
        loss = losses * self.world / tokens
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
