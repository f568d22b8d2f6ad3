"""What a micro-batch of any size needs under each way to recompute, from a few sizes that were looked at. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from paceline.memory.footprint import Footprint, Moment, activation_gaps
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
        small: the part of their bytes, 0 to 1, in tensors that share a CPU's heap.
    """

    micro_batch: int
    fixed: int
    blocks: tuple[BlockCost, ...]
    loss: int
    seconds: float
    small: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One micro-batch under one way to recompute.

    Args:
        levels: of each block.
        activations: most bytes of a forward and backward on top of the footprint; ``gaps``: between them.
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

    return Costs(
        micro_batch=micro_batch,
        fixed=mixed(below.fixed, above.fixed),
        blocks=tuple(
            BlockCost(name=a.name, options=tuple(map(option, a.options, b.options)))
            for a, b in zip(below.blocks, above.blocks, strict=True)
        ),
        loss=mixed(below.loss, above.loss),
        seconds=below.seconds + (above.seconds - below.seconds) * part,
        small=max(below.small, above.small),
    )


def cell(costs: Costs, there: Footprint, mode: Mode, budget: int) -> Cell | None:
    """What ``mode`` needs; ``None`` where a block cannot have its level. ``auto`` is what fits ``budget`` at the least
    cost in time, or if nothing does, what needs the least."""
    levels = _auto(costs, there, budget) if mode == "auto" else mode
    known = {block.name: {option.level for option in block.options} for block in costs.blocks}
    if any(levels[name] not in those for name, those in known.items()):
        return None
    activations = peak(costs.blocks, levels, fixed=costs.fixed, loss=costs.loss)
    gaps = activation_gaps(activations, small=costs.small)
    most, moment = there.peak(activations + gaps)
    added = sum(block.at(levels[block.name]).seconds for block in costs.blocks)
    slower = 1 + added / costs.seconds if costs.seconds else 1.0
    return Cell(levels=levels, activations=activations, gaps=gaps, peak=most, moment=moment, slower=slower)


def _auto(costs: Costs, there: Footprint, budget: int) -> Mapping[str, Level]:
    room = there.room(budget, small=costs.small)
    best = choose(costs.blocks, fixed=costs.fixed, loss=costs.loss, budget=room)
    return (best or least(costs.blocks, fixed=costs.fixed, loss=costs.loss)).levels
