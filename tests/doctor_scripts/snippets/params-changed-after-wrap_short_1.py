# expect: params-changed-after-wrap
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

net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
model = DDP(net)
net.add_module("extra", nn.Linear(1, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    opt.zero_grad()
    nn.functional.mse_loss(model(xb), yb).backward()
    opt.step()
dist.destroy_process_group()
