"""Flat gradient memory: parameters packed into buckets, and the sets of buckets that hold a worker's partial sums.

A bucket is what one exchange moves. Reduction is elementwise, so where buckets begin and end cannot move a bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.determinism import ALIGNMENT
from paceline.reduction.tree import Node, fold

__all__ = ["Bucket", "FlatSet", "LaneSums", "assign"]


@dataclass(frozen=True)
class Bucket:
    """Parameters ``members`` (places in the parameter list) at element ``offsets`` of one flat tensor of ``size``."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int
    dtype: torch.dtype
    device: torch.device


def assign(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Packs parameters into buckets of about ``bucket_bytes``, the last parameter first.

    Backward reaches the last parameters first, so that bucket 0 is full, and on its way, before the others.
    Each view starts at a 64-byte boundary: a kernel's path, and so its bits, can depend on alignment.
    """
    buckets: list[Bucket] = []
    members: list[int] = []
    offsets: list[int] = []
    size = 0

    def close() -> None:
        nonlocal size
        if members:
            first = parameters[members[0]]
            buckets.append(Bucket(tuple(members), tuple(offsets), size, first.dtype, first.device))
        members.clear()
        offsets.clear()
        size = 0

    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        if members:
            first = parameters[members[0]]
            full = (size + parameter.numel()) * parameter.element_size() > bucket_bytes
            if full or (parameter.dtype, parameter.device) != (first.dtype, first.device):
                close()
        members.append(index)
        offsets.append(size)
        grain = math.lcm(ALIGNMENT, parameter.element_size()) // parameter.element_size()
        size += -(-parameter.numel() // grain) * grain
    close()
    return buckets


class FlatSet:
    """One flat tensor per bucket, and in them one view per parameter, in the parameters' order."""

    def __init__(self, parameters: Sequence[nn.Parameter], buckets: Sequence[Bucket]) -> None:
        self.flats = [torch.zeros(bucket.size, dtype=bucket.dtype, device=bucket.device) for bucket in buckets]
        views: dict[int, Tensor] = {}
        for bucket, flat in zip(buckets, self.flats, strict=True):
            for index, offset in zip(bucket.members, bucket.offsets, strict=True):
                parameter = parameters[index]
                part = flat[offset : offset + parameter.numel()]
                views[index] = part.as_strided(parameter.shape, _gradient_strides(parameter))
        self.views = [views[index] for index in range(len(parameters))]

    def zero_(self) -> None:
        for flat in self.flats:
            flat.zero_()


def _gradient_strides(parameter: nn.Parameter) -> tuple[int, ...]:
    """Those of the parameter itself, as in plain torch (channels_last, for one): fused optimizers walk the memory of
    both side by side, and would pair other elements."""
    return torch.empty_like(parameter, device="meta").stride()  # dense, whatever the parameter is


class LaneSums:
    """A worker's gradients of one step: one set for the lane at work, and the folded sums of the lanes before it.

    With n = lanes / workers a power of two, ``1 + log2(n)`` sets live at once; a worker of any other number n of lanes
    starts and ends inside nodes, and needs up to ``1 + 2 * floor(log2(n))``. Freed ones are used again.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], buckets: Sequence[Bucket], lanes: int) -> None:
        self._new: Callable[[], FlatSet] = lambda: FlatSet(parameters, buckets)
        self._lanes = lanes
        self._free: list[FlatSet] = []
        self._parts: list[tuple[Node, FlatSet]] = []

    def begin(self, lane: int) -> FlatSet:
        """The zeroed set into which ``lane`` accumulates. Folds the lanes before it first."""
        self._parts = fold(self._lanes, self._parts, self._add)
        current = self._free.pop() if self._free else self._new()
        current.zero_()
        self._parts.append(((lane, lane + 1), current))
        return current

    def parts(self, bucket: int) -> list[tuple[Node, Tensor]]:
        """The partial sums of one bucket, not folded since the last `begin`: the exchange folds them as it leaves."""
        return [(node, part.flats[bucket]) for node, part in self._parts]

    @property
    def result(self) -> FlatSet:
        """The set that receives the global sum: the leftmost, into which everything folds."""
        return self._parts[0][1]

    def reset(self) -> None:
        """Frees every set for the next step."""
        self._free += [part for _, part in self._parts]
        self._parts = []

    def _add(self, left: FlatSet, right: FlatSet) -> FlatSet:
        for into, flat in zip(left.flats, right.flats, strict=True):
            into.add_(flat)
        self._free.append(right)
        return left
