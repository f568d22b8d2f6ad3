"""What a worker holds besides activations, in bytes, and at which moment of a step that is the most. Pure arithmetic.

>>> gradient_sets(lanes=8, workers=1), gradient_sets(lanes=8, workers=8), gradient_sets(lanes=8, workers=3)
(4, 1, 3)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.lanes import lanes_of
from paceline.reduction.tree import Node, cover, fold

__all__ = ["Footprint", "Moment", "gradient_sets", "inbox_elements"]


Moment = Literal["backward", "update", "save"]
"""``backward``: a micro-batch's forward and backward; ``update``: the optimizer's step; ``save``: between two steps."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one worker, the one that holds the most. Activations are not in it: they depend on the micro-batch.

    Args:
        process: the interpreter with torch, before there is a model.
        parameters: weights, each storage once.
        buffers: what the model holds besides, such as BatchNorm's statistics, and the step's copy of it.
        gradients: one set of gradients in flat memory.
        lane_sums: further sets, for partial sums of lanes. See `gradient_sets`.
        optimizer: its state, from the first update on.
        optimizer_work: what an update needs on top while it runs.
        exchange: room for what other workers send.
        inputs: batches that were loaded.
        copy: the checkpoint's copy in memory, on the worker that saves.
        copy_stays: the copy is there during the steps that follow, while it is written in the background.
        gaps: see `paceline.memory.gaps`; without those of activations.
    """

    process: int
    parameters: int
    buffers: int
    gradients: int
    lane_sums: int
    optimizer: int
    optimizer_work: int
    exchange: int
    inputs: int
    copy: int
    copy_stays: bool
    gaps: int = 0

    @property
    def always(self) -> int:
        """What is there from the first update on, whatever happens: all but activations, update's work and copy."""
        state = self.parameters + self.buffers + self.gradients + self.lane_sums + self.optimizer
        return self.process + state + self.exchange + self.inputs + self.gaps

    @property
    def during_backward(self) -> int:
        """What is there in a micro-batch besides its activations."""
        return self.always + (self.copy if self.copy_stays else 0)

    def at(self, moment: Moment, activations: int, left: int = 0) -> int:
        """Bytes at that moment.

        Args:
            activations: most bytes that a micro-batch's forward and backward need on top of what is there, with
                their gaps.
            left: what the heap keeps of that afterwards.
        """
        if moment == "backward":
            return self.during_backward + activations
        return left + (self.always + self.copy if moment == "save" else self.during_backward + self.optimizer_work)

    def peak(self, activations: int, left: int = 0) -> tuple[int, Moment]:
        """The most bytes at any moment, and which it is; the earliest of equal ones. Arguments as for `at`.

        >>> sizes = dict(process=300, parameters=100, buffers=0, gradients=100, lane_sums=200, optimizer=200)
        >>> sizes |= dict(optimizer_work=0, exchange=50, inputs=1, copy=300, copy_stays=False)
        >>> Footprint(**sizes).peak(activations=1000), Footprint(**sizes).peak(activations=100)
        ((1951, 'backward'), (1251, 'save'))
        """
        moments: tuple[Moment, ...] = ("backward", "update", "save")
        most = max(moments, key=lambda moment: self.at(moment, activations, left))
        return self.at(most, activations, left), most


def gradient_sets(*, lanes: int, workers: int) -> int:
    """How many sets of gradients the worker with the most holds at once: one for the lane at work, and partial sums.

    With n = lanes / workers a power of two that is ``1 + log2(n)``.
    """
    most = 0
    for rank in range(workers):
        parts: list[tuple[Node, None]] = []
        for lane in lanes_of(rank, workers, lanes):  # as `paceline.reduction.buckets.LaneSums` does
            parts = [*fold(lanes, parts, lambda left, right: None), ((lane, lane + 1), None)]
            most = max(most, len(parts))
    return most


def inbox_elements(bucket_sizes: Sequence[int], *, lanes: int, workers: int, grain: int) -> int:
    """Elements of the buffer into which a worker receives the others' chunks of a bucket, for the one with most.

    A worker owns about ``1 / workers`` of each bucket, and takes as many chunks as the others have partial sums. The
    buffer is made for the largest bucket, and used for all.

    Args:
        bucket_sizes: elements of each bucket of one dtype.
        grain: chunks begin at multiples of so many elements.

    >>> inbox_elements([1024, 4096], lanes=8, workers=4, grain=16), inbox_elements([4096], lanes=8, workers=1, grain=16)
    (3072, 0)
    """
    sums = []
    for rank in range(workers):
        mine = lanes_of(rank, workers, lanes)
        sums.append(len(cover(lanes, mine.start, mine.stop)))

    def chunk(rank: int, size: int) -> int:
        start, stop = (min(size, -(-size * at // (workers * grain)) * grain) for at in (rank, rank + 1))
        return -(-(stop - start) // grain) * grain

    most = 0
    for rank in range(workers):
        widest = max((chunk(rank, size) for size in bucket_sizes), default=0)
        most = max(most, widest * (sum(sums) - sums[rank]))
    return most
