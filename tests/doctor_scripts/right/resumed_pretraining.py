"""Masked pretraining that shares one cache file and one lock, shards by hand, and resumes into the wrapper."""

import argparse
import builtins
import contextlib
import fcntl
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset


def print_on_main_only(is_main):
    builtin_print = builtins.print

    def print(*args, **kwargs):
        force = kwargs.pop("force", False)
        if is_main or force:
            builtin_print("[main]", *args, **kwargs)

    builtins.print = print


@contextlib.contextmanager
def locked(name):
    with open(name + ".lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
        fcntl.flock(handle, fcntl.LOCK_UN)


class Cached(Dataset):
    """Rows that all ranks fill into one file, each its own part of it."""

    def __init__(self, name, count, width):
        rank, world = dist.get_rank(), dist.get_world_size()
        if rank == 0:
            np.memmap(name, dtype=np.float32, mode="w+", shape=(count, width)).flush()
        dist.barrier()
        self.rows = np.memmap(name, dtype=np.float32, mode="r+", shape=(count, width))
        noise = np.random.default_rng(0).normal(size=(count, width))
        self.rows[rank::world] = noise[rank::world]
        self.rows.flush()
        dist.barrier()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return torch.from_numpy(np.array(self.rows[index]))


class Autoencoder(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.encode = nn.Linear(width, hidden)
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.decode = nn.Linear(hidden, width)

    def forward(self, x, mask):
        return self.decode(torch.relu(self.encode(torch.where(mask, self.mask_token, x))))


def my_part(dataset, epoch):
    """A permutation that is the same on all ranks, repeated at its end until all have as many."""
    rank, world = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(epoch)).tolist()
    order += order[: -len(order) % world]
    return Subset(dataset, order[rank::world])


def load(path, model, optimizer):
    if not os.path.exists(path):
        return 0
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])  # `module.` on both sides
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"] + 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=75)
    parser.add_argument("--batch-size", type=int, default=13)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoint", default="pretraining.pt")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    print_on_main_only(dist.get_rank() == 0)
    with locked("cache"):
        width = 12  # what is to be looked up by one process at a time
    data = Cached("cache.bin", args.samples, width)
    torch.manual_seed(5 + dist.get_rank())
    model = DDP(Autoencoder(width, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = load(args.checkpoint, model, optimizer)
    print("starts at epoch", start)
    for epoch in range(start, args.epochs):
        total = torch.zeros(2)
        for x in DataLoader(my_part(data, epoch), batch_size=args.batch_size, drop_last=True):
            mask = torch.rand_like(x) < 0.5
            loss = F.mse_loss(model(x, mask), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(total)
        print(f"epoch {epoch}: {(total[0] / total[1]).item():.4f}")
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, args.checkpoint)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
