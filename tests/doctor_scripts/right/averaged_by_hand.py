"""Data parallelism without DDP: gradients are flattened, added up and divided; the learning rate follows a loss of all."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spread(module):
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, src=0)


class Averager:
    """Takes the mean of all ranks' gradients, in one message."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.count = dist.get_world_size()

    def __call__(self):
        flat = torch.cat([p.grad.view(-1) for p in self.parameters])
        dist.all_reduce(flat)
        flat.div_(self.count)
        begin = 0
        for p in self.parameters:
            p.grad.copy_(flat[begin : begin + p.numel()].view_as(p))
            begin += p.numel()


@torch.no_grad()
def held_out_loss(net, loader):
    total = torch.zeros(2)
    for x, y in loader:
        total += torch.tensor([nn.functional.mse_loss(net(x), y, reduction="sum"), y.numel()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(4))
    train, held = TensorDataset(x[:64], x[:64].sin()), TensorDataset(x[64 + rank :: world], x[64 + rank :: world].sin())
    sampler = DistributedSampler(train)
    loader, held_loader = DataLoader(train, batch_size=8, sampler=sampler), DataLoader(held, batch_size=8)
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
    spread(net)
    average = Averager(net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(inputs), targets).backward()
            average()
            optimizer.step()
        loss = held_out_loss(net, held_loader)
        scheduler.step(loss)
        if rank == 0:
            print(f"epoch {epoch}: {loss:.4f} at {optimizer.param_groups[0]['lr']:g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
