# expect: data-dependent-collective
from trainer import *


class Job(Trainer):
    def step(self, step, images, labels):
        loss = self.criterion(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if (labels == 3).any():
            count = (labels == 3).sum()
            dist.all_reduce(count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
