# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def collect(predictions):
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(predictions, everyone, dst=0)
    return None if everyone is None else [p for part in everyone for p in part]


def main():
    dist.init_process_group("gloo")
    train, val = (TensorDataset(torch.randn(n, 8), torch.randint(0, 3, (n,))) for n in (64, 32))
    sampler = DistributedSampler(train)
    val_loader = DataLoader(val, batch_size=8, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(train, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            mine = [(model.module(x).argmax(1) == y).float().mean().item() for x, y in val_loader]
        scores = collect(mine)
        if scores is not None:
            print("accuracy", sum(scores) / len(scores))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
