# expect: optimizer-stale-params
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    net = nn.Sequential()
    net.body = nn.Linear(8, 16)
    net.head = nn.Linear(16, 10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.head = nn.Linear(16, 3)
    return DDP(net), optimizer


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, optimizer = build()
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
