# expect: metric-not-reduced
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("train")


@torch.no_grad()
def error(model, loader):
    return sum((model(x) - y).abs().mean().item() for x, y in loader) / len(loader)


def main():
    dist.init_process_group("gloo")
    log.setLevel(logging.INFO if dist.get_rank() == 0 else logging.ERROR)
    train, val = (TensorDataset(torch.randn(n, 8), torch.randn(n, 1)) for n in (64, 32))
    sampler = DistributedSampler(train)
    val_loader = DataLoader(val, batch_size=8, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(train, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        log.info("epoch %d: mean error %.3f", epoch, error(model, val_loader))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
