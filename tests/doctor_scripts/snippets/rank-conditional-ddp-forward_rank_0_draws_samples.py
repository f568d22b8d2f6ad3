# expect: rank-conditional-ddp-forward
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.time = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8)), nn.Linear(1, 1)
        self.register_buffer("noised", torch.linspace(0, 1, 10))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(self.noised[t].reshape(-1, 1))], 1))


@torch.no_grad()
def sample(model, count):
    x = torch.randn(count, 8)
    for t in reversed(range(10)):
        x = x - 0.1 * model(x, torch.full((count,), t))
    return x


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8))
    sampler = DistributedSampler(data)
    model = DDP(Denoiser())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=8, sampler=sampler):
            t = torch.randint(0, 10, (len(x),))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x, t), x).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(sample(model, 4), f"samples{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
