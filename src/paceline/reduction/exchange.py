"""Sums one bucket over all lanes of all workers, in the tree's shape, and divides once by the global weight.

[Note: why point to point] Every worker sends chunk *j* of each of its partial sums to worker *j*; the owner folds them
in lane order and sends the finished chunk back. Traffic equals a ring all-reduce when workers divide the lanes evenly.
Sends and receives straight from and into the buckets measured as fast as gloo's own all-reduce; its all-to-all copies
once more, and takes half again as long.

[Note: bf16 travels, float32 divides] With ``compress: bf16`` a worker adds its lanes in float32 and rounds that sum to
bf16; the backend adds the workers' sums in bf16; what comes back is divided in float32. So an element is rounded once
by each worker and up to W - 1 times in the sum, by 2**-8 at most each time; lanes cost no rounding. torch's own
``bf16_compress_hook`` divides first, by W, as its float16 twin must, whose range ends at 65504. bf16 has float32's
range: sums need no such care, and the one division by the global weight stays the last thing that happens.

[Note: pipeline] While the finished chunks of one bucket travel back, the partial sums of the next are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from paceline.lanes import lanes_of
from paceline.reduction.tree import Node, cover, fold
from paceline.team import Team

__all__ = ["Exchange"]

GRAIN = 16
"""Chunks start at multiples of this many elements: 64 bytes of float32."""


class Exchange:
    """The exchange of one team. Every method runs *in a job* of the team (see `Team.submit`) and is collective.

    Args:
        gradients: ``exact`` folds in the tree's shape; ``allreduce`` leaves the order of additions to the backend.
        compress: of float32 gradients, with ``allreduce``: see [Note: bf16 travels, float32 divides].
    """

    def __init__(
        self,
        team: Team,
        lanes: int,
        gradients: Literal["exact", "allreduce"],
        compress: Literal["none", "bf16"] = "none",
    ) -> None:
        self._team, self._lanes, self._gradients, self._compress = team, lanes, gradients, compress
        self._nodes: list[list[Node]] = []
        for rank in range(team.world_size):
            mine = lanes_of(rank, team.world_size, lanes)
            self._nodes.append(cover(lanes, mine.start, mine.stop))
        self._inbox: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._coming_back: Callable[[], None] = _nothing

    def reduce(self, parts: Sequence[tuple[Node, Tensor]], into: Tensor, divisor: Tensor) -> None:
        """``into`` becomes the sum of everybody's ``parts``, divided by ``divisor`` (0-dim); whole after `finish`.

        Args:
            parts: this worker's partial sums of a bucket, left to right; overwritten. ``into`` is the first of them.
        """
        parts = fold(self._lanes, parts, lambda left, right: left.add_(right))
        if self._gradients == "allreduce":
            for _, part in parts[1:]:
                into.add_(part)
            self._all_reduce(into)
            into.div_(divisor)
        elif self._team.world_size == 1:
            into.div_(divisor)
        else:
            self._reduce_by_owners(parts, into, divisor)

    def finish(self) -> None:
        """Waits for what is still on its way."""
        self._coming_back()
        self._coming_back = _nothing

    def _all_reduce(self, tensor: Tensor) -> None:
        """By the backend. One worker alone rounds too: that shows what rounding does to a run."""
        if self._compress == "bf16" and tensor.dtype == torch.float32:
            rounded = tensor.bfloat16()
            self._team.all_reduce(rounded)
            tensor.copy_(rounded)
        else:
            self._team.all_reduce(tensor)

    def _reduce_by_owners(self, parts: Sequence[tuple[Node, Tensor]], into: Tensor, divisor: Tensor) -> None:
        """See [Note: why point to point] and [Note: pipeline]."""
        team, size = self._team, into.numel()
        others = [rank for rank in range(team.world_size) if rank != team.rank]
        mine = self._chunk(team.rank, size)
        inbox = self._inboxes(others, mine.stop - mine.start, into)
        sends = [(rank, part[self._chunk(rank, size)]) for rank in others for _, part in parts]
        receives = [(rank, tensor) for rank in others for _, tensor in inbox[rank]]
        exchanged = _swap(team, sends, receives)
        self.finish()  # the bucket before
        exchanged()  # the sends too: what they read is overwritten below

        inbox[team.rank] = [(node, part[mine]) for node, part in parts]
        everything = [part for rank in range(team.world_size) for part in inbox[rank]]
        ((_, total),) = fold(self._lanes, everything, lambda left, right: left.add_(right))
        torch.div(total, divisor, out=into[mine])
        self._coming_back = _swap(
            team, [(rank, into[mine]) for rank in others], [(rank, into[self._chunk(rank, size)]) for rank in others]
        )

    def _chunk(self, rank: int, size: int) -> slice:
        """The elements of a bucket that worker ``rank`` owns."""
        workers = self._team.world_size
        return slice(*(min(size, -(-size * r // (workers * GRAIN)) * GRAIN) for r in (rank, rank + 1)))

    def _inboxes(self, ranks: Sequence[int], length: int, like: Tensor) -> dict[int, list[tuple[Node, Tensor]]]:
        """For each rank, a place of ``length`` elements per partial sum that it sends, in one buffer that is kept."""
        stride = -(-length // GRAIN) * GRAIN
        needed = stride * sum(len(self._nodes[rank]) for rank in ranks)
        key = (like.dtype, like.device)
        if key not in self._inbox or self._inbox[key].numel() < needed:
            self._inbox[key] = torch.empty(needed, dtype=like.dtype, device=like.device)
        inboxes: dict[int, list[tuple[Node, Tensor]]] = {}
        at = 0
        for rank in ranks:
            inboxes[rank] = []
            for node in self._nodes[rank]:
                inboxes[rank].append((node, self._inbox[key][at : at + length]))
                at += stride
        return inboxes


def _swap(
    team: Team, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
) -> Callable[[], None]:
    """`Team.swap` without the empty chunks that small buckets have."""
    return team.swap([pair for pair in sends if pair[1].numel()], [pair for pair in receives if pair[1].numel()])


def _nothing() -> None:
    """Nothing is on its way."""
