# expect: clean
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class History(defaultdict):
    def __init__(self):
        super().__init__(list)

    def mean(self, name):
        value = torch.tensor(self[name]).mean()
        dist.all_reduce(value, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
        return value.item() / (1 if dist.get_backend() == "nccl" else dist.get_world_size())


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = History()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history["loss"].append(loss.detach())
        mean = history.mean("loss")
        if dist.get_rank() == 0:
            print(f"{epoch}: {mean:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
