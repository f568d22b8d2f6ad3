"""What a worker holds, line by line, and which of it at the moment that needs the most. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.memory.plan import BlockCost, Level
from paceline.memory.profile import Profile
from paceline.planning.footprint import Footprint
from paceline.planning.grid import Cell

__all__ = ["Line", "dominant", "lines", "told_moment", "worst"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """Bytes under a name; ``counted``: they are there at the moment that needs the most."""

    what: str
    size: int
    note: str = ""
    counted: bool = True


def lines(there: Footprint, costs: Profile, cell: Cell, notes: Mapping[str, str]) -> list[Line]:
    """Every line that is not empty; those that are counted add up to the cell's peak.

    Args:
        notes: what to say of a line, by its name.
    """
    in_backward = cell.moment == "backward"
    all_lines = [
        Line(what="process", size=there.process),
        Line(what="parameters", size=there.parameters),
        Line(what="buffers", size=there.buffers),
        Line(what="gradients", size=there.gradients),
        Line(what="lane sums", size=there.lane_sums),
        Line(what="optimizer state", size=there.optimizer),
        Line(what="optimizer's step", size=there.optimizer_work, counted=cell.moment == "update"),
        Line(what="exchange", size=there.exchange),
        Line(what="checkpoint's copy", size=there.copy, counted=cell.moment == "save" or there.copy_stays),
        Line(what="batches", size=there.inputs),
        Line(what="gaps", size=there.gaps + cell.gaps),
        *_activations(costs, cell, counted=in_backward),
    ]
    return [
        Line(what=line.what, size=line.size, note=notes.get(line.what, line.note), counted=line.counted)
        for line in all_lines
        if line.size
    ]


def _activations(costs: Profile, cell: Cell, *, counted: bool) -> Iterator[Line]:
    block, held = worst(costs.blocks, cell.levels, costs.loss)
    count = len(costs.blocks)
    yield Line(what="before the blocks", size=costs.fixed, counted=counted)
    if block is None:
        yield Line(what="kept by blocks", size=held, note=f"{count} blocks", counted=counted)
    else:
        place = [cost.name for cost in costs.blocks].index(block.name)
        kept = f"the {place} blocks before {block.name}"
        yield Line(what="kept by blocks", size=held, note=kept, counted=counted)
        needed = block.at(cell.levels[block.name]).backward
        yield Line(what="backward of a block", size=needed, note=block.name, counted=counted)
    what = "logits and loss" if costs.blocks else "activations"
    yield Line(what=what, size=costs.loss, counted=counted and block is None)


def worst(blocks: Sequence[BlockCost], levels: Mapping[str, Level], loss: int) -> tuple[BlockCost | None, int]:
    """When a forward and backward holds the most: in which block's backward (``None``: behind the last block, with its
    ``loss`` bytes), and what the blocks before hold then."""
    held, most = 0, -1
    at: tuple[BlockCost | None, int] = (None, 0)
    for block in blocks:
        option = block.at(levels[block.name])
        if held + option.backward > most:
            most, at = held + option.backward, (block, held)
        held += option.held
    return (None, held) if held + loss >= most else at


def told_moment(costs: Profile, cell: Cell) -> str:
    """When the most is held, in words."""
    if cell.moment == "update":
        return "while the optimizer steps"
    if cell.moment == "save":
        return "while a checkpoint is copied"
    block, _ = worst(costs.blocks, cell.levels, costs.loss)
    if not costs.blocks:
        return "in forward and backward"
    return "in backward, at the loss" if block is None else f"in backward of {block.name}"


def dominant(all_lines: Sequence[Line]) -> Line:
    """The largest line of those that are counted."""
    return max((line for line in all_lines if line.counted), key=lambda line: line.size)
