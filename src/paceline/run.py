"""A run: what is tracked, its steps, its evaluations, its checkpoints. The loop-level API, and all that `train` uses.

    run = Run(Recipe(batch=64, micro_batch=8, epochs=3))
    run.track(model=model, optimizer=optimizer)
    for done in run.steps(dataset, train_step):
        ...

Calls marked *collective* must be made by every worker, in the same order.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch.utils.data import Dataset

from paceline import env
from paceline.agreement import agreed_digest, check_recipe, check_samples
from paceline.callsite import calling
from paceline.config import Execution, Identity, Recipe, Resume, as_dict
from paceline.data.loader import Loader, sample_count
from paceline.data.order import Plan
from paceline.determinism import autocast, configure_process, resolve_device, seed_by
from paceline.errors import PacelineError, RunStopped, UsageError
from paceline.evaluation import Evaluation, Measure
from paceline.events import EventLog, Sink, warn
from paceline.faults import Faults
from paceline.lanes import lanes_of
from paceline.link import Generation
from paceline.loop import Loop, TrainStep
from paceline.member import Member
from paceline.membership import FailoverTeam, join
from paceline.metrics.over_lanes import computed
from paceline.saving import Saves, checked_resume, claim
from paceline.signals import check_exit_code, obeying_signals
from paceline.standing import Standing
from paceline.step import Done, Signals, Step
from paceline.tracked import Tracked
from paceline.worker import at_exit, tell_uncaught_errors

__all__ = ["Run"]

T = TypeVar("T")
Collate = Callable[[list[Any]], Any]


class Run(Member):
    """One training run, seen from one of its workers. Joining the team is collective.

    The same script works alone, in a notebook, under `paceline launch`, in `paceline.launch` and under torchrun: the
    launcher's environment says which.

    torch, numpy and `random` are seeded by ``recipe.seed``: make the model afterwards, and it starts from it. In a loop
    of your own the optimizer, its schedule, clipping and compilation are yours: of the recipe's fields ``optimizer``,
    ``schedule``, ``max_norm`` and ``compile`` are for `paceline train`, and ``precision`` is what `autocast` enters.

    Args:
        recipe: all that may change a bit of the result; the same on every worker.
        execution: all that must not. Without ``run_dir`` nothing is written.
        resume: ``never`` starts afresh, ``auto`` goes on from the newest checkpoint if there is one, ``must`` needs it.
            ``None``: ``auto`` when torchrun or Slurm has restarted the run, else ``never``.
        about: JSON that a resume must match besides the recipe and what is tracked, e.g. a task and its data.
        sinks: told of every event, on worker 0.

    Attributes:
        recipe: with ``device`` resolved.
        execution: as given, or the default.
        run_dir: where the run lives, or ``None``.
        device: this worker's.
        stopped: exit code of a requested stop that has been obeyed, else ``None``.
        events: worker 0's run log; on the others it goes nowhere.

    Raises:
        ConfigError: more workers than lanes, another number of workers than ``execution.workers`` says, or another
            recipe on another worker.
        TeamError: the others cannot be reached within ``execution.timeout_s``.
        UsageError: a run of this process has not been closed.
    """

    def __init__(
        self,
        recipe: Recipe,
        execution: Execution | None = None,
        *,
        resume: Resume | None = None,
        about: Mapping[str, Any] | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        tell_uncaught_errors(alone=True)
        self.execution = execution or Execution()
        here = env.read()
        world_size = here.world_size if here else 1
        self.execution.check_started(world_size)
        lanes_of(0, world_size, recipe.lanes)
        self.device = resolve_device(recipe.device, here.local_rank if here else 0)
        self.recipe = dataclasses.replace(recipe, device="cuda" if self.device.type == "cuda" else "cpu")
        configure_process(threads=recipe.threads, device=self.device)
        resume = checked_resume(resume, self.execution) or ("auto" if env.restarts() else "never")
        if resume == "never" and env.begun_again():
            resume = "auto"
        self.run_dir = Path(self.execution.run_dir) if self.execution.run_dir else None
        self._stop_requested = 0
        super().__init__(join(here, self.recipe, self.execution, self.device, on_stop=self._note_stop))
        tell_uncaught_errors(alone=world_size == 1)  # torch.distributed has put its own way in the place of ours
        self.team.faults = Faults.parse(self.execution.faults)
        marks = self.run_dir or (here.report_dir.parent if here and here.report_dir else None)  # outlives a restart
        self.team.fault_marks = marks / "faults" if marks else None
        try:
            check_recipe(self.team, self.recipe)
            self.team.room = 2 * recipe.lanes  # a loss and a weight for each that a worker may come to drive
            if self.run_dir is not None:
                claim(self.run_dir, resume, self.team)
        except PacelineError:
            self.team.close()
            raise
        self.events = EventLog(self.run_dir / "events.jsonl" if self.run_dir else None, sinks, active=self.is_main)
        self._told = bool(sinks)
        self.stopped: int | None = None
        self._resume, self._about = resume, dict(about or {})
        self._tracked = Tracked()
        self._standing = Standing(tracked=self._tracked)
        self._saves = Saves(self.run_dir, self.execution, self.team, self.events) if self.run_dir else None
        self._closed = False
        self._forget_exit = at_exit(self.close)
        if isinstance(self.team, FailoverTeam):
            self.team.state, self.team.on_formed = self._standing, self._on_formed
        seed_by(recipe.seed, "model")

    @property
    def position(self) -> int:
        """Finished steps."""
        return self._standing.position

    @property
    def saved(self) -> Path | None:
        """Directory of the newest checkpoint that was waited for, as the one at the end of `steps`."""
        return self._standing.saved

    def track(self, **objects: Any) -> None:
        """Names what a step changes: modules, optimizers, schedulers, anything with ``state_dict`` and
        ``load_state_dict``.

        All of it is saved and restored under its name; modules are also made equal on all workers, to worker 0's. Call
        it before the first step, evaluation or save. Of a compiled module the one inside is tracked: keys stay plain.

        Raises:
            UsageError: too late, a name twice, an object without state, or a module that cannot be trained this way.
        """
        for name, thing in objects.items():
            self._tracked.add(name, thing)

    def length(self, dataset: Dataset[Any]) -> int:
        """Steps of the whole run on ``dataset``: what a schedule ends at."""
        if self.recipe.steps is not None:
            return self.recipe.steps
        assert self.recipe.epochs is not None
        return self.recipe.epochs * Plan.of(self.recipe, sample_count(dataset)).steps_per_epoch

    def autocast(self) -> AbstractContextManager[None]:
        """A context manager: the recipe's precision, for the forward pass."""
        return autocast(self.recipe.precision, self.device)

    @overload
    def steps(
        self, dataset: Dataset[Any], train_step: TrainStep, /, *, collate: Collate | None = None
    ) -> Iterator[Done]: ...

    @overload
    def steps(
        self,
        dataset: Dataset[Any],
        train_step: TrainStep,
        second: TrainStep,
        /,
        *more: TrainStep,
        collate: Collate | None = None,
    ) -> Iterator[tuple[Done, ...]]: ...

    def steps(
        self, dataset: Dataset[Any], /, *train_steps: TrainStep, collate: Collate | None = None
    ) -> Iterator[Done] | Iterator[tuple[Done, ...]]:
        """Runs ``train_step`` once for each step that is left, and yields what came of it. Collective.

        In the loop's body the step has happened, on every worker. After the body a checkpoint is due when
        ``execution.checkpoint_every`` says so, and always after the last step; a loop left by ``break`` saves nothing.

        With several train steps, as for a GAN, each step of the run has as many *phases*: each is a transaction of its
        own over the same samples, one after the other, and what is yielded is a `Done` for each.

        Args:
            dataset: map-style; the same on every worker.
            train_steps: called with a `Step`. State that they change is tracked.
            collate: makes a micro-batch of a list of samples.

        Raises:
            CheckpointError: a checkpoint could not be written, or the one to resume from is for another dataset.
            NonFiniteError: a loss or gradient is not finite, and the recipe says ``raise``.
            UsageError: the workers' datasets differ, or nothing is tracked that could be trained.
        """
        if not train_steps or not all(map(callable, train_steps)):
            raise UsageError(
                "cannot run the steps",
                found="one that is no function" if train_steps else "0 train steps",
                needed="a function of a step",
                fix="Write run.steps(dataset, train_step)",
            )
        call = calling(f"run.steps of {len(train_steps)} phases" if len(train_steps) > 1 else "run.steps")
        if len(train_steps) > 1:
            return self._steps(dataset, train_steps, collate, call)
        return (done for (done,) in self._steps(dataset, train_steps, collate, call))

    def _steps(
        self, dataset: Dataset[Any], train_steps: Sequence[TrainStep], collate: Collate | None, call: str
    ) -> Iterator[tuple[Done, ...]]:
        loop = Loop(
            dataset,
            train_steps,
            recipe=self.recipe,
            execution=self.execution,
            team=self.team,
            tracked=self._tracked,
            loader=self._loader(dataset, collate),
            position=self.position,
            call=call,
        )
        self._begin(call)
        loop.position = self.position
        standing = self._standing
        with ExitStack() as stack:
            stack.enter_context(loop)
            stack.enter_context(self._tracked.optimizers_held(lambda: self._step is not None and self._step.updating))
            stack.enter_context(obeying_signals(self.request_stop))
            loop.deal(probe=True)
            standing.data = loop.check_alike(standing.data, standing.data_of)
            standing.data_of = "that of the steps before"
            stack.callback(setattr, standing, "loop", standing.loop)
            standing.loop = loop
            if not self.team.enter_loop():
                return
            stack.callback(self.team.leave_loop)
            while loop.position < loop.last:
                loop.check_position(self.position)
                phases = loop.take_step(self._signals)
                standing.position, standing.metrics = loop.position, {}
                if self._saves and any(done.save_failed for done in phases):
                    self._saves.raise_failure()
                for phase, done in enumerate(phases):
                    if done.skipped:
                        told = {"phase": phase, "loss": done.loss, "grad_norm": done.grad_norm}
                        self.events.emit("skipped", step=done.step, **told)
                self._log_digest(phases)
                self.team.pulse.enter("body")
                self.team.fire("body", step=loop.position)
                yield tuple(phases)
                stop = max(done.stop for done in phases)
                if loop.position == loop.last or stop:
                    self.save()
                elif self.execution.checkpoint_every and loop.position % self.execution.checkpoint_every == 0:
                    self.save(wait=not self.execution.async_checkpoint)
                if stop:
                    self.stopped = stop
                    raise RunStopped(stop)
                if any(done.candidate for done in phases) and loop.position < loop.last:
                    self.team.admit()

    @property
    def _step(self) -> Step | None:
        """The step at work."""
        return None if self._standing.loop is None else self._standing.loop.step

    def _signals(self) -> Signals:
        """What this worker has to tell the others in a step."""
        failed = bool(self._saves and self._saves.failed())
        return Signals(stop=self._stop_requested, save_failed=failed, candidate=self.team.candidate)

    def evaluate(
        self,
        dataset: Dataset[Any],
        metrics: Measure,
        *,
        collate: Collate | None = None,
    ) -> dict[str, Any]:
        """Every sample once, whatever the number of workers: sums and counts, computed once. Collective.

        Tracked modules are in eval mode meanwhile, and no gradients are recorded.

        Args:
            dataset: map-style.
            metrics: of one micro-batch, each a `paceline.metrics.Metric` or a pair (sum, weight), which means a mean.
            collate: as in `steps`.

        Returns:
            What each metric computes from the counts of all samples; for a pair the global sum over the global weight.

        Raises:
            UsageError: the global weight of a metric is 0, or ``metrics`` returns something else.
        """
        samples = sample_count(dataset)
        call = calling("run.evaluate")
        self._begin(call)
        evaluation = Evaluation(
            self._loader(dataset, collate),
            samples,
            metrics,
            recipe=self.recipe,
            team=self.team,
            step=self.position,
            stopping=lambda: self._stop_requested,
        )
        try:
            with torch.no_grad(), self._tracked.evaluating():
                everyone = self.team.agree(evaluation.lanes, call)
        finally:
            seed_by(self.recipe.seed, "evaluated", self.position)  # what the loop's body draws is the same everywhere
            self.team.pulse.enter("body")
        check_samples([theirs for theirs, _, _ in everyone])
        if stop := max(stop for _, _, stop in everyone):
            if self.position:
                self.save()
            self.stopped = stop
            raise RunStopped(stop)
        scores = computed([theirs for _, theirs, _ in everyone], self.recipe.lanes)
        self.note_metrics(scores)
        return scores

    def note_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Adds held-out metrics of this position to its checkpoint, beside those of `evaluate`: for ``keep_best``.

        Those that are no single number are passed over.
        """
        self._standing.metrics |= {name: value for name, value in metrics.items() if isinstance(value, float | int)}

    def save(self, *, wait: bool = True) -> Path | None:
        """Saves a checkpoint of this position; does nothing without a run directory. Collective.

        Args:
            wait: until it is on disk. Otherwise it is written in the background, and a failure is raised, on every
                worker, at the end of a following step.

        Returns:
            `saved`; ``None`` without ``wait``. ``<name>.safetensors`` in it has a tracked module's weights.

        Raises:
            CheckpointError: it could not be written; the ones before it are untouched.
        """
        call = calling("run.save")
        self._begin(call)
        if self._saves is None:
            return None
        path = self._saves.save(self.position, self._standing.snapshot, self.identity, wait=wait, call=call)
        self._standing.saved = path or self.saved
        return path

    def digest(self) -> str:
        """Digest of everything tracked: 32 hexadecimal digits. Collective.

        Raises:
            UsageError: the workers' states differ.
        """
        call = calling("run.digest")
        self._begin(call)
        return agreed_digest(self.team, self._tracked.states(), call)[0]

    def request_stop(self, exit_code: int) -> None:
        """Asks the whole team to save and stop after the step at work, or in the middle of an evaluation, by
        `RunStopped`: the program ends with that exit code. Safe in a signal handler; not collective.

        Raises:
            UsageError: an exit code that is none, 1 to 255.
        """
        check_exit_code(exit_code)
        self._note_stop(exit_code)
        self.team.spread_stop(exit_code)

    def _note_stop(self, exit_code: int) -> None:
        self._stop_requested = max(self._stop_requested, exit_code)

    def close(self) -> None:
        """Ends the run: lets a save in progress end, leaves the team in order. Collective; a script that ends normally
        does it by itself.

        Raises:
            UsageError: another worker is not at its end, but in a call.
            CheckpointError: a checkpoint could not be written.
        """
        if self._closed:
            return
        with closing(self.team):
            try:
                self.team.pulse.enter("end")
                failed = self.team.agree(
                    lambda: self._saves is not None and self._saves.finished(), calling("the end of the run")
                )
                if any(failed) and self._saves is not None:
                    self._saves.raise_failure()
            finally:
                self._close_files()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if kind is None or issubclass(kind, SystemExit):
            self.close()
            return
        self._close_files()
        self.team.leave()

    def _close_files(self) -> None:
        self._closed = True
        self._forget_exit()
        try:
            if self._saves is not None:
                self._saves.close()
        finally:
            self.events.close()

    @property
    def identity(self) -> Identity:
        """What a checkpoint of this run belongs to."""
        return Identity.of({"recipe": as_dict(self.recipe), **self._about, "tracked": self._tracked.identity()})

    def _begin(self, call: str) -> None:
        """Once, before anything else happens: equal states everywhere, then those of the checkpoint to resume from."""
        if self._step is not None:
            raise UsageError(
                f"cannot call {call} here",
                found="a step that has not ended",
                needed="it in the body of the loop over run.steps, where the step has happened",
                fix="Move it out of the train step",
            )
        if self._tracked.begun:
            return
        self._tracked.begin(self.team, call)
        if not self._restore(call) and self.recipe.init_from is not None:
            self._tracked.load_weights(Path(self.recipe.init_from))
        if self._saves is not None:
            self._tracked.check_savable()  # now, rather than at the first save
        workers = self.team.gather(os.getpid(), call)
        self.events.emit(
            "start",
            workers=self.world_size,
            pids=workers,
            lanes=self.recipe.lanes,
            batch=self.recipe.batch,
            micro_batch=self.recipe.micro_batch,
            device=self.device.type,
            parameters=sum(parameter.numel() for parameter in self._tracked.parameters()),
            resumed_from=self.position or None,
        )
        if isinstance(self.team, FailoverTeam) and self.team.begun_again is not None:
            self._tell_membership(*self.team.begun_again)

    def _restore(self, call: str) -> bool:
        loaded = self._saves.load(self.identity, self._resume, call) if self._saves else None
        if loaded is not None:
            self._standing.restore(loaded)
        return loaded is not None

    def _on_formed(self, generation: Generation, seconds: float) -> None:
        """The team is another one; what was at work will be done again. Not collective."""
        if self.team.formed == 1:  # it came later
            self.events.forget()
        if self.is_main:
            self.events.take_over()
        if self._saves is not None and self._saves.take_over():
            self._saves.save_again(self.position, self._standing.snapshot, self.identity)
        if generation.cause != "left":
            self._tell_membership(generation, seconds)

    def _tell_membership(self, generation: Generation, seconds: float) -> None:
        self.events.emit("membership", **generation.told_to_people(), step=self.position, seconds=seconds)
        if self.is_main and not self._told:
            warn(f"{generation.told}; {self.world_size} go on after {seconds:.2f} s")

    def _loader(self, dataset: Dataset[Any], collate: Collate | None) -> Loader:
        return Loader(
            dataset,
            seed=self.recipe.seed,
            collate=collate,
            device=self.device,
            loader_workers=self.execution.loader_workers,
            threads=self.recipe.threads,
        )

    def _log_digest(self, phases: Sequence[Done]) -> None:
        """For `verify`: the whole state's digest, each tensor's, and each lane's loss to the last bit."""
        step, every = phases[-1].step, self.execution.digest_every
        if every is None or step % every:
            return
        whole, tensors = agreed_digest(self.team, self._tracked.states(), f"the digest of step {step}")
        lanes = [loss.hex() for done in phases for loss in done.lane_losses]
        self.events.emit("digest", step=step, digest=whole, lanes=lanes, tensors=tensors)
