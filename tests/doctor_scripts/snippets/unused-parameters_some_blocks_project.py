# expect: unused-parameters
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Layer(nn.Module):
    def __init__(self, width, last):
        super().__init__()
        self.inner, self.gate, self.last = nn.Linear(width, width), nn.Linear(width, width), last

    def forward(self, x):
        y = self.inner(x)
        if not self.last:
            y = y * self.gate(x).sigmoid()
        return y


class Stack(nn.Module):
    def __init__(self, width=8, depth=4):
        super().__init__()
        self.layers = nn.ModuleList()
        for i in range(depth):
            self.layers.append(Layer(width, last=i == depth - 1))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8))
    sampler = DistributedSampler(data)
    model = DDP(Stack())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
