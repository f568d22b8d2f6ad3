# expect: stale-epoch-in-workers
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Curriculum(Dataset):
    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((8,), float(index)) + 0.1 * self.epoch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    data = Curriculum()
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data, batch_size=8, sampler=sampler, num_workers=args.workers, persistent_workers=args.workers > 0
    )
    model = DDP(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        data.epoch = epoch
        for x in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
