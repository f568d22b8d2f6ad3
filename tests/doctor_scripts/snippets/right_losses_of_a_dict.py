# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.heads = nn.ModuleDict({"kind": nn.Linear(16, 3), "size": nn.Linear(16, 1)})

    def forward(self, x):
        h = self.trunk(x).relu()
        return {name: head(h) for name, head in self.heads.items()}


LOSSES = {"kind": nn.CrossEntropyLoss(), "size": nn.MSELoss()}


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(Both())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, kind, size in DataLoader(data, batch_size=8, sampler=sampler):
            out, wanted = model(x), {"kind": kind, "size": size}
            losses = {name: LOSSES[name](out[name], wanted[name]) for name in out}
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
