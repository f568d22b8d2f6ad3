# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, count, rank=None, world=None):
        self.count = count
        self.rank = dist.get_rank() if rank is None else rank
        self.world = dist.get_world_size() if world is None else world

    def mine(self):
        info = torch.utils.data.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return range(self.rank * workers + worker, self.count, self.world * workers)

    def __iter__(self):
        for index in self.mine():
            yield torch.randn(8, generator=torch.Generator().manual_seed(index))


def main():
    dist.init_process_group("gloo")
    model = DDP(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Stream(256), batch_size=8)
    for _ in range(2):
        for x in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
