"""Finds the fastest of the choices that fit, one way for each block: the search behind `paceline.memory.plan`. Pure.

Blocks run from first to last and back ([Note: a step's memory] in ``plan.py``). Each runs in one of its ways, which
holds bytes, takes bytes for its backward and adds time. On top of what those before hold, the blocks from i on need

    need_n = loss        need_i = max(backward_i, held_i + need_i+1)        need_0 must fit

[Note: why the choice is exact] A *tail* is a choice for the blocks from i on. To the blocks before, it is two numbers:
what it needs and the time that it adds; and whatever they choose, less of either is never worse. So of two tails, one
that needs no less and adds no less can be forgotten. What is left is a *front*: tails of which each needs more and adds
less than the one before it. Fronts are built from the last block to the first, and block 0's holds every trade of peak
against time, ties included. Times are whole nanoseconds, so sums do not depend on their order.

Equal blocks give equal sums, and their fronts stay short. Where all blocks differ a front could double with each, but
for a bound. Put a *price* on every byte held. At any price, the blocks before i add at least

    the sum of each one's least (time + price x held), minus price x the bytes that the tail leaves them to hold

(Lagrange's relaxation, here for every prefix of the blocks at once: `_floor_after`). A tail that by this bound ends
above a choice known to fit is dropped. That choice comes from the same sweep with fronts cut to a few promising tails,
then to more and more, until nothing is cut: then what was found is the fastest.

The problem is NP-hard, so the search is bounded, by `MOST_TAILS`. 1,000 blocks that all differ take about half a second
and come out exact. Something may stay cut where many blocks all differ in size and yet time is proportional to bytes,
within about one per cent: more choices than anybody can count are then equally good, to a microsecond. The bounds of
all that was cut still prove how much faster another choice could at most be: 0.5 us in the cases tried, or where each
recompute costs a constant besides, a thousandth of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["MOST_BYTES", "MOST_NS", "MOST_TAILS", "Found", "Way", "fastest"]

MOST_BYTES = 2**60
"""The most bytes that all figures together may come to: an exbibyte. int64 holds twice their sum."""

MOST_NS = 2**53
"""The most nanoseconds that all figures together may come to: 104 days. A float64 holds every whole number so far."""

MOST_TAILS = 2**24
"""The most tails in all fronts of a sweep together. It bounds the search: about 4 seconds and 0.3 GB."""

_FIRST_WIDTH = 64
_MOST_PRICES = 4096  # more would only cost memory
_ROUNDING = 2.0**-40  # relative; more than the additions of a bound can be off, and nothing beside a nanosecond


class Way(NamedTuple):
    """One way of running a block: bytes held and bytes for its backward, as of `paceline.memory.Option`; time added."""

    held: int
    backward: int
    ns: int


class Found(NamedTuple):
    """A choice that fits.

    Args:
        places: which of its ways each block runs in.
        ns: time that it adds; infinite if a sweep found none.
        need: bytes that it needs, need_0.
        cut_ns: no choice that was cut adds less; infinite if none was, and then this choice is the fastest.
    """

    places: list[int]
    ns: float
    need: int
    cut_ns: float


def fastest(blocks: Sequence[Sequence[Way]], *, loss: int, room: int) -> Found | None:
    """The choice that adds the least time among those that need at most ``room`` bytes; ``None``: none fits.

    Of equally fast ones that which needs least; of those always the same one. Tails that need and add the same are told
    apart by their first blocks, which then run in the later of their ways.

    >>> fastest([[Way(9, 12, 0), Way(1, 13, 5)]] * 3, loss=5, room=25)
    Found(places=[1, 0, 0], ns=5, need=24, cut_ns=inf)
    """
    search = _Search.of(blocks, loss, min(room, MOST_BYTES))
    if search is None:
        return None
    width, widest = _FIRST_WIDTH, MOST_TAILS // max(len(blocks), 1)
    best = search.sweep(width, known_ns=math.inf)
    while best.cut_ns < math.inf and width < widest:
        width = min(8 * width, widest)
        wider = search.sweep(width, known_ns=best.ns)
        best = wider if (wider.ns, wider.need) <= (best.ns, best.need) else best._replace(cut_ns=wider.cut_ns)
    return best


@dataclass(frozen=True, kw_only=True)
class _Search:
    """What sweeps share.

    Args:
        ways: of each block with their places, those with which ``room`` can do, from last to first.
        ceilings: for each i the most that need_i may be, so that with some choice before i all fits.
        prices: nanoseconds for a byte held, ascending from 0.
        floors: for each i and price, a lower bound of (ns + price x held) over choices for the blocks before i.
        loss: bytes, need_n.
        room: bytes, the most that need_0 may be.
    """

    ways: list[list[tuple[int, Way]]]
    ceilings: list[int]
    prices: NDArray[np.float64]
    floors: list[NDArray[np.float64]]
    loss: int
    room: int

    @classmethod
    def of(cls, blocks: Sequence[Sequence[Way]], loss: int, room: int) -> _Search | None:
        """``None``: no choice fits."""
        ways: list[list[tuple[int, Way]]] = []
        ceiling, ceilings = room, []
        for block in blocks:
            fitting = [(place, way) for place, way in enumerate(block) if max(way.held, way.backward) <= ceiling]
            if not fitting:
                return None
            ways.append(fitting[::-1])
            ceilings.append(ceiling)
            ceiling -= min(way.held for _, way in fitting)
        if loss > ceiling:
            return None
        prices = _prices(blocks)
        floors = [np.zeros_like(prices)]
        for block_ways in ways:
            floors.append(_floor_after(floors[-1], [way for _, way in block_ways], prices, room))
        return cls(ways=ways, ceilings=ceilings, prices=prices, floors=floors, loss=loss, room=room)

    def sweep(self, width: int, *, known_ns: float) -> Found:
        """The best choice that fronts cut to ``width`` lead to, given that one which adds ``known_ns`` is known."""
        need, ns = np.array([self.loss], dtype=np.int64), np.zeros(1, dtype=np.int64)
        steps: list[tuple[int, NDArray[np.int32]]] = []  # of each tail in a front: its block's way and its own tail
        cut_ns = math.inf
        for block in reversed(range(len(self.ways))):
            ways, tails = self.ways[block], len(need)
            need = np.concatenate([np.maximum(way.backward, way.held + need) for _, way in ways])
            ns = np.concatenate([way.ns + ns for _, way in ways])
            front = _front(need, ns)
            ends_ns = ns[front] + self._before_ns(block, need[front])
            stays = (need[front] <= self.ceilings[block]) & (ends_ns <= known_ns)
            front, ends_ns = front[stays], ends_ns[stays]
            if len(front) > width:
                stays = _promising(ends_ns, width)
                cut_ns = min(cut_ns, math.ceil(ends_ns[~stays].min()))
                front = front[stays]
            elif not len(front):  # what led to the known choice was cut
                return Found([], math.inf, 0, cut_ns)
            need, ns = need[front], ns[front]
            steps.append((tails, front.astype(np.int32)))
        places, at = [], len(ns) - 1  # a front's last tail adds least
        for ways, (tails, made_of) in zip(self.ways, reversed(steps), strict=True):
            way, at = divmod(int(made_of[at]), tails)
            places.append(ways[way][0])
        return Found(places, int(ns[-1]), int(need[-1]), cut_ns)

    def _before_ns(self, block: int, need: NDArray[np.int64]) -> NDArray[np.float64]:
        """A lower bound of what the blocks before ``block`` add, if it and the rest need ``need``.

        Every price gives one. Over prices a floor is concave, and its slope is what the blocks hold at that price: the
        best price is where that comes down to the bytes that are left.
        """
        floor, left = self.floors[block], (self.room - need).astype(np.float64)
        slopes = np.diff(floor) / np.diff(self.prices)
        best = np.searchsorted(-slopes, -left)
        bound: NDArray[np.float64] = floor[best] * (1 - _ROUNDING) - self.prices[best] * left * (1 + _ROUNDING)
        return np.maximum(bound, 0)


def _prices(blocks: Sequence[Sequence[Way]]) -> NDArray[np.float64]:
    """The prices at which a block would change its way, and 0: bounds are best at one of these."""
    trades = {
        (fewer.ns - more.ns) / (more.held - fewer.held)
        for ways in blocks
        for more in ways
        for fewer in ways
        if fewer.held < more.held and fewer.ns > more.ns
    }
    return np.array([0.0, *sorted(trades)[:: 1 + len(trades) // _MOST_PRICES]])


def _floor_after(
    floor: NDArray[np.float64], ways: Sequence[Way], prices: NDArray[np.float64], room: int
) -> NDArray[np.float64]:
    """The floor of the blocks up to one, from that of the blocks before it.

    To run it in one of its ways, those before must leave bytes for its backward: held <= room - backward. At a dearer
    price q they add at least floor(q) - q x held, so at the price p asked for, time and price come to floor(q) -
    (q - p) x held or more. That is least for the most that they may hold, and the best q counts.
    """
    floors = []
    for way in ways:
        most_held = float(room - way.backward)
        dearer = np.maximum.accumulate((floor - prices * most_held * (1 + _ROUNDING))[::-1])[::-1] + prices * most_held
        floors.append(np.maximum(floor, dearer) + way.ns + prices * way.held)
    lowest: NDArray[np.float64] = np.minimum.reduce(floors)
    return lowest


def _front(need: NDArray[np.int64], ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places of the tails that no other beats, by ascending need and so descending time; of equals the first."""
    by_need: NDArray[np.int64] = np.argsort(need, kind="stable")
    ns = ns[by_need]
    faster = np.ones(len(ns), dtype=bool)
    faster[1:] = ns[1:] < np.minimum.accumulate(ns)[:-1]
    by_need = by_need[faster]
    fastest_of_its_need = np.append(np.diff(need[by_need]) > 0, True)
    front: NDArray[np.int64] = by_need[fastest_of_its_need]
    return front


def _promising(ends_ns: NDArray[np.float64], width: int) -> NDArray[np.bool_]:
    """Which ``width`` of a front stay: most by their bounds, and some spread over it, since bounds can be near equal.

    The first is among them: it needs least, so that every sweep can end in a choice that fits.
    """
    lowest = width * 3 // 4
    stays = np.zeros(len(ends_ns), dtype=bool)
    stays[np.argpartition(ends_ns, lowest)[:lowest]] = True
    stays[np.linspace(0, len(stays) - 1, width - lowest).astype(np.int64)] = True
    return stays
