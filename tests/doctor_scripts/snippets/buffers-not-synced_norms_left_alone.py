# expect: buffers-not-synced
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Sequential(conv(1, 4), conv(4, 8)), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.stem(x).mean((2, 3)))


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        hits = sum((model(x).argmax(1) == y).sum() for x, y in loader)
    model.train()
    dist.all_reduce(hits)
    return hits.item()


def main():
    dist.init_process_group("gloo")
    train, test = (TensorDataset(torch.randn(n, 1, 8, 8), torch.randint(0, 3, (n,))) for n in (64, 32))
    sampler = DistributedSampler(train)
    test_loader = DataLoader(test, batch_size=8, sampler=DistributedSampler(test, shuffle=False))
    options = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
    model = DDP(Net(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(train, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        evaluate(model, test_loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
