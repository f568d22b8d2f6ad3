# expect: clean
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Context:
    def __init__(self):
        dist.init_process_group("nccl")
        self.rank = dist.get_rank()
        self.local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local)
        self.device = torch.device("cuda", self.local)


def main():
    context = Context()
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1).to(context.device), device_ids=[context.local], output_device=context.local)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best = torch.tensor(float("inf"), device=context.device)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler, pin_memory=True):
            x, y = x.to(context.device, non_blocking=True), y.to(context.device, non_blocking=True)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            best = torch.minimum(best, loss.detach().to(best.dtype))
    dist.all_reduce(best, op=dist.ReduceOp.MIN)
    if context.rank == 0:
        print(best.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
