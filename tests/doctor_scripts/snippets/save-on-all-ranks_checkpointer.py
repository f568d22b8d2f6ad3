# expect: save-on-all-ranks
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Checkpointer:
    def __init__(self, folder, model, optimizer):
        self.folder, self.model, self.optimizer = folder, model, optimizer
        os.makedirs(folder, exist_ok=True)

    def save(self, epoch):
        state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": epoch}
        path = os.path.join(self.folder, f"epoch_{epoch:03d}.pth")
        torch.save(state, path)


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = Checkpointer("checkpoints", model, optimizer)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        checkpointer.save(epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
