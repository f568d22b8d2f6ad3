# expect: rank-dependent-graph
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Stack(nn.Module):
    def __init__(self, depth=4, p=0.25):
        super().__init__()
        self.layers, self.p = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth)), p

    def forward(self, x):
        for layer in self.layers:
            if self.training and random.random() < self.p:
                continue
            x = x + layer(x).tanh()
        return x


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8))
    sampler = DistributedSampler(data)
    model = DDP(Stack())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
