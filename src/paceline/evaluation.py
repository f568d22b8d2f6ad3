"""One evaluation on one worker: its lanes, measured once, whatever becomes of the team meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from torch import Tensor

from paceline.config import Recipe
from paceline.data.loader import Loader
from paceline.determinism import seed_by
from paceline.lanes import lanes_of
from paceline.metrics import Metric
from paceline.metrics.over_lanes import LaneMetrics, add
from paceline.team import Team

__all__ = ["Evaluation", "Measure"]

Measure = Callable[[Any], Mapping[str, Metric | tuple[Tensor | float, float]]]
"""Of one micro-batch, each metric by name."""


class Evaluation:
    """Measures ``samples`` samples.

    Args:
        step: finished steps.
        stopping: the exit code of a stop that was asked for, or 0.
    """

    def __init__(
        self,
        loader: Loader,
        samples: int,
        measure: Measure,
        *,
        recipe: Recipe,
        team: Team,
        step: int,
        stopping: Callable[[], int],
    ) -> None:
        self._loader, self._samples, self._measure, self._recipe = loader, samples, measure, recipe
        self._team, self._step, self._stopping = team, step, stopping
        self._measured: LaneMetrics = {}

    def lanes(self) -> tuple[int, LaneMetrics, int]:
        """The metrics of this worker's lanes, between the number of samples and the exit code of a stop.

        When a worker is lost, the lanes are others, and this is called again: what is measured already is kept. A stop
        ends it, since an evaluation can outlast a grace period.
        """
        lanes = lanes_of(self._team.rank, self._team.world_size, self._recipe.lanes)
        todo = [lane for lane in lanes if lane not in self._measured]
        at_work: LaneMetrics = {}
        batches = self._loader.evaluate(self._samples, self._recipe.micro_batch, todo, self._recipe.lanes)
        with closing(batches):
            for lane, number, batch in batches:
                if lane not in at_work:
                    self._measured |= at_work  # the lane before is whole
                    at_work = {}
                self._team.check()
                if stop := self._stopping():
                    return self._samples, {}, stop
                self._team.pulse.enter("evaluate", lane=lane)
                self._team.fire("evaluate", step=self._step, lane=lane)
                seed_by(self._recipe.seed, "evaluate", number)
                add(at_work, lane, self._measure(batch))
        self._measured |= at_work
        return self._samples, {lane: self._measured[lane] for lane in lanes if lane in self._measured}, 0
