"""A classifier on whatever accelerator there is, whose ranks and loader workers are seeded as the documentation says."""

import argparse
import contextlib
import io
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


class Jittered(Dataset):
    def __init__(self, count):
        self.x = torch.randn(count, 10, generator=torch.Generator().manual_seed(2))
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.1 * float(np.random.rand()) + 0.1 * random.random(), self.y[index]


def choose_device(local_rank):
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(local_rank)
        return torch.accelerator.current_accelerator()
    return torch.device("cpu")


def summarize(model):
    """What a library prints is caught; rank 0 alone shows it."""
    caught = io.StringIO()
    with contextlib.redirect_stdout(caught):
        print(model)
    return caught.getvalue()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    device = choose_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)
    np.random.seed(args.seed + rank)
    random.seed(args.seed + rank)
    data = Jittered(64)
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1, worker_init_fn=seed_worker)
    model = DDP(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2)).to(device))
    text = summarize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        right = torch.zeros(2, device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            scores = model(x)
            loss = F.cross_entropy(scores, y, weight=torch.tensor([0.3, 0.7], device=device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += torch.tensor([(scores.argmax(1) == y).sum(), len(y)], device=device)
        dist.all_reduce(right)
        if rank == 0:
            print(text if epoch == 0 else "", f"epoch {epoch}: {(right[0] / right[1]).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
