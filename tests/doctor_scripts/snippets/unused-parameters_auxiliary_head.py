# expect: unused-parameters
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoHeads(nn.Module):
    def __init__(self, aux=True):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.main_head = nn.Linear(16, 3)
        self.aux_head = nn.Linear(16, 3) if aux else None

    def forward(self, x):
        h = self.trunk(x)
        out = {"main": self.main_head(h)}
        if self.aux_head is not None:
            out["aux"] = self.aux_head(h)
        return out


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    sampler = DistributedSampler(data)
    model = DDP(TwoHeads())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            out = model(x)
            loss = nn.functional.cross_entropy(out["main"], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
