# expect: rank-local-early-stop
from trainer import *


class Job(Trainer):
    def run(self, epochs):
        began = time.monotonic()
        for epoch in range(epochs):
            for images, labels in self.batches(epoch):
                self.step(0, images, labels)
            if time.monotonic() - began > 3600:
                break
        stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
