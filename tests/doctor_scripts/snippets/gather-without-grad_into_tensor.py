# expect: gather-without-grad
from trainer import *


class Job(Trainer):
    def step(self, step, images, labels):
        z = self.model(images)
        out = torch.empty(z.size(0) * self.world, 2, device=z.device)
        dist.all_gather_into_tensor(out, z)
        loss = F.cross_entropy(z @ out.T, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
