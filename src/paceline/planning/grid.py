"""What a micro-batch of any size needs under each way to recompute, from a few sizes that were looked at. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.memory.footprint import Footprint, Moment
from paceline.memory.plan import BlockCost, Level, Option, choose, least, peak, uniform

__all__ = ["MODES", "Cell", "Costs", "between", "cell"]

MODES = ("none", "all", "every:2", "selective", "auto")
"""Ways to recompute that a plan compares; ``auto`` is the best mixture for the budget."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What forward and backward of a micro-batch cost; bytes on top of a `Footprint`.

    Args:
        micro_batch: its samples.
        fixed: kept from before the first block to the end.
        blocks: in the order of their forwards.
        loss: most bytes behind the last block, on top of all that is held.
        seconds: a forward and backward in which nothing is recomputed.
    """

    micro_batch: int
    fixed: int
    blocks: tuple[BlockCost, ...]
    loss: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One micro-batch under one way to recompute.

    Args:
        levels: of each block.
        activations: most bytes of a forward and backward on top of the footprint.
        peak: most bytes of a worker, ``moment``: when that is.
        slower: seconds of a forward and backward, relative to those without recompute.
    """

    levels: Mapping[str, Level]
    activations: int
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
    )


def cell(costs: Costs, there: Footprint, mode: str | Mapping[str, Level], budget: int) -> Cell | None:
    """What ``mode`` needs; ``None`` where blocks cannot have it. ``auto`` is what fits ``budget`` at the least cost in
    time, or if nothing does, what needs the least.

    Args:
        mode: ``none``, ``all``, ``every:k``, ``selective``, ``auto``, or the level of each block.
    """
    levels = _levels(costs, there, mode, budget)
    if levels is None:
        return None
    activations = peak(costs.blocks, levels, fixed=costs.fixed, loss=costs.loss)
    most, moment = there.peak(activations)
    added = sum(block.at(levels[block.name]).seconds for block in costs.blocks)
    slower = 1 + added / costs.seconds if costs.seconds else 1.0
    return Cell(levels=levels, activations=activations, peak=most, moment=moment, slower=slower)


def _levels(costs: Costs, there: Footprint, mode: str | Mapping[str, Level], budget: int) -> Mapping[str, Level] | None:
    blocks = costs.blocks
    if isinstance(mode, Mapping):
        return mode
    if mode == "none":
        return uniform(blocks, "keep")
    if not blocks or (mode == "selective" and any("selective" not in _known(block) for block in blocks)):
        return None
    if mode == "auto":
        fixed = there.during_backward + costs.fixed
        best = choose(blocks, fixed=fixed, loss=costs.loss, budget=budget)
        return (best or least(blocks, fixed=fixed, loss=costs.loss)).levels
    level, _, every = mode.partition(":")
    return uniform(blocks, "selective" if level == "selective" else "full", int(every or 1))


def _known(block: BlockCost) -> set[Level]:
    return {option.level for option in block.options}
