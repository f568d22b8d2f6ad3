# expect: stale-epoch-in-workers
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Crops(Dataset):
    def __init__(self, n):
        self.n, self.epoch = n, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(self.epoch * self.n + index)
        return torch.randn(8, generator=g)


def main(workers=2):
    dist.init_process_group("gloo")
    data = Crops(64)
    sampler = DistributedSampler(data)
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = DataLoader(data, batch_size=8, sampler=sampler, **options)
    model = DDP(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for part in (sampler, data):
            part.set_epoch(epoch)
        for x in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
