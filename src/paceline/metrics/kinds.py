"""What is counted, how two counts are added, and what follows from them.

Shapes: C classes. Counts are int64, sums of floats float64.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar

from torch import Tensor

from paceline.errors import UsageError

__all__ = ["F1", "Average", "ConfusionMatrix", "Mean", "Metric", "Perplexity", "Variance", "merged", "plain"]

Average = Literal["macro", "micro", "weighted", "binary"]
"""How F1 becomes one number: see `paceline.metrics.f1`."""

M = TypeVar("M", bound="Metric")


class Metric(ABC):
    """What has been counted of some samples. ``+`` adds what was counted of others, `compute` gives the result.

    For a metric of your own, write a frozen dataclass with `merge` and `compute`; it travels between workers by pickle,
    its tensors on the CPU. Floats are added micro-batch by micro-batch within a lane, then in a fixed tree over the
    lanes, so bits do not depend on the workers.

    >>> class RootMeanSquare(Mean):
    ...     def compute(self) -> float:
    ...         return math.sqrt(super().compute())
    >>> (RootMeanSquare(sum=9.0, weight=2) + RootMeanSquare(sum=41.0, weight=3)).compute()
    3.1622776601683795
    """

    @property
    def kind(self) -> str:
        """What two metrics must have in common to be added, in words."""
        return type(self).__name__

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """The counts of both, which are of one kind. Integers must add exactly."""

    @abstractmethod
    def compute(self) -> Any:
        """The result: a number, or nested lists of them.

        Raises:
            UsageError: nothing was counted that it could be computed from.
        """

    def __add__(self, other: Self) -> Self:
        if not isinstance(other, Metric):
            return NotImplemented
        return merged("metrics", self, other)


@dataclass(frozen=True, kw_only=True)
class Mean(Metric):
    """A sum over a weight: what a plain pair (sum, weight) means.

    Args:
        sum: of the values.
        weight: how many samples or tokens, or whatever else the sum is over.
    """

    sum: float
    weight: float

    def merge(self, other: Self) -> Self:
        return replace(self, sum=self.sum + other.sum, weight=self.weight + other.weight)

    def compute(self) -> float:
        if not self.weight:
            raise _nothing("a weight of 0", "a weight above 0")
        return self.sum / self.weight


@dataclass(frozen=True, kw_only=True)
class Perplexity(Mean):
    """The exponential of a mean loss per token, in nats; infinite where that leaves float64."""

    def compute(self) -> float:
        mean_loss = super().compute()
        try:
            return math.exp(mean_loss)
        except OverflowError:
            return math.inf


@dataclass(frozen=True, kw_only=True)
class Variance(Metric):
    """Mean and sum of squared deviations, merged without cancellation (Chan, Golub and LeVeque 1983).

    T. F. Chan, G. H. Golub, R. J. LeVeque: Algorithms for Computing the Sample Variance, The American Statistician 37
    (1983), pp. 242-247: the formula for combining two samples.

    Args:
        count: values.
        mean: of them; 0 of none.
        squares: sum of their squared deviations from ``mean``.
        correction: what is taken off ``count`` in the divisor.
    """

    count: int
    mean: float
    squares: float
    correction: int = 1

    @property
    def kind(self) -> str:
        return f"Variance (correction={self.correction})"

    def merge(self, other: Self) -> Self:
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        apart = other.mean - self.mean
        return replace(
            self,
            count=count,
            mean=self.mean + apart * (other.count / count),
            squares=self.squares + other.squares + apart * apart * (self.count * other.count / count),
        )

    def compute(self) -> float:
        if self.count <= self.correction:
            raise _nothing(f"{self.count} values", f"more than the correction of {self.correction}")
        return self.squares / (self.count - self.correction)


@dataclass(frozen=True, kw_only=True, eq=False)
class ConfusionMatrix(Metric):
    """How often each target was predicted as each class.

    Args:
        counts: ``[C, C]``, int64 on the CPU; a row for each target, a column for each prediction.
    """

    counts: Tensor

    @property
    def kind(self) -> str:
        return f"ConfusionMatrix ({len(self.counts)} classes)"

    def merge(self, other: Self) -> Self:
        return replace(self, counts=self.counts + other.counts)

    def compute(self) -> list[list[int]]:
        rows: list[list[int]] = self.counts.tolist()
        return rows


@dataclass(frozen=True, kw_only=True, eq=False)
class F1(Metric):
    """The harmonic mean of precision and recall, from counts of each class.

    Args:
        hits: ``[C]``, correct predictions of each class; int64 on the CPU, as the others.
        predicted: ``[C]``, predictions of each class.
        actual: ``[C]``, targets of each class.
        average: see `f1`.
    """

    hits: Tensor
    predicted: Tensor
    actual: Tensor
    average: Average | None

    @property
    def kind(self) -> str:
        return f"F1 ({self.average}, {len(self.hits)} classes)"

    def merge(self, other: Self) -> Self:
        return replace(
            self,
            hits=self.hits + other.hits,
            predicted=self.predicted + other.predicted,
            actual=self.actual + other.actual,
        )

    def compute(self) -> float | list[float]:
        samples = int(self.actual.sum())
        if not samples:
            raise _nothing("no target", "one")
        met_C = self.predicted + self.actual
        scores_C = 2 * self.hits.double() / met_C.clamp(min=1)
        match self.average:
            case None:
                scores: list[float] = scores_C.tolist()
                return scores
            case "binary":
                return float(scores_C[1])
            case "micro":
                return int(self.hits.sum()) / samples
            case "macro":
                return float(scores_C.sum()) / int((met_C > 0).sum())
            case "weighted":
                return float((scores_C * self.actual).sum()) / samples


def merged(what: str, left: M, right: M) -> M:
    """``left`` and ``right`` added.

    Raises:
        UsageError: they are of two kinds; ``what`` names them.
    """
    if left.kind != right.kind:
        raise UsageError(
            f"cannot add {what}",
            found=f"{left.kind} and {right.kind}",
            needed="one kind",
            fix="Count the same thing, with the same arguments, in every micro-batch",
        )
    return left.merge(right)


def plain(value: Any) -> Any:
    """``value`` with numbers and lists in place of tensors, which a run log can hold."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: plain(below) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [plain(below) for below in value]
    return value


def _nothing(found: str, needed: str) -> UsageError:
    fix = "Count every sample once, or leave the metric out where there is nothing to count"
    return UsageError("cannot compute a metric", found=f"{found} over all samples", needed=needed, fix=fix)
