# expect: clean
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Teacher:
    def __init__(self, student, decay):
        self.net = copy.deepcopy(student).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def follow(self, student):
        for mine, other in zip(self.net.parameters(), student.parameters()):
            mine.mul_(self.decay).add_(other, alpha=1 - self.decay)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    teacher = Teacher(net, 0.99)
    student = DDP(net)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(64, 8))
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=8, sampler=sampler):
            with torch.no_grad():
                target = teacher.net(x)
            loss = nn.functional.mse_loss(student(x + 0.1 * torch.randn_like(x)), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            teacher.follow(student.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
