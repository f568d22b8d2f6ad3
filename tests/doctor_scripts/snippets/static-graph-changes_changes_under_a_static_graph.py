# expect: static-graph-changes
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Warm(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.extra = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, epoch):
        y = self.body(x)
        if epoch >= 1:
            y = y + self.extra(x)
        return y


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8))
    sampler = DistributedSampler(data)
    model = DDP(Warm(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x, epoch), x).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
