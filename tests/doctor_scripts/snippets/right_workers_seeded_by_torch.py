# expect: clean
import random

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    numpy.random.seed(seed)
    random.seed(seed)


class Noisy(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.from_numpy(numpy.random.randn(8).astype("float32"))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(17 + dist.get_rank())
    data = Noisy()
    sampler = DistributedSampler(data, seed=17)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2, worker_init_fn=seed_worker)
    model = DDP(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
