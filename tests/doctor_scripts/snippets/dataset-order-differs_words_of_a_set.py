# expect: dataset-order-differs
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Speakers(Dataset):
    def __init__(self, root):
        stems = {path.stem.split("-")[0] for path in pathlib.Path(root).glob("*.flac")}
        self.speakers = list(stems)
        self.root = root

    def __len__(self):
        return len(self.speakers)

    def __getitem__(self, index):
        return torch.load(f"{self.root}/{self.speakers[index]}.pt", map_location="cpu"), index


def main():
    dist.init_process_group("gloo")
    data = Speakers("speech")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DDP(nn.Linear(40, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
