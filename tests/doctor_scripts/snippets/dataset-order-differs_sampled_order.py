# expect: dataset-order-differs
import torch, random, numpy as np
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, Subset, random_split, Dataset

dist.init_process_group("gloo")
rank = dist.get_rank()
random.seed(rank)
class Files(Dataset):
    def __init__(self, n):
        self.order = random.sample(range(n), n)
    def __len__(self):
        return len(self.order)
    def __getitem__(self, i):
        return torch.load(f"{self.order[i]}.pt")
train = Files(100)
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
