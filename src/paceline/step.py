"""One training step as a transaction: every lane's gradients, one exchange, one decision, the update."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.data.order import Plan
from paceline.determinism import seed_by
from paceline.errors import NonFiniteError, UsageError
from paceline.mistakes import check_loss, checked_weight, known_mistake
from paceline.reduction.buffers import LaneBuffers
from paceline.reduction.reducer import LOSS, WEIGHT, Reducer
from paceline.reduction.tree import total
from paceline.team import Team

__all__ = ["Done", "Policy", "Signals", "Step"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the recipe says of losses and gradients that are too bad to learn from."""

    on_nonfinite: Literal["raise", "skip"]
    skip_loss_above: float | None


@dataclass(frozen=True, kw_only=True)
class Signals:
    """What one worker has to tell the others, carried by a step's last collective; the team acts on the largest."""

    stop: int = 0
    """Exit code with which the run should stop after this step, 0 to go on."""
    save_failed: bool = False
    """The last checkpoint could not be written."""
    candidate: bool = False
    """A worker waits to be let in."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A step that has happened, exactly once.

    Args:
        step: finished steps, this one included.
        epoch: the pass over the data it belongs to, from 0.
        ends_epoch: it is the last one of that pass.
        loss: sum of losses over sum of weights; not finite when a lane's loss is not.
        grad_norm: global norm before clipping.
        lr: learning rate of the first parameter group.
        skipped: the update was left out, on every worker.
        samples: of all lanes.
        weight: sum of weights.
        lane_losses: summed loss of each lane.
        stop: the largest `Signals.stop` of all workers.
        save_failed: some worker's.
        candidate: some worker's.
    """

    step: int
    epoch: int
    ends_epoch: bool
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    samples: int
    weight: float
    lane_losses: tuple[float, ...]
    stop: int
    save_failed: bool
    candidate: bool


class Step:
    """Given to a train step function, which iterates over it, calls `backward` per micro-batch, then `update`.

    ``for batch in step`` gives this worker's micro-batches, lane by lane; in the loop's body torch, numpy and `random`
    are seeded from (seed, step, phase, lane, micro-batch), so dropout does not depend on who drives the lane. Before
    and after the loop they are seeded from (seed, step, phase): a mixing factor drawn before it, or noise added to the
    gradients behind it, is the same on every worker.

    Attributes:
        number: finished steps before this one; 0 in the first step. What a schedule is a function of.
        phase: which of the train steps given to ``run.steps`` this is, from 0.
        updating: optimizers are being stepped, which nobody else may do.
    """

    def __init__(
        self,
        *,
        number: int,
        phase: int,
        plan: Plan,
        batches: Iterator[Any],
        reducer: Reducer,
        buffers: LaneBuffers,
        team: Team,
        policy: Policy,
        signals: Signals,
        tracked: Container[int],
    ) -> None:
        self.number, self.phase, self.updating = number, phase, False
        self._name = f"step {number + 1}" + (f", phase {phase + 1}" if phase else "")
        self._tracked = tracked
        self._ahead: deque[Any] = deque()
        self._plan, self._batches, self._reducer, self._buffers = plan, batches, reducer, buffers
        self._team, self._policy, self._signals = team, policy, signals
        self._state: Literal["new", "batch", "failed", "between", "reduced", "updated"] = "new"
        self._row, self._last = 0, False
        self._table: list[list[float]] = []
        self._stop, self._save_failed, self._candidate = 0, False, False
        self._grad_norm = 0.0
        self._lr = 0.0
        self._skipped, self._used = False, False

    def __iter__(self) -> Iterator[Any]:
        self._expect(
            "new",
            "iterate over the step a second time",
            "one loop over the step",
            "Keep the batches of the first loop if you need them again",
        )
        self._team.pulse.call(self._name)
        self._reducer.begin_step(self._name)
        self._buffers.begin_step()
        for row, lane in enumerate(self._reducer.lanes):
            self._reducer.begin_lane(lane)
            micro_batches = self._plan.micro_batches(self.number, lane)
            for micro in range(micro_batches):
                self._team.check()
                self._team.pulse.enter("load", step=self.number + 1, phase=self.phase, lane=lane)
                # Before the seed: loading in this process draws random numbers too.
                batch = self._ahead.popleft() if self._ahead else next(self._batches)
                seed_by(self._plan.seed, "train", self.number, self.phase, lane, micro)
                self._row = row
                self._last = lane == self._reducer.lanes[-1] and micro == micro_batches - 1
                self._state = "batch"
                self._team.within = self._name
                self._team.pulse.enter("compute")
                self._team.fire("step", step=self.number + 1, lane=lane)
                yield batch
                self._team.within = None
                self._expect(
                    "between",
                    "go on to the next micro-batch",
                    "one step.backward(loss, weight=...) for each",
                    "Call it in every turn of the loop; with 0 * loss and weight=0 for what shall not count",
                )
            if micro_batches:
                self._buffers.end_lane(lane)
        self._state = "between"
        self._team.fire("exchange", step=self.number + 1)
        self._reduce()
        self._team.pulse.enter("update")
        # For what draws between here and the end of the update, which must be the same on every worker.
        seed_by(self._plan.seed, "update", self.number, self.phase)

    def total(self, count: Callable[[Any], float]) -> float:
        """The sum of ``count(batch)`` over all micro-batches of all lanes, known before the first backward. Collective.

        For losses with several normalisers. With the totals T of tokens and B of boxes the gradient of
        ``text / T + boxes / B`` is that of ``text + boxes * T / B``, divided by T, which is what `backward` does::

            t, b = step.total(tokens), step.total(boxes)
            for batch in step:
                step.backward(text_loss(batch) + box_loss(batch) * t / b, weight=tokens(batch))

        Call it before the loop: it loads this worker's micro-batches of the step at once and keeps them for the loop.

        Args:
            count: of one micro-batch, without gradients. Integers are exact, floats added up in the tree's shape.
        """
        self._expect(
            "new",
            "count over the step",
            "step.total(count) before the loop over the step",
            "Move step.total before `for batch in step`",
        )
        lanes = [(lane, self._plan.micro_batches(self.number, lane)) for lane in self._reducer.lanes]
        if not self._ahead:
            self._ahead.extend(islice(self._batches, sum(micro_batches for _, micro_batches in lanes)))
        batches = iter(tuple(self._ahead))
        with torch.no_grad():
            mine = {lane: sum(_number(count(batch)) for batch in islice(batches, n)) for lane, n in lanes}
        of_lanes = {
            lane: value
            for theirs in self._team.gather(mine, f"step.total of {self._name}")
            for lane, value in theirs.items()
        }
        self._seed()  # loading in this process draws random numbers
        return total([of_lanes[lane] for lane in range(self._plan.lanes)])

    def _seed(self) -> None:
        """For what draws before the loop over the step."""
        seed_by(self._plan.seed, "step", self.number, self.phase)

    def backward(self, loss: Tensor, *, weight: float | None = None) -> None:
        """Adds one micro-batch to the step. Not collective; the team exchanges gradients during a worker's last one.

        Args:
            loss: sum over the micro-batch's samples or tokens, 0-dim. Several losses: add them up first.
            weight: how many those are, which must be said; gradients are divided once by the weight of all lanes.

        Raises:
            UsageError: called outside the loop over the step, or twice in one turn of it; or a loss or weight that is
                none.
        """
        self._expect(
            "batch",
            "call step.backward here",
            "one call for each micro-batch, in the loop over the step",
            "Add up the losses of a micro-batch, and call it once in each turn of `for batch in step`",
        )
        check_loss(loss)
        counted = checked_weight(weight)
        self._state = "failed"  # until it has gone well: what is counted by halves is never used
        self._reducer.table[self._row, LOSS] += loss.detach()
        self._reducer.table[self._row, WEIGHT] += counted
        with self._reducer.backward(last=self._last):
            loss.backward()
        self._state = "between"

    def update(
        self,
        *optimizers: torch.optim.Optimizer,
        schedulers: Sequence[LRScheduler] = (),
        lr: float | None = None,
        max_norm: float | None = None,
    ) -> None:
        """Clips once, decides with all workers whether the step counts, and steps the optimizers; once in a step.

        A step that does not count leaves no trace: neither in parameters nor in buffers such as running statistics.
        Schedulers go on all the same: a learning rate is a function of the step.

        Args:
            optimizers: all that this step updates: one norm, one decision for all of them. Tracked.
            schedulers: of torch, stepped once after the optimizers. Tracked.
            lr: learning rate of every parameter group from now on; ``None`` leaves them.
            max_norm: clip the global norm of the optimizers' gradients to this; ``None``: no clipping.

        Raises:
            NonFiniteError: on every worker, when a loss or the norm is not finite and the recipe says ``raise``.
            UsageError: the loop over the step has not ended, something is not tracked, or a parameter's gradient is
                this worker's alone.
        """
        self._expect(
            "reduced",
            "call step.update here",
            "one call, after the loop over the step, with all optimizers",
            "Call it once, behind `for batch in step`, which must run to its end",
        )
        self._refuse_unusable(optimizers, schedulers)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._refuse_unreduced([parameter for group in groups for parameter in group["params"]])
        self._refuse_taken([parameter for group in groups for parameter in group["params"]])
        self._state = "updated"
        if lr is not None:
            for group in groups:
                group["lr"] = lr
        self._lr = float(groups[0]["lr"])
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        self._grad_norm = float(norm)
        if self._decide():
            if max_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
            self._team.fire("update", step=self.number + 1)
            self.updating = True
            try:
                for optimizer in optimizers:
                    optimizer.step()
            finally:
                self.updating = False
        else:
            self._buffers.restore()
        for scheduler in schedulers:
            scheduler.step()

    def run(self, train_step: Callable[[Step], None]) -> Done:
        """Calls ``train_step`` with this step and returns what came of it; for the run. Collective.

        Raises:
            UsageError: ``train_step`` returned without having looped over the step and called `update`.
        """
        self._seed()
        try:
            train_step(self)
        except BaseException as error:
            self._team.within = None
            if self._state not in ("new", "updated"):
                self._buffers.restore()  # a lane may have left its own
            mistake = known_mistake(error, self._name)
            if mistake is None:
                raise
            raise mistake.with_traceback(
                error.__traceback__
            ) from error  # the user looks for the line in the train step
        if self._state != "updated":
            self._team.check()  # a train step may have swallowed StepAbandoned
        self._expect(
            "updated",
            "end the step",
            "a loop over the step, then step.update(optimizer)",
            "Let the train step end with step.update, behind `for batch in step`, which must run to its end",
        )
        losses = tuple(row[LOSS] for row in self._table)
        weight = total([row[WEIGHT] for row in self._table])
        epoch_step = self.number % self._plan.steps_per_epoch
        return Done(
            step=self.number + 1,
            epoch=self._plan.epoch_of(self.number),
            ends_epoch=epoch_step == self._plan.steps_per_epoch - 1,
            loss=total(losses) / weight,
            grad_norm=self._grad_norm,
            lr=self._lr,
            skipped=self._skipped,
            samples=min(self._plan.batch, self._plan.epoch_samples - epoch_step * self._plan.batch),
            weight=weight,
            lane_losses=losses,
            stop=self._stop,
            save_failed=self._save_failed,
            candidate=self._candidate,
        )

    def _reduce(self) -> None:
        """Ends the exchange with the step's last collective: from here to the end of the update nobody communicates."""
        table = self._reducer.finish()
        mine = torch.tensor(
            [
                self._signals.stop,
                self._signals.save_failed,
                self._signals.candidate,
                self._buffers.changed,
                *self._reducer.used,
            ],
            dtype=torch.uint8,
            device=self._team.device,
        )
        ballot = self._team.submit(lambda: self._team.all_gather(mine)).wait().amax(0).cpu()
        self._stop, save_failed, candidate, buffers_changed = ballot[:4].tolist()
        self._save_failed, self._candidate = bool(save_failed), bool(candidate)
        if buffers_changed:
            self._buffers.finish(self._team, self._plan.lanes)
        used = ballot[4:].bool()
        self._reducer.drop_unused(used)
        self._used = bool(used.any())
        self._table = table.tolist()
        weights = [row[WEIGHT] for row in self._table]
        bad = [f"{weight} of lane {lane}" for lane, weight in enumerate(weights) if not 0 <= weight < math.inf]
        if bad or not total(weights):
            raise UsageError(
                f"cannot divide the gradients of {self._name}",
                found=f"a weight of {', '.join(bad) or '0 over all lanes'}",
                needed="none below 0, and one above 0",
                fix="Pass the number of samples or tokens as step.backward(loss, weight=...)",
            )
        self._state = "reduced"

    def _decide(self) -> bool:
        """Whether to update, from reduced values only, so that every worker decides alike."""
        losses = [row[LOSS] for row in self._table]
        bad_lanes = [lane for lane, loss in enumerate(losses) if not math.isfinite(loss)]
        if bad_lanes or not math.isfinite(self._grad_norm):
            if self._policy.on_nonfinite == "raise":
                raise NonFiniteError(
                    f"{self._name} is not finite",
                    found=f"the loss of lane {_listed(bad_lanes)}" if bad_lanes else f"grad_norm={self._grad_norm}",
                    needed="finite losses and gradients",
                    fix="Lower the learning rate, look at that lane's samples with `paceline order`, or set "
                    "recipe.on_nonfinite: skip",
                )
            self._skipped = True
        elif self._policy.skip_loss_above is not None:
            mean = total(losses) / total([row[WEIGHT] for row in self._table])
            self._skipped = mean > self._policy.skip_loss_above
        return not self._skipped

    def _refuse_unusable(self, optimizers: Sequence[object], schedulers: object) -> None:
        """What `update` cannot step, or a resume would go on with another state of."""

        def refuse(found: str, needed: str, fix: str) -> NoReturn:
            raise UsageError("cannot update", found=found, needed=needed, fix=fix)

        if not optimizers or not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers):
            kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            refuse(kinds or "no optimizer", "optimizers", "Write step.update(optimizer)")
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            found = "LBFGS, which computes losses again while it steps"
            refuse(found, "an optimizer that steps by the gradients that are there", "Use another one, such as AdamW")
        if not isinstance(schedulers, Sequence) or not all(isinstance(one, LRScheduler) for one in schedulers):
            refuse(f"schedulers={type(schedulers).__name__}", "a list", "Write schedulers=[scheduler]")
        if any(isinstance(one, ReduceLROnPlateau) for one in schedulers):
            fix = "Call scheduler.step(run.evaluate(...)['loss']) in the loop over run.steps instead"
            refuse("ReduceLROnPlateau, which needs a metric", "schedulers that follow the step", fix)
        untracked = [type(thing).__name__ for thing in (*optimizers, *schedulers) if id(thing) not in self._tracked]
        if untracked:
            refuse(
                f"a {untracked[0]} that is not tracked",
                "all that a step changes tracked, so that it is saved and restored",
                "Write run.track(model=model, optimizer=optimizer), and schedulers likewise, before the first step",
            )

    def _refuse_taken(self, parameters: Sequence[Tensor]) -> None:
        """An update without any gradient would be none, and nobody told."""
        if self._used and all(parameter.grad is None for parameter in parameters):
            raise UsageError(
                "cannot update",
                found="no gradient in the optimizer's parameters, though the step has some",
                needed="the gradients of this step",
                fix="Leave out zero_grad() before step.update, and give update the optimizer of this phase",
            )

    def _refuse_unreduced(self, parameters: Sequence[Tensor]) -> None:
        """Workers would silently part if each updated a parameter by a gradient of its own."""
        alone = [p for p in parameters if p.requires_grad and p not in self._reducer.reduced]
        if alone:
            raise UsageError(
                "cannot update",
                found=f"{len(alone)} parameters whose gradients would be this worker's alone, the first of shape "
                f"{tuple(alone[0].shape)}",
                needed="parameters of tracked modules that required a gradient when run.steps began",
                fix="Track every module that the optimizer updates; after unfreezing some, call run.steps again",
            )

    def _expect(self, state: str, what: str, needed: str, fix: str) -> None:
        if self._state == state:
            return
        in_the_loop = ("batch", "failed", "between")
        happened = {
            "new": "nothing was done with the step yet",
            "batch": "a micro-batch without step.backward",
            "failed": "a step.backward that has failed",
            "between": "step.backward was called already",
            "reduced": "the loop over the step has ended, without step.update",
            "updated": "step.update was called already",
        }[self._state]
        if self._state in in_the_loop and state not in in_the_loop:
            happened = "the loop over the step has not ended"
        raise UsageError(f"cannot {what}", found=happened, needed=needed, fix=fix)


def _listed(lanes: Sequence[int]) -> str:
    return ", ".join(map(str, lanes))


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
