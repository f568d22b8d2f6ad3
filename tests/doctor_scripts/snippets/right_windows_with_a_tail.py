# expect: clean
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def windows(loader, size):
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(80, 5), torch.randn(80, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(5, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for window in windows(loader, 3):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(window):
            with nullcontext() if i == len(window) - 1 else model.no_sync():
                (torch.nn.functional.mse_loss(model(x), y) / len(window)).backward()
        optimizer.step()
dist.destroy_process_group()
