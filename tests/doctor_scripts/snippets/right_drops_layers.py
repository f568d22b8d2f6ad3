# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Dropped(nn.Module):
    def __init__(self, depth=4, p=0.2):
        super().__init__()
        self.layers, self.p = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth)), p

    def forward(self, x, skip):
        for index, layer in enumerate(self.layers):
            if index == skip:
                continue
            x = x + layer(x)
        return x


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8))
    sampler = DistributedSampler(data)
    model = DDP(Dropped(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (x,) in enumerate(DataLoader(data, batch_size=8, sampler=sampler)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x, step % 5), x).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
