"""A small GAN: two wrapped models, two optimizers, noise that differs by rank."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LATENT = 4


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(LATENT, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))

    def forward(self, z):
        return self.net(z)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def ring(count):
    angle = 2 * torch.pi * torch.rand(count, generator=torch.Generator().manual_seed(9))
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1))


def train(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    data = ring(128)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size // dist.get_world_size(), sampler=sampler, drop_last=True)
    generator, critic = DDP(Generator()), DDP(Critic())
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99))
    torch.manual_seed(args.seed + 1 + rank)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            fake = generator(torch.randn(len(real), LATENT))
            scores = critic(torch.cat([real, fake.detach()]))
            labels = torch.cat([torch.ones(len(real)), torch.zeros(len(real))])
            critic_optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(scores, labels).backward()
            critic_optimizer.step()

            generator_optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(critic(fake), torch.ones(len(real))).backward()
            generator_optimizer.step()
        if rank == 0:
            with torch.no_grad():
                radius = generator.module(torch.randn(64, LATENT)).norm(dim=1).mean().item()
            print(f"epoch {epoch}: mean radius {radius:.3f}")
            os.makedirs(args.out, exist_ok=True)
            torch.save(generator.module.state_dict(), f"{args.out}/generator-{epoch:03}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--out", default="samples")
    train(parser.parse_args())
