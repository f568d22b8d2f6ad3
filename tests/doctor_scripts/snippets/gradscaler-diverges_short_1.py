# expect: gradscaler-diverges
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

net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for step in range(3):
    opt.zero_grad()
    scaler.scale(nn.functional.mse_loss(net(xb), yb)).backward()
    scaler.unscale_(opt)
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    scaler.step(opt)
    scaler.update()
dist.destroy_process_group()
