"""The loop over the steps of a run, from where it stands to its end: what `Run.steps` goes through.

A step is done again when a worker is lost in it, with the lanes dealt anew, until it has happened once on all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from typing import Any

from torch.utils.data import Dataset

from paceline.agreement import check_data, check_exchange, one_content
from paceline.config import Execution, Recipe
from paceline.data.loader import Loader, sample_count
from paceline.data.order import Plan
from paceline.determinism import content_digest
from paceline.errors import StepAbandoned, UsageError
from paceline.reduction.buffers import LaneBuffers
from paceline.reduction.reducer import Reducer
from paceline.step import Done, Policy, Signals, Step
from paceline.team import Team
from paceline.tracked import Tracked

__all__ = ["Loop", "TrainStep"]

TrainStep = Callable[[Step], None]


class Loop:
    """The steps ``position`` to ``last`` over one dataset. Collective throughout; as a context, ended at its end.

    Args:
        position: finished steps.
        call: what this is part of, see `Team.open`.

    Attributes:
        phases: what came of the phases of the step at work so far.
        finished: of all phases of the last step.
        step: the step at work.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        train_steps: Sequence[TrainStep],
        *,
        recipe: Recipe,
        execution: Execution,
        team: Team,
        tracked: Tracked,
        loader: Loader,
        position: int,
        call: str,
    ) -> None:
        self.plan = Plan.of(recipe, sample_count(dataset))
        self._train_steps, self._recipe, self._execution = train_steps, recipe, execution
        self._team, self._tracked, self._loader, self._call = team, tracked, loader, call
        self.position = position
        steps = recipe.steps if recipe.steps is not None else (recipe.epochs or 0) * self.plan.steps_per_epoch
        self.last = min(steps, execution.stop_at or steps)
        self.phases: list[Done] = []
        self.finished: list[Done] = []
        self.step: Step | None = None
        self._policy = Policy(on_nonfinite=recipe.on_nonfinite, skip_loss_above=recipe.skip_loss_above)
        self._buffers = LaneBuffers(tracked.modules)
        self._dealt = ExitStack()
        self._batches: Generator[Any, None, None]
        self._reducer: Reducer
        self._dealt_for: int

    def __enter__(self) -> Loop:
        self._tracked.begin_steps(self._recipe.micro_batch)
        if self._execution.recompute == "auto" or self._execution.memory is not None:
            what = "recompute: auto" if self._execution.recompute == "auto" else f"memory: {self._execution.memory}"
            raise UsageError(
                "cannot tell what this run will need",
                found=f"execution.{what}, in a loop of one's own",
                needed="the loss of a micro-batch to measure",
                fix="Use paceline train, or leave it out and call paceline.memory.fit(model, step, budget)",
            )
        if self._execution.recompute != "none":
            self._tracked.recompute(self._execution.recompute)
        return self

    def __exit__(self, *_: object) -> None:
        self.step = None
        self._dealt.close()

    def deal(self, *, probe: bool = False) -> None:
        """Takes up this worker's lanes, from ``position`` on: again whenever the team has changed."""
        self._dealt.close()
        self._reducer = Reducer(
            self._team,
            self._tracked.parameters(),
            lanes=self._recipe.lanes,
            bucket_bytes=int(self._execution.bucket_mib * 2**20),
            gradients=self._recipe.gradients,
            compress=self._recipe.compress,
            overlap=self._execution.overlap,
        )
        self._dealt.callback(self._reducer.close)
        self._batches = self._loader.train(
            self.plan,
            self._reducer.lanes,
            range(self.position, self.last),
            phases=len(self._train_steps),
            done_phases=len(self.phases),
            probe=probe,
        )
        self._dealt.enter_context(closing(self._batches))
        self._dealt_for = self._team.formed

    def check_alike(self, before: dict[str, Any] | None, whose: str) -> dict[str, Any]:
        """That all workers exchange the same gradients, and read the same data; after `deal` with ``probe``.

        Args:
            before: what this has returned for the steps before, or the checkpoint.
            whose: that is, in words.

        Returns:
            What the data is known by.
        """
        check_exchange(self._team, self._reducer.layout, self._call)
        probes = {content_digest(next(self._batches)) for _ in range(self._loader.probes)}
        data = {"samples": self.plan.samples, "content": one_content(probes)}
        check_data(self._team, data, before, whose, self._call)
        return data

    def check_position(self, position: int) -> None:
        """Raises `UsageError` unless this loop has taken the last step of the run: its loader goes on from there."""
        if self.position != position:
            raise UsageError(
                "cannot go on with this loop over run.steps",
                found=f"step {position} taken by another one since step {self.position}",
                needed="one loop at a time",
                fix="Leave the first loop by break before the next begins",
            )

    def take_step(self, signals: Callable[[], Signals]) -> list[Done]:
        """The next step with all its phases. What others have completed of it meanwhile is taken over from them."""
        number, phases = self.position, len(self._train_steps)
        while self.position == number:
            if self._team.formed != self._dealt_for:
                gc.collect()  # sockets and threads of the group before, which tracebacks hold in cycles
                self.deal()
            before = self._tracked.changes()
            try:
                done = self._take_phase(len(self.phases), signals())
            except StepAbandoned:
                if self._tracked.changes().since(before):
                    self._team.spoiled("the train step had changed tracked state before its gradients were summed")
                self._team.reform()
                continue
            self.phases.append(done)
            if len(self.phases) == phases:
                self.finished, self.phases, self.position = self.phases, [], done.step
            self._team.step_done()
        return self.finished

    def _take_phase(self, phase: int, signals: Signals) -> Done:
        self.step = Step(
            number=self.position,
            phase=phase,
            plan=self.plan,
            batches=self._batches,
            reducer=self._reducer,
            buffers=self._buffers,
            team=self._team,
            policy=self._policy,
            signals=signals,
            tracked=self._tracked.ids,
        )
        self._team.in_step = True
        try:
            return self.step.run(self._train_steps[phase])
        finally:
            self._team.in_step = False
            self.step = None
