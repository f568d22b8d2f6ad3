# expect: gather-without-grad
from trainer import *


class Job(Trainer):
    def everyone(self, z):
        pool = [torch.zeros_like(z) for _ in range(self.world)]
        dist.all_gather(pool, z.contiguous())
        return torch.cat(pool, dim=0)

    def step(self, step, images, labels):
        z = F.normalize(self.model(images), dim=-1)
        logits = z @ self.everyone(z).t()
        loss = F.cross_entropy(logits, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
