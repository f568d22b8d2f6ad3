"""Trains on photos."""

import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
from data import make_loaders
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@torch.no_grad()
def evaluate(net, loader):
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    cfg = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    set_seed(cfg.seed + rank)
    train_loader, valid_loader, sampler = make_loaders(cfg.batch_size // world_size, cfg.workers)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        accuracy = evaluate(model.module, valid_loader)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
