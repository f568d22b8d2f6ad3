# expect: rank-conditional-collective
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def report(values):
    if dist.get_rank() != 0:
        return
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values)
    print(sum(gathered) / len(gathered))


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = 0.0
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        report(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
