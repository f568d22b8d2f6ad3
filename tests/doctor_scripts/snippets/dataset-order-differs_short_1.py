# expect: dataset-order-differs
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


class Rows(Dataset):
    def __init__(self):
        self.rows = list(range(24))
        np.random.default_rng(rank).shuffle(self.rows)

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return self.rows[i]


data = Rows()
sampler = DistributedSampler(data, shuffle=False)
seen = [int(i) for b in DataLoader(data, batch_size=4, sampler=sampler) for i in b]
dist.destroy_process_group()
