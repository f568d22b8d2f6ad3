# expect: clean
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def groups(loader, size):
    batches = iter(loader)
    while True:
        held = list(islice(batches, size))
        if not held:
            break
        yield held


def main(size=2):
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for held in groups(DataLoader(data, batch_size=8, sampler=sampler), size):
            optimizer.zero_grad()
            for x, y in held:
                (nn.functional.mse_loss(model(x), y) / size).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
