# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    sampler = DistributedSampler(data)
    net = build()
    for stage, frozen in enumerate((True, False)):
        net[0].requires_grad_(not frozen)
        model = DDP(net)
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
        for epoch in range(2):
            sampler.set_epoch(2 * stage + epoch)
            for x, y in DataLoader(data, batch_size=8, sampler=sampler):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
