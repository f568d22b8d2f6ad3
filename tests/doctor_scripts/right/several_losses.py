"""An image-to-image GAN with several tasks: backward is called several times for one step, and nothing is accumulated."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

TASKS = {"depth": 1, "edges": 1, "parts": 4}


class Scenes(Dataset):
    def __init__(self, count):
        self.images = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        return image, {name: image[:1].repeat(channels, 1, 1) for name, channels in TASKS.items()}


class Block(nn.Module):
    def __init__(self, width, keep):
        super().__init__()
        self.conv, self.keep = nn.Conv2d(width, width, 3, padding=1), keep

    def forward(self, x):
        if self.training and torch.rand(1).item() > self.keep:
            return x  # stochastic depth: its parameters go unused now and then
        return x + F.relu(self.conv(x))


class Translator(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width, 0.99) for _ in range(2))
        self.heads = nn.ModuleDict({name: nn.Conv2d(width, channels, 1) for name, channels in TASKS.items()})

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return {name: head(h) for name, head in self.heads.items()}


class Critic(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, width, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(width * 16, 1))

    def forward(self, x):
        return self.net(x)


def add(loss):
    """What each loss adds to the gradients."""
    loss.backward()


def criticise(critic, optimizer, real, fake):
    optimizer.zero_grad()
    for images, wanted in ((real, 1.0), (fake.detach(), 0.0)):
        scores = critic(images)
        F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, wanted)).backward()
    optimizer.step()


def translate(model, optimizer, images, targets):
    optimizer.zero_grad()
    made = model(images)
    add(sum(F.l1_loss(made[name], target) for name, target in targets.items()))
    optimizer.step()
    return made["depth"]


def fit_heads(model, optimizers, images, targets):
    """Each task after the other, on the same images."""
    for optimizer in optimizers:
        optimizer.zero_grad()
        for name in TASKS:
            made = model(images)
            F.mse_loss(torch.cat([made[n] if n == name else made[n].detach() for n in TASKS], 1), torch.cat(list(targets.values()), 1)).backward()
        optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    data = Scenes(48)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    model = DDP(Translator(), find_unused_parameters=True)
    critic = DDP(Critic())
    probe = nn.Linear(3, 1)  # of each rank's own images; never shared
    makes = torch.optim.Adam(model.parameters(), lr=args.lr)
    judges = torch.optim.Adam(critic.parameters(), lr=args.lr)
    watches = torch.optim.SGD(probe.parameters(), lr=0.1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, targets in loader:
            fake = translate(model, makes, images, targets)
            criticise(critic, judges, targets["depth"], fake)
            fit_heads(model, [makes], images, targets)
            watches.zero_grad()
            F.mse_loss(probe(images.mean((2, 3))), images.amax((1, 2, 3))[:, None]).backward()
            watches.step()
        if rank == 0:
            print("finished", epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
