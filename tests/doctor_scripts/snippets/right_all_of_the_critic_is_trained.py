# expect: clean
"""A GAN that says in each step that all of the critic is trained, as it is; its generator learns through the critic's
module, whose own gradients are thrown away."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 4))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    maker, critic = DDP(nn.Linear(2, 4)), DDP(nn.Linear(4, 1))
    of_maker, of_critic = torch.optim.Adam(maker.parameters()), torch.optim.Adam(critic.parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            made = maker(torch.randn(len(real), 2))
            for parameter in critic.parameters():
                parameter.requires_grad_(True)
            of_critic.zero_grad()
            (critic(made.detach()).mean() - critic(real).mean()).backward()
            of_critic.step()
            of_maker.zero_grad()
            (-critic.module(made).mean()).backward()
            of_maker.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
