# expect: clean
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Ema(nn.Module):
    def __init__(self, net, decay=0.99):
        super().__init__()
        self.net, self.decay = deepcopy(net), decay
        self.net.requires_grad_(False)

    def update(self, net):
        with torch.no_grad():
            for kept, new in zip(self.net.state_dict().values(), net.state_dict().values()):
                kept.copy_(self.decay * kept + (1 - self.decay) * new)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    net = nn.Linear(8, 1)
    ema = Ema(net) if rank == 0 else None
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if ema is not None:
                ema.update(model.module)
        if rank == 0:
            torch.save({"ema": ema.net.state_dict()}, "ema.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
