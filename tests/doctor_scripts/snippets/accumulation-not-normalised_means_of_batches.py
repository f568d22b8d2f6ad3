# expect: accumulation-not-normalised
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def grad_step(model, optimizer, batches, criterion):
    optimizer.zero_grad()
    total = 0.0
    for x, y in batches:
        loss = criterion(model(x), y)
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total / len(batches)


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.MSELoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        held = []
        for batch in DataLoader(data, batch_size=4, sampler=sampler):
            held.append(batch)
            if len(held) == 4:
                grad_step(model, optimizer, held, criterion)
                held = []
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
