"""Decides what each block recomputes, so that a step fits a budget at the least cost in time. Pure arithmetic.

[Note: a step's memory] Forward runs the blocks from first to last, and each leaves behind what its backward will read:
it *holds* bytes. Backward runs from last to first, and each block gives back what it held. So while a block runs its
backward, the blocks before it still hold theirs, and those after it nothing:

    peak = fixed + max( held_0 + ... + held_n-1 + loss,  max over i of ( held_0 + ... + held_i-1 + backward_i ) )

Read from the last block to the first, this is one number handed on: the bytes that the rest of a step *needs* on top of
what the blocks before hold.

    need_n = loss        need_i = max(backward_i, held_i + need_i+1)        peak = fixed + need_0

So a byte that an early block holds counts in every later block's backward, and recomputing the last block may gain
nothing: its backward comes at once and needs the same bytes again. `choose` weighs all this, exactly: ``search.py`` has
the proof ([Note: why the choice is exact]), and says what happens where an exact answer would take for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.memory.search import MOST_BYTES, MOST_NS, Way, fastest

__all__ = ["BlockCost", "Choice", "Level", "Option", "choose", "least", "peak", "uniform"]

Level = Literal["keep", "selective", "full"]
"""What a block does: keeps what autograd saves; keeps what is dear to compute; or keeps its inputs only."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """What a block costs at one level.

    Args:
        level: what it keeps.
        held: bytes that it keeps from its forward until its backward.
        backward: most bytes live while its backward runs, on top of all that was held when its forward began: what it
            holds or computes again, gradients of activations, temporaries.
        seconds: time that recomputing adds to a forward and backward; 0 for ``keep``.

    Raises:
        ValueError: a figure that is negative or not finite.
    """

    level: Level
    held: int
    backward: int
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.held < 0 or self.backward < 0 or not 0 <= self.seconds < math.inf:
            raise ValueError(f"figures of an option are finite and not negative, not {self}")


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """A block's name, its module path, and what it costs at each level that it may have; ``keep`` comes first.

    Raises:
        ValueError: ``keep`` is not the first option, or a level comes twice.
    """

    name: str
    options: tuple[Option, ...]

    def __post_init__(self) -> None:
        levels = [option.level for option in self.options]
        if levels[:1] != ["keep"] or len(set(levels)) < len(levels):
            raise ValueError(f"the options of {self.name} are keep and then other levels, each once, not {levels}")

    def at(self, level: Level) -> Option:
        """What it costs at ``level``; ValueError: it does not have that level."""
        for option in self.options:
            if option.level == level:
                return option
        raise ValueError(f"{self.name} has no level {level}, only {', '.join(o.level for o in self.options)}")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A level for every block, and what they cost together.

    Args:
        levels: of each block by name, in the order of the blocks.
        peak: most bytes live at any moment of a step.
        seconds: time that recomputing adds to a forward and backward.
        gap: no choice within the budget adds less than ``seconds - gap``. 0 but for many blocks that are all different
            and all but equally worth recomputing ([Note: why the choice is exact]).
    """

    levels: Mapping[str, Level]
    peak: int
    seconds: float
    gap: float = 0.0


def uniform(blocks: Sequence[BlockCost], level: Level, every: int = 1) -> dict[str, Level]:
    """``level`` for blocks 0, ``every``, 2 x ``every``, ..., ``keep`` for those between: what people choose by hand.

    Raises:
        ValueError: a block that does not have that level, or ``every`` below 1.

    >>> keep, full = Option(level="keep", held=9, backward=12), Option(level="full", held=1, backward=13, seconds=0.1)
    >>> blocks = [BlockCost(name=name, options=(keep, full)) for name in "abcde"]
    >>> uniform(blocks, "full", every=2)
    {'a': 'full', 'b': 'keep', 'c': 'full', 'd': 'keep', 'e': 'full'}
    """
    if every < 1:
        raise ValueError(f"every {every}: blocks are counted in steps of 1 or more")
    return {block.name: "keep" if place % every else block.at(level).level for place, block in enumerate(blocks)}


def peak(blocks: Sequence[BlockCost], levels: Mapping[str, Level], *, fixed: int, loss: int) -> int:
    """The most bytes live at any moment of a step ([Note: a step's memory]).

    Args:
        blocks: in the order in which forward runs them.
        levels: of every block.
        fixed: bytes there all the time: parameters, gradients, optimizer state, buffers.
        loss: most bytes live between the last block's forward and its backward, on top of all that blocks hold:
            logits, the loss and its backward.

    Raises:
        ValueError: not every block has a level, or one has a level that it does not know; a name comes twice.

    >>> keep, full = Option(level="keep", held=9, backward=12), Option(level="full", held=1, backward=13, seconds=0.1)
    >>> blocks = [BlockCost(name=name, options=(keep, full)) for name in "abc"]
    >>> peak(blocks, {"a": "keep", "b": "keep", "c": "keep"}, fixed=100, loss=5)
    132
    >>> peak(blocks, {"a": "full", "b": "keep", "c": "full"}, fixed=100, loss=5)
    123
    """
    _check(blocks, fixed, loss)
    if set(levels) != {block.name for block in blocks}:
        raise ValueError(f"levels are of {sorted(levels)}, blocks are {[block.name for block in blocks]}")
    need = loss
    for block in reversed(blocks):
        option = block.at(levels[block.name])
        need = max(option.backward, option.held + need)
    return fixed + need


def choose(blocks: Sequence[BlockCost], *, fixed: int, loss: int, budget: int) -> Choice | None:
    """The levels that add the least time among those whose `peak` is at most ``budget`` bytes; ``None``: none are.

    Whatever is said to take, recomputing a block takes a nanosecond or more, so that without need none is. Of several
    choices, the one with the lowest peak, and of those always the same one: ways that need and add the same are told
    apart by what the first blocks recompute, whose backward comes last, when most memory is free again.

    Args:
        blocks: in the order in which forward runs them.
        fixed: bytes there all the time, as for `peak`.
        loss: most bytes between forward and backward, as for `peak`.
        budget: most bytes that there may be.

    Raises:
        ValueError: a name comes twice, or figures that are negative or no machine's (an exbibyte, 104 days).

    >>> keep, full = Option(level="keep", held=9, backward=12), Option(level="full", held=1, backward=13, seconds=0.1)
    >>> blocks = [BlockCost(name=name, options=(keep, full)) for name in "abc"]
    >>> choose(blocks, fixed=100, loss=5, budget=125)
    Choice(levels={'a': 'full', 'b': 'keep', 'c': 'keep'}, peak=124, seconds=0.1, gap=0.0)
    >>> choose(blocks, fixed=100, loss=5, budget=114) is None
    True
    """
    _check(blocks, fixed, loss)
    ways = [[Way(option.held, option.backward, _ns(option)) for option in block.options] for block in blocks]
    found = fastest(ways, loss=loss, room=budget - fixed)
    if found is None:
        return None
    chosen = {block.name: block.options[place] for block, place in zip(blocks, found.places, strict=True)}
    return Choice(
        levels={name: option.level for name, option in chosen.items()},
        peak=fixed + found.need,
        seconds=math.fsum(option.seconds for option in chosen.values()),
        gap=max(found.ns - found.cut_ns, 0.0) / _NS,
    )


def least(blocks: Sequence[BlockCost], *, fixed: int, loss: int) -> Choice:
    """The lowest peak that there is; of the choices that have it, the one that adds the least time.

    Arguments and errors are those of `choose`.

    >>> keep, full = Option(level="keep", held=9, backward=12), Option(level="full", held=1, backward=13, seconds=0.1)
    >>> blocks = [BlockCost(name=name, options=(keep, full)) for name in "abc"]
    >>> least(blocks, fixed=100, loss=2)
    Choice(levels={'a': 'full', 'b': 'full', 'c': 'keep'}, peak=114, seconds=0.2, gap=0.0)
    """
    need = loss
    for block in reversed(blocks):
        need = min(max(option.backward, option.held + need) for option in block.options)
    choice = choose(blocks, fixed=fixed, loss=loss, budget=fixed + need)
    assert choice is not None, "the lowest peak is one that can be had"
    return choice


_NS = 1e9


def _ns(option: Option) -> int:
    """In whole nanoseconds; at least one for all but ``keep``, so that nothing is recomputed that need not be."""
    return max(round(option.seconds * _NS), int(option.level != "keep"))


def _check(blocks: Sequence[BlockCost], fixed: int, loss: int) -> None:
    if fixed < 0 or loss < 0:
        raise ValueError(f"bytes are not negative, not fixed {fixed}, loss {loss}")
    names = [block.name for block in blocks]
    if len(set(names)) < len(names):
        raise ValueError(f"names of blocks are different, not {names}")
    options = [option for block in blocks for option in block.options]
    if fixed + loss + sum(option.held + option.backward for option in options) > MOST_BYTES:
        raise ValueError("blocks come to an exbibyte at most")
    if sum(map(_ns, options)) > MOST_NS:
        raise ValueError("blocks come to 104 days at most")
