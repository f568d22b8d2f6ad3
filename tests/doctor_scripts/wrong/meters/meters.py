"""Running averages."""

import torch
import torch.distributed as dist


class Meter:
    def __init__(self, name):
        self.name, self.total, self.count = name, 0.0, 0

    def add(self, value, count):
        self.total += float(value) * count
        self.count += count

    def global_mean(self):
        """Over all ranks."""
        packed = torch.tensor([self.total, float(self.count)])
        dist.all_reduce(packed)  # expect: rank-conditional-collective
        return (packed[0] / packed[1]).item()


class Board:
    def __init__(self, *names):
        self.meters = {name: Meter(name) for name in names}

    def add(self, count, **values):
        for name, value in values.items():
            self.meters[name].add(value, count)

    def report(self):
        return ", ".join(f"{name} {meter.global_mean():.4f}" for name, meter in self.meters.items())
