# expect: load-without-barrier
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

path = os.path.join(tempfile.gettempdir(), f"w_{os.getppid()}.pt")
net = nn.Linear(4, 1)
if rank == 0:
    time.sleep(0.5)
    torch.save(net.state_dict(), path)
net.load_state_dict(torch.load(path, map_location="cpu"))
dist.destroy_process_group()
