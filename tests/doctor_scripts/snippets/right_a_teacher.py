# expect: clean
from trainer import *


class Job(Trainer):
    def run(self, epochs):
        import copy

        self.teacher = copy.deepcopy(self.net).eval()
        for p in self.teacher.parameters():
            p.requires_grad_(False)
        super().run(epochs)

    def step(self, step, images, labels):
        with torch.no_grad():
            target = self.teacher(images).softmax(-1)
        loss = F.kl_div(self.model(images).log_softmax(-1), target, reduction="batchmean")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
