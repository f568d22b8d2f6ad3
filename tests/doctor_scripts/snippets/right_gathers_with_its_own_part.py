# expect: clean
from trainer import *


class Job(Trainer):
    def step(self, step, images, labels):
        z = F.normalize(self.model(images), dim=-1)
        pool = [torch.zeros_like(z) for _ in range(self.world)]
        dist.all_gather(pool, z)
        pool[self.rank] = z
        loss = F.cross_entropy(z @ torch.cat(pool).T, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
