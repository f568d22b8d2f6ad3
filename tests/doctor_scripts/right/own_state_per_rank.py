"""Denoiser that can be resumed to the bit: weights once, generator states of each rank in a file of its own."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def seed_everything(seed):
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


class Denoiser(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(9, width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 8)
        )

    def forward(self, noisy, level):
        return self.net(torch.cat([noisy, level], dim=1))


class Checkpoints:
    def __init__(self, folder, rank):
        self.folder, self.rank = folder, rank
        os.makedirs(folder, exist_ok=True)

    @property
    def shared(self):
        return os.path.join(self.folder, "weights.pt")

    @property
    def own(self):
        return os.path.join(self.folder, f"generator-{self.rank}.pt")

    def save(self, step, model, optimizer):
        torch.save({"generator": torch.get_rng_state(), "step": step}, self.own)
        if self.rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, self.shared)
        dist.barrier()

    def load(self, model, optimizer):
        if not os.path.exists(self.shared):
            return 0
        state = torch.load(self.shared, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(torch.load(self.own, map_location="cpu")["generator"])
        return state["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--folder", default="denoiser")
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed_everything(args.seed)
    clean = torch.randn(64, 8)
    mine = clean[rank::world_size]
    net = Denoiser(32)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    seed_everything(args.seed + rank)
    checkpoints = Checkpoints(args.folder, rank)
    first = checkpoints.load(net, optimizer)
    model = DDP(net)
    for step in range(first, args.steps):
        batch = mine[torch.randint(len(mine), (8,))]
        level = torch.rand(8, 1)
        noise = torch.randn_like(batch)
        loss = (model(batch + level * noise, level) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % args.save_every == 0:
            checkpoints.save(step + 1, model.module, optimizer)
            print(f"[rank {rank}] step {step + 1} of {args.steps}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
