# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Gaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mean, self.spread = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        h = self.body(x).relu()
        return self.mean(h), self.spread(h), (h, x)


def divergence(mean, spread):
    mean, spread = mean.float(), spread.float()
    return (mean.square() + spread.exp() - 1 - spread).sum(1).mean()


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8))
    sampler = DistributedSampler(data)
    model = DDP(Gaussian())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=8, sampler=sampler):
            mean, spread, (hidden, _) = model(x)
            optimizer.zero_grad()
            divergence(mean, spread).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
