# expect: clean
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms


@contextlib.contextmanager
def first(rank):
    if rank > 0:
        dist.barrier()
    yield
    if rank == 0:
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    with first(int(os.environ["LOCAL_RANK"])):
        data = datasets.MNIST("data", train=True, download=True, transform=transforms.ToTensor())
    sampler = DistributedSampler(data)
    model = DDP(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=64, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
