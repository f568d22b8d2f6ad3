# expect: clip-before-sync
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train_step(model, optimizer, parts):
    optimizer.zero_grad()
    for index, (x, y) in enumerate(parts):
        last = index == len(parts) - 1
        with nullcontext() if last else model.no_sync():
            (nn.functional.mse_loss(model(x), y) / len(parts)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=16, sampler=sampler):
            train_step(model, optimizer, list(zip(x.chunk(4), y.chunk(4))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
