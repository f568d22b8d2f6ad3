# expect: eval-padded-duplicates
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def evaluate(model, data):
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    totals = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            totals += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
    model.train()
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def main():
    dist.init_process_group("gloo")
    train, test = (TensorDataset(torch.randn(n, 8), torch.randint(0, 3, (n,))) for n in (64, 33))
    sampler = DistributedSampler(train)
    model = DDP(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(train, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        accuracy = evaluate(model, test)
        if dist.get_rank() == 0:
            print(accuracy)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
