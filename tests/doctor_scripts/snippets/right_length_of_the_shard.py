# expect: clean
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Cosine(torch.optim.lr_scheduler.LambdaLR):
    def __init__(self, optimizer, steps):
        super().__init__(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))


def steps_of(sampler, batch, epochs):
    return epochs * math.ceil(len(sampler) / batch)


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = Cosine(optimizer, steps_of(sampler, 8, 2))

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            schedule.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
