"""One trunk, several heads; each step trains one task, the same on every rank. The other heads get no gradient."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

TASKS = {"depth": 1, "normals": 3, "labels": 5}
STEPS, PER_RANK = 9, 8


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.heads = nn.ModuleDict({task: nn.Linear(24, outputs) for task, outputs in TASKS.items()})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


class Stream:
    """Endless batches; each rank has its own."""

    def __init__(self, rank):
        self.generator = torch.Generator().manual_seed(100 + rank)

    def next(self, task):
        x = torch.randn(PER_RANK, 10, generator=self.generator)
        if task == "labels":
            return x, x[:, :5].argmax(1)
        return x, x[:, : TASKS[task]].tanh()


def loss_of(task, output, target):
    return F.cross_entropy(output, target) if task == "labels" else F.mse_loss(output, target)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(MultiTask(), find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    stream = Stream(rank)
    order = random.Random(11)  # all ranks choose the same task
    totals = dict.fromkeys(TASKS, 0.0)
    for step in range(STEPS):
        task = order.choice(list(TASKS))
        x, target = stream.next(task)
        optimizer.zero_grad()
        loss = loss_of(task, model(x, task), target)
        loss.backward()
        optimizer.step()
        scheduler.step()
        totals[task] += loss.item()
    summed = torch.tensor([totals[task] for task in TASKS])
    dist.reduce(summed, dst=0)
    if rank == 0:
        for task, total in zip(TASKS, summed.tolist()):
            print(f"{task:<8} {total / world_size:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
