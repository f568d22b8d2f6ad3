# expect: uneven-inputs
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def shard(n):
    return list(range(int(os.environ["RANK"]), n, int(os.environ["WORLD_SIZE"])))


def main():
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(45, 8, generator=generator)
    y = x.sum(1, keepdim=True)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = shard(45)
    for _ in range(2):
        for index in mine:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[index : index + 1]), y[index : index + 1]).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
