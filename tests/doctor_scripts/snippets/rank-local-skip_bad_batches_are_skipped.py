# expect: rank-local-skip
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Engine:
    def __init__(self, model, loader, sampler):
        self.model, self.loader, self.sampler = model, loader, sampler
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.criterion = nn.MSELoss()

    def train_one_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        for x, y in self.loader:
            loss = self.criterion(self.model(x), y)
            if not math.isfinite(loss.item()):
                self.optimizer.zero_grad()
                continue
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    engine = Engine(DDP(nn.Linear(8, 1)), DataLoader(data, batch_size=8, sampler=sampler), sampler)
    for epoch in range(2):
        engine.train_one_epoch(epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
