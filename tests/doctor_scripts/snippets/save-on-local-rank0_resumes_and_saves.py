# expect: save-on-local-rank0
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, loader, every, path):
        self.local = int(os.environ["LOCAL_RANK"])
        self.loader, self.every, self.path, self.first = loader, every, path, 0
        if os.path.exists(path):
            state = torch.load(path, map_location="cpu")
            model.load_state_dict(state["model"])
            self.first = state["epoch"] + 1
        self.model = DDP(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def save(self, epoch):
        torch.save({"model": self.model.module.state_dict(), "epoch": epoch}, self.path)

    def train(self, epochs):
        for epoch in range(self.first, epochs):
            self.loader.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(x), y).backward()
                self.optimizer.step()
            if self.local == 0 and epoch % self.every == 0:
                self.save(epoch)


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    Trainer(nn.Linear(8, 1), loader, 2, "snapshot.pt").train(4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
