"""Decides what each block recomputes so that a step fits a budget at the least cost in time. Pure arithmetic.

[Note: a step's memory] Forward runs the blocks from first to last, and each leaves behind what its backward will read:
it *holds* bytes. Backward runs from last to first, and each block gives back what it held. So while block i runs its
backward, the blocks before it still hold theirs, and those after it nothing:

    peak = fixed + max( held_0 + ... + held_n-1 + loss,  max over i of ( held_0 + ... + held_i-1 + backward_i ) )

Read from the last block to the first, this is one number handed on, the bytes that the rest of a step *needs* on top of
what was held before it:

    need_n = loss        need_i = max(backward_i, held_i + need_i+1)        peak = fixed + need_0

[Note: why the choice is exact] need_i grows with need_i+1, and later blocks enter it through that number alone. So of
two ways to run the blocks from i on, one that needs no less and adds no less time can be forgotten, whatever comes
before. What is left is a *front*, each way needing more and adding less than the one before it. Fronts are built from
the last block to the first; block 0's holds every trade of peak against time, ties included.

Equal blocks give equal sums, so their fronts stay short. Where all blocks differ a front could double with each, but for
a bound. Put a *price* on every byte held. At any price the blocks before i add at least

    the sum over these blocks of their least (seconds + price x held), minus price x the room there is for what they hold

(Lagrange's relaxation, for every prefix of blocks at once: see `_floor_after`). A way that by this bound ends above a
choice known to fit is dropped. That choice comes from the same sweep with fronts cut to a few promising ways, then to
more and more until nothing is cut: then it is proven least. Times are whole nanoseconds here, so sums have no order.

The problem is NP-hard, and the search is bounded by `MOST_WAYS`. 1,000 blocks that all differ take about half a second
and are exact. But where time is proportional to bytes within a few per cent and no two of very many blocks are equal,
more choices than one can count lie within a microsecond of each other. Then something stays cut, and `Choice.gap` says
how much less time another choice could at most add, by the bounds of all that was cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["MOST_WAYS", "BlockCost", "Choice", "Level", "Option", "choose", "least", "peak", "uniform"]

Level = Literal["keep", "selective", "full"]
"""What a block does: keeps what autograd saves; keeps what is dear to compute; or keeps its inputs only."""

MOST_WAYS = 2**24
"""The most ways in all fronts of a search together, which bounds it: about 4 seconds and 0.4 GB."""


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
        gap: no choice within the budget adds less than ``seconds - gap``. 0, but for many blocks that are all different
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

    Of several, the one with the lowest peak, and of those always the same one: ways that need and add the same are told
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
    problem = _Problem.of(blocks, loss, budget - fixed)
    if problem is None:
        return None
    width, widest = _FIRST_WIDTH, MOST_WAYS // max(len(blocks), 1)
    best = problem.sweep(width, math.inf)
    while best.cut_ns < math.inf and width < widest:
        width = min(8 * width, widest)
        wider = problem.sweep(width, best.ns)
        best = wider if (wider.ns, wider.need) <= (best.ns, best.need) else best._replace(cut_ns=wider.cut_ns)
    chosen = {block.name: block.options[place] for block, place in zip(blocks, best.places, strict=True)}
    return Choice(
        levels={name: option.level for name, option in chosen.items()},
        peak=fixed + best.need,
        seconds=math.fsum(option.seconds for option in chosen.values()),
        gap=max(0, best.ns - math.ceil(best.cut_ns)) / _NS if best.cut_ns < math.inf else 0.0,
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
_FIRST_WIDTH = 64
_MOST_PRICES = 4096  # more would make bounds better by nothing that shows
_MOST_BYTES = 2**60
_MOST_NS = 2**53  # up to here a float64 holds every whole number
_ROUNDING = 2.0**-40  # more, relatively, than the additions of a bound can be off, and nothing beside a nanosecond


def _check(blocks: Sequence[BlockCost], fixed: int, loss: int) -> None:
    if fixed < 0 or loss < 0:
        raise ValueError(f"bytes are not negative: fixed {fixed}, loss {loss}")
    names = [block.name for block in blocks]
    if len(set(names)) < len(names):
        raise ValueError(f"names of blocks come twice: {names}")
    options = [option for block in blocks for option in block.options]
    if fixed + loss + sum(option.held + option.backward for option in options) > _MOST_BYTES:
        raise ValueError("more than an exbibyte: no machine has that")
    if sum(_ns(option.seconds) for option in options) > _MOST_NS:
        raise ValueError("more than 104 days to recompute one step")


def _ns(seconds: float) -> int:
    """In whole nanoseconds; what takes time at all takes at least one."""
    return max(round(seconds * _NS), seconds > 0)


class _Way(NamedTuple):
    """An option that fits, its place among its block's, and its time in nanoseconds."""

    place: int
    held: int
    backward: int
    ns: int


class _Swept(NamedTuple):
    """The best choice of one sweep: the place of each block's option, and what it costs.

    ``ns`` is infinite where it found none, ``cut_ns``: none that was cut would have added less; infinite if none was, so that the choice is the best there is.
    """

    places: list[int]
    ns: float
    need: int
    cut_ns: float


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """What a sweep needs to know.

    Args:
        ways: of each block, those with which the budget can be kept, the one that recomputes most first.
        ceilings: the most that need_i may be, so that with some choice for the blocks before i the budget is kept.
        prices: nanoseconds for a byte held, ascending from 0.
        floors: for each i and price, no more than the least of (ns + price x held) over choices for the blocks before i.
        loss: bytes, need_n.
        room: bytes of the budget that are not fixed.
    """

    ways: list[list[_Way]]
    ceilings: list[int]
    prices: NDArray[np.float64]
    floors: list[NDArray[np.float64]]
    loss: int
    room: int

    @classmethod
    def of(cls, blocks: Sequence[BlockCost], loss: int, room: int) -> _Problem | None:
        """``None``: no choice keeps the budget."""
        ways: list[list[_Way]] = []
        ceiling, ceilings = room, []
        for block in blocks:
            places = reversed(list(enumerate(block.options)))
            all_ways = [_Way(place, option.held, option.backward, _ns(option.seconds)) for place, option in places]
            ways.append([way for way in all_ways if max(way.backward, way.held) <= ceiling])
            if not ways[-1]:
                return None
            ceilings.append(ceiling)
            ceiling -= min(way.held for way in ways[-1])
        if loss > ceiling:
            return None
        prices = _prices(ways)
        floors = [np.zeros_like(prices)]
        for block_ways in ways:
            floors.append(_floor_after(floors[-1], block_ways, prices, room))
        return cls(ways=ways, ceilings=ceilings, prices=prices, floors=floors, loss=loss, room=room)

    def sweep(self, width: int, known_ns: float) -> _Swept:
        """The best choice found with fronts cut to ``width``, given that one adding ``known_ns`` is known."""
        need, ns = np.array([self.loss], dtype=np.int64), np.zeros(1, dtype=np.int64)
        steps: list[tuple[int, NDArray[np.int32]]] = []  # of each way in a front, its option and what follows, as one
        cut_ns = math.inf
        for block in reversed(range(len(self.ways))):
            ways, rests = self.ways[block], len(need)
            need = np.concatenate([np.maximum(way.backward, way.held + need) for way in ways])
            ns = np.concatenate([way.ns + ns for way in ways])
            front = _front(need, ns)
            at_least_ns = ns[front] + self._before(block, need[front])
            fits = (need[front] <= self.ceilings[block]) & (at_least_ns <= known_ns)
            front, at_least_ns = front[fits], at_least_ns[fits]
            if len(front) > width:
                stays = _promising(at_least_ns, width)
                cut_ns = min(cut_ns, at_least_ns[~stays].min())
                front = front[stays]
            elif not len(front):  # what led to the known choice was cut
                return _Swept([], math.inf, 0, cut_ns)
            need, ns = need[front], ns[front]
            steps.append((rests, front.astype(np.int32)))
        places, at = [], len(ns) - 1  # the last of a front adds the least
        for ways, (rests, came_from) in zip(self.ways, reversed(steps), strict=True):
            way, at = divmod(int(came_from[at]), rests)
            places.append(ways[way].place)
        return _Swept(places, int(ns[-1]), int(need[-1]), cut_ns)

    def _before(self, block: int, need: NDArray[np.int64]) -> NDArray[np.float64]:
        """No more than the nanoseconds that the blocks before ``block`` must add if it and the rest need ``need``.

        Any price gives a bound. A floor is concave over prices: the best one is where its slope, the bytes held at that
        price, comes down to the bytes that there are.
        """
        floor, room = self.floors[block], (self.room - need).astype(np.float64)
        slopes = np.diff(floor) / np.diff(self.prices)
        best = np.searchsorted(-slopes, -room)
        return np.maximum(floor[best] * (1 - _ROUNDING) - self.prices[best] * room * (1 + _ROUNDING), 0)


def _prices(ways: Sequence[Sequence[_Way]]) -> NDArray[np.float64]:
    """The prices at which a block would change its mind, and 0: bounds are best at one of these."""
    trades = {
        (more.ns - less.ns) / (less.held - more.held)
        for block_ways in ways
        for more in block_ways
        for less in block_ways
        if more.ns > less.ns and more.held < less.held
    }
    return np.array([0.0, *sorted(trades)[:: 1 + len(trades) // _MOST_PRICES]])


def _floor_after(
    floor: NDArray[np.float64], ways: Sequence[_Way], prices: NDArray[np.float64], room: int
) -> NDArray[np.float64]:
    """The floor of the blocks up to one, from that of the blocks before it.

    With one of its ways, those before must leave room for its backward: they hold ``bytes <= room - backward``. A dearer
    price q gives a bound on what they add, floor(q) - q x bytes; at the price p asked for, p x bytes come on top. As
    p < q that is least for the most bytes: floor(q) - (q - p) x (room - backward), of which the best q counts.
    """
    floors = []
    for way in ways:
        paid = prices * (room - way.backward)
        dearer = np.maximum.accumulate((floor - paid * (1 + _ROUNDING))[::-1])[::-1] + paid
        floors.append(np.maximum(floor, dearer) + way.ns + prices * way.held)
    least_of_ways: NDArray[np.float64] = np.minimum.reduce(floors)
    return least_of_ways


def _front(need: NDArray[np.int64], ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places of those that no other beats in both, by ascending need and so descending time; of equals the first."""
    by_need = np.argsort(need, kind="stable")
    ns = ns[by_need]
    faster = np.ones(len(ns), dtype=bool)
    faster[1:] = ns[1:] < np.minimum.accumulate(ns)[:-1]
    front: NDArray[np.int64] = by_need[faster]
    return front[np.append(np.diff(need[front]) > 0, True)]  # of equal need the last, which is fastest


def _promising(at_least_ns: NDArray[np.float64], width: int) -> NDArray[np.bool_]:
    """Which of a front stay: most by their bounds, and some of every need, since bounds can be nearly equal."""
    lowest = width * 3 // 4
    stays = np.zeros(len(at_least_ns), dtype=bool)
    stays[np.argpartition(at_least_ns, lowest)[:lowest]] = True
    stays[np.linspace(0, len(stays) - 1, width - lowest).astype(np.int64)] = True
    return stays
