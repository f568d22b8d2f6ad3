"""Entry point: parses options, puts the parts together."""

import argparse

import torch
import torch.distributed as dist
from engine import CheckpointManager, Engine
from loaders import DataModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(args):
    dist.init_process_group(args.backend)
    is_main = dist.get_rank() == 0
    torch.manual_seed(args.seed)
    data = DataModule(args.batch_size, dist.get_world_size())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

    def log(text):
        if is_main:
            print(text)

    Engine(model, data, optimizer, CheckpointManager(args.out), log).fit(args.epochs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    main(parser.parse_args())
