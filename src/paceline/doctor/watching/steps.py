"""The same steps of several ranks and of one worker, and how far their gradients are apart: arithmetic on what
`probe.comparing` tells of each step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from paceline.doctor.watching.records import Account, Record, Run

__all__ = ["Gap", "Step", "difference", "gap_of", "mean_difference", "steps_of", "tolerance", "weighed"]

_ROUNDING: Final = 1e-3
"""Of float32 gradients: sums of the same numbers in another order come to 1e-7 to 1e-5, and badly conditioned ones to
more. No mistake that is worth a word comes to so little."""
_LOW_ROUNDING: Final = 0.05
"""The same where some of it is computed in 16 bits, which hold two to three digits."""


class Step(NamedTuple):
    """The same step of all ranks, and of one worker.

    Args:
        names: of the parameters.
        numbers, numbers_of_one: of the samples that their loaders have given since the step before.
    """

    number: int
    ranks: list[Record]
    one: Record
    names: list[str]
    numbers: list[int]
    numbers_of_one: list[int]

    @property
    def records(self) -> list[Record]:
        return [*self.ranks, self.one]

    @property
    def losses(self) -> tuple[float, float]:
        each = [sum(record["losses"]) for record in self.ranks]
        return sum(each) / len(each), float(sum(self.one["losses"]))


def steps_of(several: Run, alone: Run) -> list[Step]:
    """As far as all have told of them, and not more than goes into a message."""
    found: list[Step] = []
    names: dict[str, list[str]] = {}
    for each in zip(*(_taken(account) for account in (*several.accounts, *alone.accounts)), strict=False):
        *ranks, (one, numbers_of_one) = each
        if any(record["cut"] for record, _ in each):
            break
        numbers = sorted(number for _, own in ranks for number in own)
        its_names = names.setdefault(str(one["sizes"]), one["names"] or [])  # they are told once
        records = [record for record, _ in ranks]
        found.append(Step(len(found) + 1, records, one, its_names, numbers, sorted(numbers_of_one)))
    return found


def _taken(account: Account) -> Iterator[tuple[Record, list[int]]]:
    """Each step, and the numbers of the samples that were loaded since the one before."""
    numbers: list[int] = []
    for record in account.of("batch", "measured"):
        if record.kind == "batch":
            numbers += record["indices"] or []
        else:
            yield record, numbers
            numbers = []


class Gap(NamedTuple):
    """How far a gradient of the ranks is from that of one worker.

    Args:
        difference: relative to the one worker's.
        ratio: how many times as large it is, along with that.
        rest: what is left of the difference when it is divided by the ratio.
        among: how far the ranks' own are from each other.
        parameter: where it differs most.
    """

    difference: float
    ratio: float
    rest: float
    among: float
    parameter: str

    def as_dict(self, step: Step) -> dict[str, Any]:
        told = {"difference": self.difference, "ratio": self.ratio}
        known = {name: value if math.isfinite(value) else None for name, value in told.items()}
        return {"step": step.number, **known, "parameter": self.parameter}


def weighed(record: Record, name: str) -> list[float]:
    """Values of all tensors, each as heavy as those between it and the next one that are not told."""
    return [
        value * math.sqrt(size / len(values))
        for size, values in zip(record["sizes"], record[name], strict=True)
        for value in values
    ]


def _length(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values))


def difference(own: Sequence[float], other: Sequence[float]) -> float:
    """How far a vector is from another one, relative to that; of a NaN or an infinity, infinitely far.

    >>> difference([3.0, 0.0], [2.0, 0.0])
    0.5
    """
    if len(own) != len(other):
        return math.inf
    apart = _length([a - b for a, b in zip(own, other, strict=True)])
    if apart == 0:
        return 0.0
    length = _length(other)
    return apart / length if length > 0 and math.isfinite(apart) else math.inf


def _norms(record: Record) -> list[float]:
    return [norm or 0.0 for norm in record["norms"]]


def gap_of(step: Step) -> Gap:
    """Of the rank that is farthest from one worker."""
    one = weighed(step.one, "gradients")
    each = [weighed(record, "gradients") for record in step.ranks]
    differences = [
        max(difference(own, one), difference(_norms(record), _norms(step.one)))
        for own, record in zip(each, step.ranks, strict=True)
    ]
    worst = max(range(len(each)), key=lambda rank: differences[rank])
    own = each[worst]
    square = math.fsum(value * value for value in one)
    same = len(own) == len(one) and square > 0 and math.isfinite(square)
    ratio = math.fsum(a * b for a, b in zip(own, one, strict=True)) / square if same else math.nan
    return Gap(
        difference=differences[worst],
        ratio=ratio,
        rest=difference(own, [ratio * value for value in one]) if same else math.inf,
        among=max(difference(other, each[0]) for other in each),
        parameter=_worst(step, step.ranks[worst]),
    )


def _worst(step: Step, record: Record) -> str:
    """The parameter in which a rank's gradient differs most."""
    pairs = zip(record["gradients"], step.one["gradients"], strict=True)
    apart = [_length([a - b for a, b in zip(*pair, strict=False)]) for pair in pairs]
    number = max(range(len(apart)), key=lambda i: apart[i] if math.isfinite(apart[i]) else 0.0, default=0)
    return step.names[number] if number < len(step.names) else ""


def tolerance(step: Step) -> float:
    """What a difference may come to by rounding alone."""
    return _LOW_ROUNDING if any(record["low"] for record in step.records) else _ROUNDING


def mean_difference(step: Step) -> float:
    """How far the mean of the ranks' own gradients is from that of one worker."""
    each = [weighed(record, "gradients") for record in step.ranks]
    if len({len(own) for own in each}) > 1:
        return math.inf
    return difference(
        [math.fsum(column) / len(each) for column in zip(*each, strict=True)], weighed(step.one, "gradients")
    )
