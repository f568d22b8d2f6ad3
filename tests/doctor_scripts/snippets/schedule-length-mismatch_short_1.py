# expect: schedule-length-mismatch
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

data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler)
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
total = 3 * len(data) // 2
sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=total)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        opt.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        opt.step()
        sched.step()
dist.destroy_process_group()
