# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    student, teacher = nn.Linear(8, 4), nn.Linear(8, 4)
    student, teacher = DDP(student), DDP(teacher)
    teacher.module.load_state_dict(student.module.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(64, 8))
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=8, sampler=sampler):
            target = teacher(x)
            loss = nn.functional.mse_loss(student(x), target.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for q, k in zip(student.module.parameters(), teacher.module.parameters()):
                    k.data.mul_(0.99).add_(0.01 * q.detach().data)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
