# expect: collective-order-differs
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

a, b = torch.ones(1), torch.ones(2)
ops = [lambda: dist.all_reduce(a), lambda: dist.all_reduce(b)]
if rank == 1:
    dist.all_reduce(b)
    dist.all_reduce(a)
else:
    dist.all_reduce(a)
    dist.all_reduce(b)
dist.destroy_process_group()
