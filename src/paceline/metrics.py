"""Metrics as sums and weights per lane, divided once: the same bits whoever drives a lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from paceline.errors import UsageError
from paceline.reduction.tree import total

__all__ = ["LaneMetrics", "add", "divided"]

LaneMetrics = dict[int, dict[str, tuple[float, float]]]
"""Of each lane, each metric's sum and weight so far, in float64."""


def add(sums: LaneMetrics, lane: int, metrics: Mapping[str, tuple[Tensor | float, float]]) -> None:
    """Adds those of one micro-batch."""
    of_lane = sums.setdefault(lane, {})
    for name, (value, weight) in metrics.items():
        before = of_lane.get(name, (0.0, 0.0))
        of_lane[name] = (before[0] + float(value), before[1] + float(weight))


def divided(parts: Sequence[LaneMetrics], lanes: int) -> dict[str, float]:
    """Each metric's global sum over its global weight, from every worker's lanes.

    >>> divided([{0: {"accuracy": (90, 100)}}, {1: {"accuracy": (10, 20)}}], lanes=2)
    {'accuracy': 0.8333333333333334}

    Raises:
        UsageError: the global weight of a metric is 0.
    """
    by_lane = {lane: sums for part in parts for lane, sums in part.items()}
    rows = [by_lane.get(lane, {}) for lane in range(lanes)]
    scores = {}
    for name in sorted({name for row in rows for name in row}):
        pairs = [row.get(name, (0.0, 0.0)) for row in rows]
        weight = total([weight for _, weight in pairs])
        if not weight:
            raise UsageError(
                f"cannot divide the metric {name}",
                found="a weight of 0 over all samples",
                needed="a weight above 0",
                fix="Return each metric as (sum, number of samples or tokens in it)",
            )
        scores[name] = total([value for value, _ in pairs]) / weight
    return scores
