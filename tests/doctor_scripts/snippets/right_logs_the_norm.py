# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def largest_gradient(model):
    norms = torch.stack([p.grad.detach().norm() for p in model.parameters() if p.grad is not None])
    largest = norms.max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            norm = largest_gradient(model)
            optimizer.step()
        if dist.get_rank() == 0:
            print("largest gradient", norm)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
