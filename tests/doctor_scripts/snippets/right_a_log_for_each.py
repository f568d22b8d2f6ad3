# expect: clean
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Log:
    def __init__(self, folder):
        os.makedirs(folder, exist_ok=True)
        self.rank = dist.get_rank()
        self.path = os.path.join(folder, f"rank{self.rank}.pt")
        self.losses = []

    def add(self, loss):
        self.losses.append(loss.item())

    def flush(self):
        torch.save(self.losses, self.path)
        print(f"[{self.rank}] {self.losses[-1]:.3f}")


def main():
    dist.init_process_group("gloo")
    log = Log("logs")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.add(loss)
        log.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
