"""Data."""

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class DataModule:
    def __init__(self, batch_size, world_size):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(160, 5, generator=generator)
        self.train_set = TensorDataset(x, x.prod(1, keepdim=True))
        self.batch_size = batch_size // world_size
        self.sampler = DistributedSampler(self.train_set, shuffle=True)

    def train_loader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, sampler=self.sampler)  # expect: missing-set-epoch
