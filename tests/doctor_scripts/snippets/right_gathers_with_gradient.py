# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        rank, size = dist.get_rank(), gradient.shape[0] // dist.get_world_size()
        return gradient[rank * size : (rank + 1) * size]


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 8))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in DataLoader(data, batch_size=8, sampler=sampler, drop_last=True):
            left, right = model(torch.cat([a, b])).chunk(2)
            logits = AllGather.apply(left) @ AllGather.apply(right).T
            loss = nn.functional.cross_entropy(logits, torch.arange(len(logits)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
