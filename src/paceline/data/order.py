"""Which samples a lane sees at a step: pure functions of (recipe, step, lane). Nothing here knows the workers.

An *order* maps positions of an epoch to sample indices; a `Plan` deals the positions over lanes and steps:

>>> print(*describe(samples=10, lanes=3, order="sequential"), sep="\\n")
lane 0: [0, 3, 6, 9]
lane 1: [1, 4, 7]
lane 2: [2, 5, 8]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config import Recipe
from paceline.errors import ConfigError, DataError

__all__ = ["Cipher", "Order", "Permutation", "Plan", "Sequential", "describe"]

OrderName = Literal["cipher", "permutation", "sequential"]
Tail = Literal["short", "pad", "drop"]


class Order(Protocol):
    """A bijection on ``[0, samples)``, another one each epoch."""

    def indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sample at each of ``positions``, all of them in ``[0, samples)``."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sequential:
    """The samples as they lie, in every epoch.

    >>> Sequential(samples=5).indices(3, np.array([0, 4]))
    array([0, 4])
    """

    samples: int

    def indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions


@dataclass(frozen=True, kw_only=True)
class Permutation:
    """The order of torch's ``DistributedSampler(shuffle=True)``: ``randperm`` seeded with ``seed + epoch``.

    The whole epoch is drawn at once: 8 bytes and some nanoseconds a sample. `Cipher` needs neither.
    """

    samples: int
    seed: int

    def indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return _randperm(self.samples, self.seed + epoch)[positions]


@lru_cache(maxsize=2)  # the epoch that ends and the one that a prefetching loader has begun
def _randperm(samples: int, seed: int) -> NDArray[np.int64]:
    import torch  # the only use here; every other order works without it

    drawn: NDArray[np.int64] = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).numpy()
    drawn.flags.writeable = False
    return drawn


_MASK = 2**64 - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROUNDS = 8


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, kw_only=True)
class Cipher:
    """A keyed bijection on ``[0, samples)``: O(1) memory, O(1) access anywhere, up to 2**62 samples.

    A Feistel network (Luby, Rackoff 1988) over the mixed radix ``x = left * b + right`` with ``a = ceil(sqrt(n))``,
    ``b = ceil(n / a)``, walked until it lands below n (Black, Rogaway: Ciphers with arbitrary finite domains, 2002;
    ``a * b - n < a``, so a second walk is rare). All arithmetic is modulo 2**64 unless said, ``mix`` is the
    finaliser of splitmix64 and ``g = 0x9E3779B97F4A7C15``::

        key       = mix(mix(seed + g) ^ epoch)
        round key = mix(key + (round + 1) * g)                       for round in 0..7
        even round: left  = (left  + (mix(right ^ round key) >> 16)) mod a
        odd round:  right = (right + (mix(left  ^ round key) >> 16)) mod b

    This definition is part of every run's identity: it never changes under this name. It shuffles; it hides nothing.

    >>> Cipher(samples=10**12, seed=0).indices(0, np.array([10**9]))
    array([658988178004])
    """

    samples: int
    seed: int

    def round_keys(self, epoch: int) -> list[int]:
        key = _mix(_mix((self.seed + _GOLDEN) & _MASK) ^ epoch)
        return [_mix((key + (i + 1) * _GOLDEN) & _MASK) for i in range(_ROUNDS)]

    def indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        n = self.samples
        a = math.isqrt(n - 1) + 1
        b = -(-n // a)
        keys = self.round_keys(epoch)
        x = self._encipher(np.atleast_1d(positions).astype(np.uint64), a, b, keys)
        while (outside := np.flatnonzero(x >= np.uint64(n))).size:
            x[outside] = self._encipher(x[outside], a, b, keys)
        return x.astype(np.int64).reshape(np.shape(positions))

    @staticmethod
    def _encipher(x: NDArray[np.uint64], a: int, b: int, keys: list[int]) -> NDArray[np.uint64]:
        size_a, size_b, shift = np.uint64(a), np.uint64(b), np.uint64(16)
        left, right = x // size_b, x % size_b
        for i, key in enumerate(keys):
            if i % 2 == 0:
                left = (left + (_mix_array(right ^ np.uint64(key)) >> shift)) % size_a
            else:
                right = (right + (_mix_array(left ^ np.uint64(key)) >> shift)) % size_b
        return left * size_b + right


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Law 2: the samples of every (step, lane), computed, never carried.

    In an epoch, position p belongs to lane ``p % lanes``, and step k covers positions ``[k * batch, (k+1) * batch)``;
    the last step of an epoch may be short and leave lanes empty. Steps count from 0 and run on over epochs.

    >>> plan = Plan(samples=10, batch=4, micro_batch=1, lanes=2, tail="short", order="sequential", seed=0)
    >>> [[indices.tolist() for indices in plan.lane(step, lane=1)] for step in range(plan.steps_per_epoch)]
    [[[1], [3]], [[5], [7]], [[9]]]

    Args:
        samples: of the dataset.
        batch: samples of a step over all lanes, a multiple of ``lanes``.
        micro_batch: samples of one forward and backward.
        tail: what becomes of ``samples % lanes``, see `Recipe`.

    Raises:
        DataError: no samples, or fewer than lanes with ``tail="drop"``, which would leave nothing.
    """

    samples: int
    batch: int
    micro_batch: int
    lanes: int
    tail: Tail
    order: OrderName
    seed: int

    def __post_init__(self) -> None:
        if self.batch % self.lanes:
            raise ConfigError(
                "cannot deal samples", found=f"batch={self.batch}, lanes={self.lanes}", needed="a multiple of the lanes"
            )
        if self.samples < 1:
            raise DataError(
                "cannot deal samples", found="an empty dataset", needed="at least one sample", fix="Check the data"
            )
        if self.tail == "drop" and self.samples < self.lanes:
            raise DataError(
                "cannot deal samples",
                found=f"tail=drop, samples={self.samples}, lanes={self.lanes}",
                needed="samples >= lanes, or an epoch is empty",
                fix="Use tail: short, fewer lanes or more data",
            )

    @classmethod
    def of(cls, recipe: Recipe, samples: int) -> Plan:
        """The plan of ``recipe`` over a dataset of ``samples``."""
        return cls(
            samples=samples,
            batch=recipe.batch,
            micro_batch=recipe.micro_batch,
            lanes=recipe.lanes,
            tail=recipe.tail,
            order=recipe.order,
            seed=recipe.seed,
        )

    @cached_property
    def source(self) -> Order:
        """The bijection behind the plan."""
        if self.order == "sequential":
            return Sequential(samples=self.samples)
        if self.order == "permutation":
            return Permutation(samples=self.samples, seed=self.seed)
        return Cipher(samples=self.samples, seed=self.seed)

    @property
    def epoch_samples(self) -> int:
        """Positions of an epoch: the samples, padded or cut to a multiple of the lanes."""
        if self.tail == "pad":
            return -(-self.samples // self.lanes) * self.lanes
        if self.tail == "drop":
            return self.samples // self.lanes * self.lanes
        return self.samples

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.epoch_samples // self.batch)

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, that ``step`` is part of."""
        return step // self.steps_per_epoch

    def lane(self, step: int, lane: int) -> list[NDArray[np.int64]]:
        """Sample indices of each micro-batch of ``lane`` in ``step``; the last may be short, ``[]``: none."""
        span = self._positions(step, lane)
        positions = np.arange(span.start, span.stop, span.step, dtype=np.int64)
        indices = self.source.indices(self.epoch_of(step), positions % self.samples)  # pad: the epoch's start again
        return [indices[i : i + self.micro_batch] for i in range(0, len(indices), self.micro_batch)]

    def micro_batches(self, step: int, lane: int) -> int:
        """How many of them there are, without the work of finding their samples."""
        return -(-len(self._positions(step, lane)) // self.micro_batch)

    def _positions(self, step: int, lane: int) -> range:
        """Positions of the epoch that ``lane`` has in ``step``."""
        start = step % self.steps_per_epoch * self.batch
        return range(start + lane, min(start + self.batch, self.epoch_samples), self.lanes)


def describe(
    samples: int,
    lanes: int,
    order: OrderName = "cipher",
    tail: Tail = "short",
    seed: int = 0,
    epoch: int = 0,
) -> list[str]:
    """One line a lane with all its samples of ``epoch``, in order.

    >>> describe(samples=4, lanes=3, order="sequential", tail="pad")
    ['lane 0: [0, 3]', 'lane 1: [1, 0]', 'lane 2: [2, 1]']
    """
    whole_epoch = (samples // lanes + 1) * lanes
    plan = Plan(
        samples=samples, batch=whole_epoch, micro_batch=whole_epoch, lanes=lanes, tail=tail, order=order, seed=seed
    )
    return [f"lane {lane}: {[int(i) for indices in plan.lane(epoch, lane) for i in indices]}" for lane in range(lanes)]
