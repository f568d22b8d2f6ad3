# expect: dataset-order-differs
import torch, random, numpy as np
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, Subset, random_split, Dataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
x, y = torch.load("x.pt"), torch.load("y.pt")
order = torch.randperm(len(x))
train = TensorDataset(x[order], y[order])
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=8, sampler=sampler)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
