"""What a micro-batch of any size needs under each way to recompute, from a few sizes that were looked at. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from paceline.memory.gaps import Heap
from paceline.memory.plan import BlockCost, Level, Option, choose, least, peak
from paceline.memory.profile import Profile
from paceline.planning.footprint import Footprint, Moment

__all__ = ["Cell", "Mode", "between", "cell"]

Mode: TypeAlias = Mapping[str, Level] | Literal["auto"]
"""A way to recompute: the level of each block, or the best mixture for a budget."""

_GPU_GAPS = 10
"""One part in so many of the activations is counted for gaps in what torch's allocator holds: it rounds to 512 bytes,
keeps small tensors in segments of 2 MiB and others in some of 20 MiB or more, and pieces of these do not fit all that
comes next. How wide gaps are depends on the order of all sizes; 5 to 10 % are common in training."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One micro-batch under one way to recompute.

    Args:
        levels: of each block.
        activations: most bytes of a forward and backward on top of the footprint; ``gaps``: between them, or left of
            them at ``moment``.
        peak: most bytes of a worker, ``moment``: when that is.
        slower: seconds of a forward and backward, relative to those without recompute.
    """

    levels: Mapping[str, Level]
    activations: int
    gaps: int
    peak: int
    moment: Moment
    slower: float


def between(looked_at: Mapping[int, Profile], micro_batch: int) -> Profile:
    """The costs of a micro-batch of any size up to the largest of ``looked_at`` (by micro-batch), never too low.

    Bytes are the largest of several amounts, each of which grows evenly with the samples: so they lie on or below a
    straight line between two sizes. Below the smallest size, its own are taken.
    """
    sizes = sorted(looked_at)
    at = bisect_left(sizes, micro_batch)
    if at == 0 or sizes[at] == micro_batch:
        return looked_at[sizes[at]]
    below, above = looked_at[sizes[at - 1]], looked_at[sizes[at]]
    part = (micro_batch - sizes[at - 1]) / (sizes[at] - sizes[at - 1])

    def mixed(a: float, b: float) -> int:
        return math.ceil(a + (b - a) * part)

    def option(a: Option, b: Option) -> Option:
        seconds = a.seconds + (b.seconds - a.seconds) * part
        held, backward = mixed(a.held, b.held), mixed(a.backward, b.backward)
        return Option(level=a.level, held=held, backward=backward, seconds=seconds)

    def block(a: BlockCost, b: BlockCost) -> BlockCost:
        of_a = {its.level: its for its in a.options}
        options = (option(of_a[its.level], its) for its in b.options if its.level in of_a)
        return BlockCost(name=a.name, options=tuple(options))

    heap = above.heap
    if heap is not None and below.heap is not None:
        heap = Heap(
            small=max(below.heap.small, heap.small),
            loss=mixed(below.heap.loss, heap.loss),
            beside=mixed(below.heap.beside, heap.beside),
            turnover=mixed(below.heap.turnover, heap.turnover),
        )
    return replace(
        above,
        fixed=mixed(below.fixed, above.fixed),
        blocks=tuple(map(block, below.blocks, above.blocks)),
        loss=mixed(below.loss, above.loss),
        seconds=below.seconds + (above.seconds - below.seconds) * part,
        heap=heap,
    )


def cell(costs: Profile, there: Footprint, mode: Mode, budget: int) -> Cell | None:
    """What ``mode`` needs; ``None`` where a block cannot have its level. ``auto`` is what fits ``budget`` at the least
    cost in time, or if nothing does, what needs the least."""
    levels = _auto(costs, there, budget) if mode == "auto" else mode
    known = {block.name: {option.level for option in block.options} for block in costs.blocks}
    if any(levels[name] not in those for name, those in known.items()):
        return None
    activations = peak(costs.blocks, levels, fixed=costs.fixed, loss=costs.loss)
    needed, left = activations + -(-activations // _GPU_GAPS), 0
    if costs.heap is not None:
        needed = costs.heap.needed(peak(costs.blocks, levels, fixed=costs.fixed, loss=costs.heap.loss))
        left = costs.heap.left
    most, moment = there.peak(needed, left)
    added = sum(block.at(levels[block.name]).seconds for block in costs.blocks)
    slower = 1 + added / costs.seconds if costs.seconds else 1.0
    gaps = needed - activations if moment == "backward" else left
    return Cell(levels=levels, activations=activations, gaps=gaps, peak=most, moment=moment, slower=slower)


def _auto(costs: Profile, there: Footprint, budget: int) -> Mapping[str, Level]:
    room, loss = budget - there.during_backward, costs.loss
    if costs.heap is None:
        room = room * _GPU_GAPS // (_GPU_GAPS + 1)
    else:
        room, loss = costs.heap.room(room), costs.heap.loss
    best = choose(costs.blocks, fixed=costs.fixed, loss=loss, budget=room)
    return (best or least(costs.blocks, fixed=costs.fixed, loss=loss)).levels
