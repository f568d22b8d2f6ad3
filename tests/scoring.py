"""Samples to score, cut into micro-batches and dealt to workers: for tests of metrics."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.lanes import lanes_of
from paceline.metrics.over_lanes import LaneMetrics, add, computed

__all__ = ["CLASSES", "Batch", "alone", "cut", "dealt", "samples"]

CLASSES = 4

Batch = tuple[Tensor, Tensor, Tensor]
"""Logits, targets, values."""


def samples(count: int, seed: int = 0) -> Batch:
    """Logits that often hit, targets of which some are ignored, and values of very different size."""
    generator = torch.Generator().manual_seed(seed)
    target_N = torch.randint(0, CLASSES, (count,), generator=generator)
    logits_NC = torch.randn(count, CLASSES, generator=generator)
    logits_NC[torch.arange(count), target_N] += 1
    target_N[torch.rand(count, generator=generator) < 0.1] = -100
    values_N = torch.randn(count, generator=generator).double() * 10.0 ** torch.randint(
        -6, 7, (count,), generator=generator
    )
    return logits_NC, target_N, values_N


def cut(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Consecutive micro-batches of these sizes; what is left is the last."""
    rest = len(batch[0]) - sum(sizes)
    parts = [part.split([*sizes, rest]) for part in batch]
    return list(zip(*parts, strict=True))


def dealt(scored: Sequence[Mapping[str, Any]], lane_of: Sequence[int], lanes: int, workers: int) -> dict[str, Any]:
    """The scores as ``workers`` workers compute them, each from the micro-batches of its lanes, sent by pickle."""
    parts = []
    for rank in range(workers):
        mine: LaneMetrics = {}
        for lane in lanes_of(rank, workers, lanes):
            for metrics, its_lane in zip(scored, lane_of, strict=True):
                if its_lane == lane:
                    add(mine, lane, metrics)
        parts.append(pickle.loads(pickle.dumps(mine)))
    return computed(parts, lanes)


def alone(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The scores of one micro-batch with everything in it."""
    return dealt([metrics], [0], 1, 1)
