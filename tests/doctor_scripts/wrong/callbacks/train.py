"""A trainer with callbacks."""

import os

import torch
import torch.distributed as dist
from callbacks import Plateau
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Trainer:
    def __init__(self, model, optimizer, callbacks, rank):
        self.model, self.optimizer, self.callbacks, self.rank = model, optimizer, callbacks, rank
        self.should_stop = False

    def train_epoch(self, loader):
        self.model.train()
        for x, y in loader:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def score(self, loader):
        self.model.eval()
        correct = count = 0
        for x, y in loader:
            correct += (self.model.module(x).argmax(1) == y).sum().item()
            count += len(y)
        return correct / count

    def fit(self, train_loader, valid_loader, epochs):
        for epoch in range(epochs):
            train_loader.sampler.set_epoch(epoch)
            self.train_epoch(train_loader)
            score = self.score(valid_loader)
            for callback in self.callbacks:
                callback.on_epoch_end(self, score)
            if self.should_stop:
                break  # expect: rank-local-early-stop


def datasets():
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(120, 4, generator=generator)
    y = (x[:, 0] > 0).long()
    y[100:110] = 1 - y[100:110]
    return TensorDataset(x[:80], y[:80]), TensorDataset(x[80:], y[80:])


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    train_set, valid_set = datasets()
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_loader = DataLoader(train_set, batch_size=16 // world_size, sampler=DistributedSampler(train_set))
    size = len(valid_set) // world_size
    valid_loader = DataLoader(Subset(valid_set, range(rank * size, (rank + 1) * size)), batch_size=10)
    Trainer(model, optimizer, [Plateau(patience=2)], rank).fit(train_loader, valid_loader, epochs=12)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
