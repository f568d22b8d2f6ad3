"""What a CPU's process holds besides what is alive: gaps in its heap. Pure arithmetic.

[Note: gaps] Tensors below `SMALL` share a heap. What dies there leaves a gap, and not all that comes next fits one. Nor
does the heap shrink as fast as it empties: a large tensor, such as logits, comes on top of the most that the heap had,
though not at the same moment. How wide gaps are depends on the order of all sizes, and nobody can say it beforehand.
What is counted here was found in some dozens of runs of GPTs with glibc, of ten steps each, since gaps grow for some
(benchmarks/memory.py): as much as comes and goes while one block and the loss are at work, whatever is recomputed, and
parts of what stays. A GPU's plan counts tensors, as its allocator does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["SMALL", "Heap", "state_gaps"]

SMALL = 2**25
"""Bytes. From here on a tensor has pages of its own, which go back to the system when it dies: glibc's largest
``M_MMAP_THRESHOLD``."""

_OF_ACTIVATIONS, _OF_OPTIMIZER = 0.35, 0.2
_BF16 = 16 * 2**20
"""What kernels of that precision take for themselves: code made for a shape, weights in another layout."""


@dataclass(frozen=True, kw_only=True)
class Heap:
    """How a forward and backward uses the heap.

    Args:
        small: the part, 0 to 1, of what blocks hold that is in small tensors.
        loss: most bytes behind the last block, on top of what blocks hold; without ``beside``.
        beside: the most of these in large tensors, which come on top of whatever the heap had before.
        turnover: bytes in small tensors that come and go while one block and the loss are at work.
    """

    small: float
    loss: int
    beside: int
    turnover: int

    def needed(self, most: int) -> int:
        """Bytes with gaps for the ``most`` without ``beside``.

        >>> Heap(small=0.5, loss=0, beside=100, turnover=50).needed(1000)
        1325
        """
        return most + math.ceil(_OF_ACTIVATIONS * self.small * most) + self.turnover + self.beside

    @property
    def left(self) -> int:
        """What the heap keeps when all activations are gone: at its end, twice a small tensor at most."""
        return min(self.turnover, 2 * SMALL)

    def room(self, budget: int) -> int:
        """The most without ``beside`` that needs no more than ``budget``.

        >>> Heap(small=0.5, loss=0, beside=100, turnover=50).room(1325)
        1000
        """
        left = max(0, budget - self.beside - self.turnover)
        return math.floor(left / (1 + _OF_ACTIVATIONS * self.small))


def state_gaps(optimizer: float, precision: str) -> int:
    """Gaps between the ``optimizer`` bytes of small tensors, which come into those of the first step; and what kernels
    take."""
    return math.ceil(_OF_OPTIMIZER * optimizer) + (_BF16 if precision == "bf16" else 0)
