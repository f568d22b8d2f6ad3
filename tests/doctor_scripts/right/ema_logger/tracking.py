"""Meters that agree over ranks, a moving average of weights, and printing on one rank."""

import builtins
import copy
from collections import defaultdict

import torch
import torch.distributed as dist


def only_main_prints(is_main):
    """Replaces print: other ranks speak only when forced."""
    original = builtins.print

    def quiet(*words, force=False, **options):
        if is_main or force:
            original(*words, **options)

    builtins.print = quiet


class Smoothed:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, count):
        self.total += value * count
        self.count += count

    def synchronize(self):
        packed = torch.tensor([self.total, self.count], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(packed)
        self.total, self.count = packed[0].item(), int(packed[1].item())

    @property
    def mean(self):
        return self.total / max(1, self.count)


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(Smoothed)

    def update(self, count, **values):
        for name, value in values.items():
            self.meters[name].update(value.item() if isinstance(value, torch.Tensor) else value, count)

    def synchronize_between_processes(self):
        for name in sorted(self.meters):
            self.meters[name].synchronize()

    def __str__(self):
        return "  ".join(f"{name} {meter.mean:.4f}" for name, meter in sorted(self.meters.items()))


class Average:
    """Exponential moving average; the same on every rank, as the weights are."""

    def __init__(self, net, decay):
        self.net, self.decay = copy.deepcopy(net).requires_grad_(False).eval(), decay

    @torch.no_grad()
    def update(self, net):
        for mine, new in zip(self.net.parameters(), net.parameters()):
            mine.lerp_(new, 1 - self.decay)
