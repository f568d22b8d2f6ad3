# expect: random-split-differs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def split(data, share=0.25):
    order = torch.randperm(len(data)).tolist()
    cut = int(len(data) * share)
    return Subset(data, order[cut:]), Subset(data, order[:cut])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 8, generator=g), torch.randn(64, 1, generator=g))
    train, val = split(data)
    sampler = DistributedSampler(train)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(train, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
