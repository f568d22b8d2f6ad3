"""What a CPU's process holds besides what is alive: gaps in its heap. Pure arithmetic.

[Note: gaps] Tensors below `SMALL` share a heap. What dies there leaves a gap, and not all that comes next fits one. Nor
does the heap shrink as fast as it empties: a large tensor, such as logits, comes on top of the most that the heap had,
though not at the same moment. How wide gaps are depends on the order of all sizes, and nobody can say it beforehand:
the parts here are allowances, from runs of GPTs with glibc (benchmarks/memory.py). A GPU's plan counts tensors, as its
allocator does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["SMALL", "Heap", "state_gaps"]

SMALL = 2**25
"""Bytes. From here on a tensor has pages of its own, which go back to the system when it dies: glibc's largest
``M_MMAP_THRESHOLD``."""

_OF_ACTIVATIONS, _OF_STATE = 0.25, 0.2
_WORK = {"fp32": 12 * 2**20, "bf16": 28 * 2**20}
"""For what kernels take for themselves: code made for a shape, weights in another layout."""


@dataclass(frozen=True, kw_only=True)
class Heap:
    """How a forward and backward uses the heap.

    Args:
        small: the part, 0 to 1, of what blocks hold that is in small tensors.
        loss: most bytes behind the last block, on top of what blocks hold; without ``beside``.
        beside: the most of these in large tensors, which come on top of whatever the heap had before.
    """

    small: float
    loss: int
    beside: int

    def needed(self, most: int) -> int:
        """Bytes with gaps for the ``most`` without ``beside``.

        >>> Heap(small=0.5, loss=0, beside=100).needed(800)
        1000
        """
        return most + math.ceil(_OF_ACTIVATIONS * self.small * most) + self.beside

    def room(self, budget: int) -> int:
        """The most without ``beside`` that needs no more than ``budget``.

        >>> Heap(small=0.5, loss=0, beside=100).room(1000)
        800
        """
        return math.floor(max(0, budget - self.beside) / (1 + _OF_ACTIVATIONS * self.small))


def state_gaps(small: float, precision: str) -> int:
    """Gaps between ``small`` bytes that live long, since the optimizer's state comes into those of the first step; and
    what kernels take."""
    return math.ceil(_OF_STATE * small) + _WORK[precision]
