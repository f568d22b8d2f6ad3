"""What a micro-batch of any size needs under each way to recompute, from a few sizes that were looked at. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from paceline.memory.footprint import Footprint, Moment
from paceline.memory.gaps import Heap
from paceline.memory.plan import BlockCost, Level, Option, choose, least, peak

__all__ = ["Cell", "Costs", "Mode", "between", "cell"]

Mode: TypeAlias = Mapping[str, Level] | Literal["auto"]
"""A way to recompute: the level of each block, or the best mixture for a budget."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What forward and backward of a micro-batch cost; bytes on top of a `Footprint`.

    Args:
        micro_batch: its samples.
        fixed: kept from before the first block to the end.
        blocks: in the order of their forwards.
        loss: most bytes behind the last block, on top of all that is held.
        seconds: a forward and backward in which nothing is recomputed.
        heap: how the process holds it; ``None``: as a GPU, tensor by tensor.
    """

    micro_batch: int
    fixed: int
    blocks: tuple[BlockCost, ...]
    loss: int
    seconds: float
    heap: Heap | None = None


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


def between(looked_at: Sequence[Costs], micro_batch: int) -> Costs:
    """The costs of a micro-batch of any size up to the largest of ``looked_at`` (ascending), never too low.

    Bytes are the largest of several amounts, each of which grows evenly with the samples: so they lie on or below a
    straight line between two sizes. Below the smallest size, its own are taken.
    """
    at = bisect_left([costs.micro_batch for costs in looked_at], micro_batch)
    if at == 0 or looked_at[at].micro_batch == micro_batch:
        return looked_at[at]
    below, above = looked_at[at - 1], looked_at[at]
    part = (micro_batch - below.micro_batch) / (above.micro_batch - below.micro_batch)

    def mixed(a: float, b: float) -> int:
        return math.ceil(a + (b - a) * part)

    def option(a: Option, b: Option) -> Option:
        seconds = a.seconds + (b.seconds - a.seconds) * part
        held, backward = mixed(a.held, b.held), mixed(a.backward, b.backward)
        return Option(level=a.level, held=held, backward=backward, seconds=seconds)

    heap = above.heap
    if heap is not None and below.heap is not None:
        heap = Heap(
            small=max(below.heap.small, heap.small),
            loss=mixed(below.heap.loss, heap.loss),
            beside=mixed(below.heap.beside, heap.beside),
            turnover=mixed(below.heap.turnover, heap.turnover),
        )
    return Costs(
        micro_batch=micro_batch,
        fixed=mixed(below.fixed, above.fixed),
        blocks=tuple(
            BlockCost(name=a.name, options=tuple(map(option, a.options, b.options)))
            for a, b in zip(below.blocks, above.blocks, strict=True)
        ),
        loss=mixed(below.loss, above.loss),
        seconds=below.seconds + (above.seconds - below.seconds) * part,
        heap=heap,
    )


def cell(costs: Costs, there: Footprint, mode: Mode, budget: int) -> Cell | None:
    """What ``mode`` needs; ``None`` where a block cannot have its level. ``auto`` is what fits ``budget`` at the least
    cost in time, or if nothing does, what needs the least."""
    levels = _auto(costs, there, budget) if mode == "auto" else mode
    known = {block.name: {option.level for option in block.options} for block in costs.blocks}
    if any(levels[name] not in those for name, those in known.items()):
        return None
    activations = peak(costs.blocks, levels, fixed=costs.fixed, loss=costs.loss)
    needed, left = activations, 0
    if costs.heap is not None:
        needed = costs.heap.needed(peak(costs.blocks, levels, fixed=costs.fixed, loss=costs.heap.loss))
        left = costs.heap.left
    most, moment = there.peak(needed, left)
    added = sum(block.at(levels[block.name]).seconds for block in costs.blocks)
    slower = 1 + added / costs.seconds if costs.seconds else 1.0
    gaps = needed - activations if moment == "backward" else left
    return Cell(levels=levels, activations=activations, gaps=gaps, peak=most, moment=moment, slower=slower)


def _auto(costs: Costs, there: Footprint, budget: int) -> Mapping[str, Level]:
    room, loss = budget - there.during_backward, costs.loss
    if costs.heap is not None:
        room, loss = costs.heap.room(room), costs.heap.loss
    best = choose(costs.blocks, fixed=costs.fixed, loss=loss, budget=room)
    return (best or least(costs.blocks, fixed=costs.fixed, loss=loss)).levels
