# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def evaluate(net, data):
    net.eval()
    hits = sum((net(x).argmax(1) == y).sum().item() for x, y in DataLoader(data, batch_size=16))
    net.train()
    return hits / len(data)


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
        if dist.get_rank() == 0:
            print("accuracy", evaluate(model.module, test))
            torch.save(model.module.state_dict(), "best.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
