# expect: iterable-not-sharded
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Lines(IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        info = get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        with open(self.path) as file:
            for number, line in enumerate(file):
                if number % every == first:
                    yield torch.tensor([float(ord(c)) for c in line[:8].ljust(8)])


def main():
    dist.init_process_group("gloo")
    loader = DataLoader(Lines(__file__), batch_size=4, num_workers=2)
    model = DDP(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    for _ in range(2):
        for x in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
