# expect: metric-not-reduced
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


logger = logging.getLogger(__name__)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    correct = total = 0
    for x, y in loader:
        correct += (model(x).argmax(-1) == y).sum().item()
        total += len(y)
    model.train()
    return correct / total


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train, val = (TensorDataset(torch.randn(n, 8), torch.randint(0, 3, (n,))) for n in (64, 32))
    sampler = DistributedSampler(train)
    val_loader = DataLoader(val, batch_size=8, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(train, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        value = accuracy(model, val_loader)
        if rank == 0:
            logger.info("epoch %d accuracy %.3f", epoch, value)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
