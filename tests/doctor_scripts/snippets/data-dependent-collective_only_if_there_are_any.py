# expect: data-dependent-collective
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def positives(logits, labels):
    hit = labels == 1
    correct = torch.tensor(0.0)
    if hit.any():
        correct = (logits[hit].argmax(1) == 1).float().sum()
        dist.all_reduce(correct)
    return correct


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            logits = model(x)
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, y).backward()
            optimizer.step()
            positives(logits.detach(), y)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
