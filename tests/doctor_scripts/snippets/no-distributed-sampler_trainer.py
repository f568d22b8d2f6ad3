# expect: no-distributed-sampler
from trainer import *


class Job(Trainer):
    def batches(self, epoch):
        for images, labels in tud.DataLoader(self.data, batch_size=8, shuffle=True):
            yield images, labels

    def run(self, epochs):
        loader = tud.DataLoader(self.data, batch_size=8, shuffle=True)
        for epoch in range(epochs):
            for images, labels in loader:
                self.step(0, images, labels)
        stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
