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

N, BATCH, EPOCHS = 16, 2, 3
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)


def warm(step):
    return min(1.0, step / (EPOCHS * len(data) // BATCH))


sched = torch.optim.lr_scheduler.LambdaLR(opt, warm)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        opt.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        opt.step()
        sched.step()
dist.destroy_process_group()
