# expect: rank-local-buffer-overwritten
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Normalised(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.out = nn.Linear(width, 1)
        self.register_buffer("center", torch.zeros(width))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.center = 0.9 * self.center + 0.1 * x.mean(0)
        return self.out(x - self.center)


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(Normalised())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
