"""Metrics of the lanes of a run: each lane's micro-batches in order, then all lanes in the fixed tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.errors import UsageError
from paceline.metrics.counting import number
from paceline.metrics.kinds import Mean, Metric, merged, plain
from paceline.reduction.tree import fold

__all__ = ["LaneMetrics", "add", "computed"]

LaneMetrics = dict[int, dict[str, Metric]]
"""Of each lane that had a micro-batch, its metrics so far by name."""


def add(sums: LaneMetrics, lane: int, metrics: Mapping[str, tuple[Tensor | float, Tensor | float] | Metric]) -> None:
    """Adds the metrics of one micro-batch to those of its lane.

    Args:
        sums: of this worker's lanes so far.
        lane: the micro-batch's.
        metrics: by name; a pair (sum, weight) is a `Mean`.

    Raises:
        UsageError: something that is neither pair nor metric, or a metric that was of another kind before.
    """
    if not isinstance(metrics, Mapping):
        raise UsageError(
            "cannot add metrics",
            found=f"{metrics!r}, a {type(metrics).__name__}"[:200],
            needed="a dictionary: name -> (sum, weight) or a metric of paceline.metrics",
            fix="Return it from the function that is called with each micro-batch",
        )
    of_lane = sums.setdefault(lane, {})
    for name, value in metrics.items():
        metric = _metric(name, value)
        of_lane[name] = merged(f"the metric {name}", of_lane[name], metric) if name in of_lane else metric


def computed(parts: Sequence[LaneMetrics], lanes: int) -> dict[str, Any]:
    """Each metric over all lanes of all workers, by name in alphabetical order.

    Args:
        parts: every worker's lanes.
        lanes: of the recipe; those without a micro-batch add nothing.

    >>> computed([{0: {"accuracy": Mean(sum=90, weight=100)}}, {2: {"accuracy": Mean(sum=10, weight=20)}}], lanes=4)
    {'accuracy': 0.8333333333333334}

    Raises:
        UsageError: no worker had a sample, a metric has nothing to be computed from, such as a weight of 0, or is of
            another kind in another lane.
    """
    by_lane = {lane: metrics for part in parts for lane, metrics in part.items()}
    if not by_lane:
        raise UsageError(
            "cannot compute metrics",
            found="a dataset of 0 samples",
            needed="at least one",
            fix="Leave the evaluation out",
        )
    scores = {}
    for name in sorted({name for metrics in by_lane.values() for name in metrics}):
        metric = _over_lanes(name, [by_lane.get(lane, {}).get(name) for lane in range(lanes)])
        try:
            scores[name] = plain(metric.compute())
        except UsageError as error:
            raise UsageError(
                f"cannot compute the metric {name}", found=error.found, needed=error.needed, fix=error.fix
            ) from None
    return scores


def _metric(name: str, value: object) -> Metric:
    if isinstance(value, Metric):
        return value
    if isinstance(value, tuple | list) and len(value) == 2:
        return Mean(
            sum=number(f"the sum of the metric {name}", value[0]),
            weight=number(f"the weight of the metric {name}", value[1]),
        )
    raise UsageError(
        f"cannot add the metric {name}",
        found=f"{value!r}, a {type(value).__name__}"[:200],
        needed="(sum, weight) or a metric of paceline.metrics",
        fix="Return the sum over the micro-batch and the number of samples or tokens in it, "
        "or what functions such as paceline.metrics.accuracy give",
    )


def _over_lanes(name: str, by_lane: Sequence[Metric | None]) -> Metric:
    """The sum in the tree's shape; ``None`` is a lane without the metric."""

    def add_two(left: Metric | None, right: Metric | None) -> Metric | None:
        if left is None or right is None:
            return right if left is None else left
        return merged(f"the metric {name}", left, right)

    leaves = [((lane, lane + 1), metric) for lane, metric in enumerate(by_lane)]
    ((_, whole),) = fold(len(by_lane), leaves, add_two)
    assert whole is not None
    return whole
