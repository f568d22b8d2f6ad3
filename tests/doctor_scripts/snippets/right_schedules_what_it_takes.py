# expect: clean
from trainer import *


class Job(Trainer):
    def run(self, epochs):
        steps = epochs * len(self.loader)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=steps)
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for images, labels in self.loader:
                self.step(0, images, labels)
                self.schedule.step()
        stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
