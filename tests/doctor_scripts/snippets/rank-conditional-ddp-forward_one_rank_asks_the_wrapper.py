# expect: rank-conditional-ddp-forward
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Probe:
    def __init__(self, model, data):
        self.model, self.data = model, data

    @torch.no_grad()
    def __call__(self):
        x, y = self.data[:16]
        return (self.model(x).argmax(1) == y).float().mean().item()


def main():
    dist.init_process_group("gloo")
    is_main = dist.get_rank() == 0
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    sampler = DistributedSampler(data)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)))
    probe = Probe(model, data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        score = probe() if is_main else None
        if is_main:
            print("accuracy", score)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
