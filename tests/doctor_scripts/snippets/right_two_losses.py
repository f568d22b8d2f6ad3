# expect: clean
from trainer import *


class Job(Trainer):
    def step(self, step, images, labels):
        self.optimizer.zero_grad()
        out = self.model(images)
        F.cross_entropy(out, labels).backward(retain_graph=True)
        F.mse_loss(out, labels).backward()
        self.optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
