# expect: replicas-start-different
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Worker:
    def __init__(self, seed):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed + self.rank)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def sync_gradients(self):
        for p in self.net.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad.div_(self.world)

    def fit(self, loader):
        for x, y in loader:
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.net(x), y).backward()
            self.sync_gradients()
            self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    worker = Worker(seed=3)
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 8, generator=g), torch.randn(64, 1, generator=g))
    worker.fit(DataLoader(data, batch_size=8, sampler=DistributedSampler(data)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
