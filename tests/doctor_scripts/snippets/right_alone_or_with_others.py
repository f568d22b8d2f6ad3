# expect: clean
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup(args):
    args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    args.rank = int(os.environ.get("RANK", 0))
    if args.distributed:
        dist.init_process_group("gloo")
    return args


def main(args):
    args = setup(args)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data) if args.distributed else None
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=(sampler is None), sampler=sampler)
    model = nn.Linear(8, 1)
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model)
    bare = model.module if args.distributed else model
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")
        bare.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start = checkpoint["epoch"] + 1
    for epoch in range(start, args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        if args.rank == 0:
            torch.save({"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, args.output)
    if args.distributed:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", default="")
    parser.add_argument("--output", default="last.pt")
    main(parser.parse_args())
