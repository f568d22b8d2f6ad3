"""Metrics as sums and counts per lane, computed once: the same bits whoever drives a lane."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from paceline.errors import UsageError
from paceline.reduction.tree import fold

__all__ = ["LaneMetrics", "Mean", "Metric", "add", "computed"]


class Metric(ABC):
    """Counts of some samples that can be added to those of others, and what follows from them."""

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """The counts of both."""

    @abstractmethod
    def compute(self) -> Any:
        """The result."""


@dataclass(frozen=True, kw_only=True)
class Mean(Metric):
    """A sum over a weight."""

    sum: float
    weight: float

    def merge(self, other: Self) -> Self:
        return type(self)(sum=self.sum + other.sum, weight=self.weight + other.weight)

    def compute(self) -> float:
        if not self.weight:
            raise UsageError(
                "cannot divide",
                found="a weight of 0 over all samples",
                needed="a weight above 0",
                fix="Return each metric as (sum, number of samples or tokens in it)",
            )
        return self.sum / self.weight


LaneMetrics = dict[int, dict[str, Metric]]
"""Of each lane, each metric so far."""


def add(sums: LaneMetrics, lane: int, metrics: Mapping[str, tuple[Tensor | float, float] | Metric]) -> None:
    """Adds those of one micro-batch."""
    of_lane = sums.setdefault(lane, {})
    for name, value in metrics.items():
        metric = value if isinstance(value, Metric) else Mean(sum=float(value[0]), weight=float(value[1]))
        of_lane[name] = of_lane[name].merge(metric) if name in of_lane else metric


def computed(parts: Sequence[LaneMetrics], lanes: int) -> dict[str, Any]:
    """Each metric over all lanes of every worker.

    >>> computed([{0: {"accuracy": Mean(sum=90, weight=100)}}, {1: {"accuracy": Mean(sum=10, weight=20)}}], lanes=2)
    {'accuracy': 0.8333333333333334}

    Raises:
        UsageError: the global weight of a metric is 0.
    """
    by_lane = {lane: metrics for part in parts for lane, metrics in part.items()}
    scores = {}
    for name in sorted({name for metrics in by_lane.values() for name in metrics}):
        leaves = [((lane, lane + 1), by_lane.get(lane, {}).get(name)) for lane in range(lanes)]
        ((_, metric),) = fold(lanes, leaves, lambda left, right: left.merge(right) if left and right else left or right)
        assert metric is not None
        scores[name] = metric.compute()
    return scores
