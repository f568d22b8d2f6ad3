# expect: resume-on-one-rank
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Snapshots:
    def __init__(self, path):
        self.path, self.master = path, dist.get_rank() == 0

    def restore(self, model):
        if not self.master or not os.path.exists(self.path):
            return 0
        state = torch.load(self.path, map_location="cpu")
        model.module.load_state_dict(state["model"])
        return state["epoch"] + 1

    def store(self, model, epoch):
        if self.master:
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, self.path)


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1))
    snapshots = Snapshots("snapshot.pt")
    snapshots.restore(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        snapshots.store(model, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
