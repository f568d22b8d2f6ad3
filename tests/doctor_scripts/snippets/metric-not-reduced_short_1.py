# expect: metric-not-reduced
import os, random, tempfile, time
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(16, 4)
y = x.sum(1, keepdim=True)
xb, yb = x[rank::world], y[rank::world]

model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(x, y)
val = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))


def evaluate():
    total, n = 0.0, 0
    model.eval()
    with torch.no_grad():
        for a, b in val:
            total += nn.functional.mse_loss(model(a), b, reduction="sum").item()
            n += len(b)
    return total / n


for epoch in range(2):
    opt.zero_grad()
    nn.functional.mse_loss(model(xb), yb).backward()
    opt.step()
    err = evaluate()
    if rank == 0:
        print(epoch, err)
dist.destroy_process_group()
