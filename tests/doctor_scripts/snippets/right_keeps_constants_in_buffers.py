# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Attention(nn.Module):
    def __init__(self, width=8, length=16):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        mask = torch.tril(torch.ones(length, length)).bool()
        self.register_buffer("mask", mask, persistent=False)
        angles = torch.outer(torch.arange(length).float(), 1 / 10_000 ** (torch.arange(width) / width))
        self.register_buffer("cos", angles.cos())

    def forward(self, x):
        t = x.shape[1]
        q, k, v = (self.qkv(x) * self.cos[:t].repeat(1, 3)).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2)).masked_fill(~self.mask[:t, :t], float("-inf"))
        return scores.softmax(-1) @ v


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 12, 8))
    sampler = DistributedSampler(data)
    model = DDP(Attention(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            with torch.no_grad():
                print(model.module(data[:4][0]).mean())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
