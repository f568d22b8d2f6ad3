"""Train a small network on 2 workers with `DistributedDataParallel`: 4096 samples, batches of 64 each, 3 epochs.

    torchrun --standalone --nproc_per_node=2 examples/plain/train.py

The workers start from different weights on purpose: wrapping hands out worker 0's. Saved is the model inside, since the
wrapper's keys all begin with ``module.``. Another number of workers gives other bits.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: first imported by DDP, after init_process_group, it would keep the group alive
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WEIGHTS = Path("runs/plain-train.pt")


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))


def make_data() -> TensorDataset:
    """4096 points in 32 dimensions, and on which side of a plane each lies."""
    generator = torch.Generator().manual_seed(0)
    x_NF = torch.randn(4096, 32, generator=generator)
    return TensorDataset(x_NF, (x_NF @ torch.randn(32, 1, generator=generator) > 0).float())


def checksums(net: nn.Module) -> str:
    """Of all workers' weights."""
    told = [""] * dist.get_world_size()
    dist.all_gather_object(told, f"{sum(p.double().sum().item() for p in net.parameters()):.6f}")
    return " ".join(told)


def train(net: nn.Module) -> None:
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = make_data()
    sampler: DistributedSampler[object] = DistributedSampler(data, shuffle=True, seed=0)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        losses = []
        for x_BF, y_B1 in DataLoader(data, batch_size=64, sampler=sampler):
            loss = F.binary_cross_entropy_with_logits(model(x_BF), y_B1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {len(losses)} batches per worker, loss {mean:.4f}")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # different weights, deliberately
    net = make_net()
    before = checksums(net)
    train(net)
    after = checksums(net)
    if dist.get_rank() == 0:
        print(f"checksums: {before} before, {after} after")
        WEIGHTS.parent.mkdir(exist_ok=True)
        torch.save(net.state_dict(), WEIGHTS)
        make_net().load_state_dict(torch.load(WEIGHTS, weights_only=True))
        print("saved:", *net.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
