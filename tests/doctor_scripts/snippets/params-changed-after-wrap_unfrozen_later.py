# expect: params-changed-after-wrap
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Tuner:
    def __init__(self):
        self.net = nn.ModuleDict({"body": nn.Linear(8, 16), "head": nn.Linear(16, 3)})
        self.set_body(False)
        self.model = DDP(Both(self.net))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def set_body(self, on):
        for p in self.net["body"].parameters():
            p.requires_grad_(on)

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)
            if epoch == 1:
                self.set_body(True)
            for x, y in loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()


class Both(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        return self.parts["head"](self.parts["body"](x).relu())


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    Tuner().fit(DataLoader(data, batch_size=8, sampler=DistributedSampler(data)), 2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
