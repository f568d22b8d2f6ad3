# expect: global-rank-as-device
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup(args):
    args.rank = int(os.environ["RANK"])
    args.device = f"cuda:{args.rank}"
    torch.cuda.set_device(args.device)
    dist.init_process_group("nccl", init_method="env://")
    return args


def main():
    args = setup(argparse.Namespace(lr=0.1))
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1).to(args.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x.to(args.device)), y.to(args.device)).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
