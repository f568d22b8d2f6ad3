# expect: clean
from trainer import *


class Job(Trainer):
    def step(self, step, images, labels):
        from torch.distributed.nn.functional import all_gather

        z = self.model(images)
        loss = F.cross_entropy(z @ torch.cat(all_gather(z)).T, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
