"""Regression where only rank 0 evaluates, on the plain module, and tells the others when to stop."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Standardised(nn.Module):
    """Keeps the training set's mean and spread with the weights."""

    def __init__(self, inputs):
        super().__init__()
        self.register_buffer("mean", inputs.mean(0))
        self.register_buffer("spread", inputs.std(0))
        self.net = nn.Sequential(nn.Linear(inputs.shape[1], 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net((x - self.mean) / self.spread)


def make_data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = 3 + 2 * torch.randn(count, 6, generator=generator)
    return TensorDataset(x, (x[:, :1] * x[:, 1:2]).sqrt().nan_to_num())


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.since = patience, float("inf"), 0

    def update(self, value):
        if value < self.best:
            self.best, self.since = value, 0
        else:
            self.since += 1
        return self.since >= self.patience


@torch.no_grad()
def validate(net, loader):
    net.eval()
    error = sum(nn.functional.mse_loss(net(x), y, reduction="sum").item() for x, y in loader)
    net.train()
    return error / len(loader.dataset)


def run(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    is_main = rank == 0
    train_set, valid_set = make_data(192, 0), make_data(61, 1)
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)
    per_rank = args.batch_size // dist.get_world_size()
    train_loader = DataLoader(train_set, batch_size=per_rank, sampler=sampler, drop_last=True)
    valid_loader = DataLoader(valid_set, batch_size=32) if is_main else None

    torch.manual_seed(args.seed)
    model = DDP(Standardised(train_set.tensors[0]))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    stopper = EarlyStopping(patience=2)
    stop = torch.zeros(1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if is_main:
            error = validate(model.module, valid_loader)
            print(f"epoch {epoch}: validation error {error:.4f}")
            if error <= stopper.best:
                torch.save(model.module.state_dict(), args.checkpoint)
            stop[0] = float(stopper.update(error))
        dist.broadcast(stop, src=0)  # the others wait here until rank 0 has evaluated
        if stop.item() > 0:
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="regressor.pt")
    run(parser.parse_args())
