# expect: iterable-not-sharded
import itertools
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Shuffled(IterableDataset):
    def __init__(self, source, size, seed):
        self.source, self.size, self.seed, self.epoch = source, size, seed, 0

    def __iter__(self):
        rng = random.Random(self.seed + self.epoch)
        self.epoch += 1
        info = torch.utils.data.get_worker_info()
        stream = iter(self.source) if info is None else itertools.islice(self.source, info.id, None, info.num_workers)
        buffer = list(itertools.islice(stream, self.size))
        for sample in stream:
            place = rng.randrange(len(buffer))
            yield buffer[place]
            buffer[place] = sample
        rng.shuffle(buffer)
        yield from buffer


class Source:
    def __iter__(self):
        for index in range(256):
            g = torch.Generator().manual_seed(index)
            yield torch.randn(8, generator=g)


def main():
    dist.init_process_group("gloo")
    stream = Shuffled(Source(), size=32, seed=0)
    model = DDP(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x in DataLoader(stream, batch_size=8):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
