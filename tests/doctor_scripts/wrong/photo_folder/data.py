"""Synthetic photos; augmentation with numpy."""

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split


class Photos(Dataset):
    def __init__(self, count=96):
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(2, (count,), generator=generator)
        self.pixels = torch.rand(count, 16, generator=generator) + 0.3 * self.labels[:, None]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        shift = np.random.randint(0, 4)
        return self.pixels[index].roll(shift), self.labels[index]


def init_worker(worker_id):
    np.random.seed(1000 + worker_id)  # expect: worker-seed-identical


def make_loaders(batch_size, workers):
    photos = Photos()
    train, valid = random_split(photos, [80, 16])  # expect: random-split-differs
    sampler = DistributedSampler(train, shuffle=True)
    train_loader = DataLoader(  # expect: worker-seed-identical
        train, batch_size=batch_size, sampler=sampler, num_workers=workers, worker_init_fn=init_worker
    )
    return train_loader, DataLoader(valid, batch_size=16), sampler
