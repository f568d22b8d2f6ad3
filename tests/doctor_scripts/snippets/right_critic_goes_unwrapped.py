# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Gan:
    def __init__(self):
        self.maker, self.critic = DDP(nn.Linear(4, 8)), DDP(nn.Linear(8, 1))
        self.maker_optimizer = torch.optim.Adam(self.maker.parameters(), lr=1e-3)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=1e-3)
        self.bce = nn.BCEWithLogitsLoss()

    def critic_step(self, real, z):
        with torch.no_grad():
            fake = self.maker.module(z)
        scores = self.critic(torch.cat([real, fake]))
        wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(z), 1)])
        self.critic_optimizer.zero_grad()
        self.bce(scores, wanted).backward()
        self.critic_optimizer.step()

    def maker_step(self, z):
        loss = self.bce(self.critic.module(self.maker(z)), torch.ones(len(z), 1))
        self.maker_optimizer.zero_grad()
        loss.backward()
        self.maker_optimizer.step()


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8))
    sampler = DistributedSampler(data)
    gan = Gan()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (real,) in DataLoader(data, batch_size=8, sampler=sampler):
            gan.critic_step(real, torch.randn(len(real), 4))
            gan.maker_step(torch.randn(len(real), 4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
