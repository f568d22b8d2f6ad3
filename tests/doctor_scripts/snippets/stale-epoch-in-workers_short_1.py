# expect: stale-epoch-in-workers
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


class D(Dataset):
    epoch = 0

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return self.epoch


d = D()
s = DistributedSampler(d)
loader = DataLoader(d, batch_size=2, sampler=s, num_workers=1, persistent_workers=True)
for epoch in range(3):
    s.set_epoch(epoch)
    d.epoch = epoch
    print(rank, [int(v) for b in loader for v in b])
dist.destroy_process_group()
