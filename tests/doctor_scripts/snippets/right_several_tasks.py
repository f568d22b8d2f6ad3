# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MultiTask(nn.Module):
    def __init__(self, tasks):
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.heads = nn.ModuleDict({task: nn.Linear(16, 1) for task in tasks})

    def forward(self, x, task):
        return self.heads[task](torch.relu(self.trunk(x)))


TASKS = ("depth", "normals", "edges")


def main():
    dist.init_process_group("gloo")
    model = DDP(MultiTask(TASKS), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 3))
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            for index, task in enumerate(TASKS):
                nn.functional.mse_loss(model(x, task), y[:, index : index + 1]).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
