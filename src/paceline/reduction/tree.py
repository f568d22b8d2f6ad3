"""The one shape in which lanes are summed. Pure: run it in a REPL.

A *node* is a range of lanes ``(lo, hi)``. The root is all of them; a node of n > 1 lanes splits after the largest power
of two below n. Floating-point addition is not associative, so whoever adds must add in this shape; it is commutative,
so the sides may swap. `cover` names the nodes that a worker can sum alone, `fold` adds what may be added.

>>> cover(8, 2, 7)
[(2, 4), (4, 6), (6, 7)]
>>> parts = [((lane, lane + 1), f"{lane}") for lane in range(5)]
>>> fold(5, parts, lambda left, right: f"({left}+{right})")
[((0, 5), '(((0+1)+(2+3))+4)')]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["Node", "cover", "fold", "split", "total"]

Node = tuple[int, int]
T = TypeVar("T")


def split(lo: int, hi: int) -> int:
    """The lane at which node ``(lo, hi)`` of two or more lanes splits.

    >>> split(0, 8), split(0, 3), split(4, 7)
    (4, 2, 6)
    """
    return lo + (1 << ((hi - lo - 1).bit_length() - 1))


def cover(lanes: int, lo: int, hi: int) -> list[Node]:
    """The fewest nodes of the tree over ``lanes`` that together are exactly ``lo .. hi``, from left to right."""

    def walk(a: int, b: int) -> list[Node]:
        if lo <= a and b <= hi:
            return [(a, b)]
        if b <= lo or hi <= a:
            return []
        middle = split(a, b)
        return walk(a, middle) + walk(middle, b)

    return walk(0, lanes)


def _are_siblings(lanes: int, left: Node, right: Node) -> bool:
    """Whether two neighbouring nodes are the two halves of a node of the tree."""
    a, b = 0, lanes
    while b - a > right[1] - left[0]:
        middle = split(a, b)
        a, b = (a, middle) if left[0] < middle else (middle, b)
    return (a, b) == (left[0], right[1]) and b - a > 1 and split(a, b) == left[1] == right[0]


def fold(lanes: int, parts: Sequence[tuple[Node, T]], add: Callable[[T, T], T]) -> list[tuple[Node, T]]:
    """Adds siblings until none are left side by side; ``parts`` are disjoint nodes from left to right.

    Folding what is folded changes nothing, so lanes may come one at a time (then this is a binary counter) or all at
    once: the additions are the same.
    """
    done: list[tuple[Node, T]] = []
    for part in parts:
        done.append(part)
        while len(done) > 1 and _are_siblings(lanes, done[-2][0], done[-1][0]):
            (right_node, right), (left_node, left) = done.pop(), done.pop()
            done.append(((left_node[0], right_node[1]), add(left, right)))
    return done


def total(values: Sequence[float]) -> float:
    """The sum of one float64 per lane in the tree's shape.

    >>> total([1e16, 1.0, -1e16, 1.0])
    0.0
    """
    parts = [((lane, lane + 1), value) for lane, value in enumerate(values)]
    ((_, result),) = fold(len(values), parts, lambda left, right: left + right)
    return result
