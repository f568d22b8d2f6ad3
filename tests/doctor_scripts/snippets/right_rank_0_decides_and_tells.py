# expect: clean
from trainer import *


class Job(Trainer):
    def run(self, epochs):
        for epoch in range(epochs):
            for images, labels in self.batches(epoch):
                self.step(0, images, labels)
            enough = torch.zeros(1, device=self.local)
            if self.is_main() and time.time() > 1e9:
                enough += 1
            dist.broadcast(enough, src=0)
            if enough.item():
                break
        stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
