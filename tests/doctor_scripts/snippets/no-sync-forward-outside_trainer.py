# expect: no-sync-forward-outside
from trainer import *


class Job(Trainer):
    def step(self, step, images, labels):
        loss = self.criterion(self.model(images), labels) / self.accumulate
        if (step + 1) % 4:
            with self.model.no_sync():
                loss.backward()
        else:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
