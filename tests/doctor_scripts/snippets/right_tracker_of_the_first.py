# expect: clean
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import wandb


class NoLogger:
    def log(self, values):
        pass


def make_logger(args, rank):
    if rank != 0 or args.quiet:
        return NoLogger()
    return wandb.init(project=args.project)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--project", default="demo")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    logger = make_logger(args, dist.get_rank())
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            logger.log({"loss": loss.item()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
