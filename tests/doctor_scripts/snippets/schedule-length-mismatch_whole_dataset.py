# expect: schedule-length-mismatch
from trainer import *


class Job(Trainer):
    def run(self, epochs):
        self.loader = tud.DataLoader(self.data, batch_size=32, sampler=self.sampler)
        steps = epochs * (len(self.data) // 32)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=steps)
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
