# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def trainable(net, on):
    for p in net.parameters():
        p.requires_grad_(on)


def main():
    dist.init_process_group("gloo")
    generator, critic = DDP(nn.Linear(4, 8)), DDP(nn.Linear(8, 1))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(64, 8))
    sampler = DistributedSampler(data)
    bce = nn.BCEWithLogitsLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (real,) in DataLoader(data, batch_size=8, sampler=sampler):
            fake = generator(torch.randn(len(real), 4))
            trainable(critic, True)
            c_optimizer.zero_grad()
            scores = critic(torch.cat([real, fake.detach()]))
            bce(scores, torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])).backward()
            c_optimizer.step()
            trainable(critic, False)
            g_optimizer.zero_grad()
            bce(critic(fake), torch.ones(len(real), 1)).backward()
            g_optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
