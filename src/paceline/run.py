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
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline import env
from paceline.checkpoint import Saved, Snapshot, Store, Writer
from paceline.config import Execution, Identity, Recipe, Resume, as_dict
from paceline.data.loader import Loader, sample_count
from paceline.data.order import Plan
from paceline.determinism import autocast, combined, configure_process, resolve_device, seed_by, tensor_digest
from paceline.errors import CheckpointError, ConfigError, TeamError, UsageError
from paceline.events import EventLog, Sink
from paceline.lanes import lanes_of
from paceline.metrics import LaneMetrics, Metric, add, computed
from paceline.reduction.buffers import LaneBuffers
from paceline.reduction.reducer import Reducer
from paceline.run_dir import prepare_run_dir
from paceline.step import Done, Policy, Signals, Step
from paceline.team import SoloTeam, Team, TorchTeam
from paceline.tracked import Tracked

__all__ = ["Run"]

T = TypeVar("T")


class Run:
    """One training run, seen from one of its workers. Joining the team is collective.

    The same script works alone and under torchrun or `paceline train`: the launcher's environment says which.

    Args:
        recipe: all that may change a bit of the result.
        execution: all that must not. Without ``run_dir`` nothing is written.
        resume: ``never`` starts afresh, ``auto`` goes on from the newest checkpoint if there is one, ``must`` needs it.
        about: JSON that a resume must match besides the recipe and what is tracked, e.g. a task and its data.
        sinks: told of every event, on worker 0.

    Attributes:
        recipe: with ``device`` resolved.
        position: finished steps.
        stopped: exit code of a requested stop that has been obeyed, else ``None``.
        events: worker 0's run log; on the others it goes nowhere.

    Raises:
        ConfigError: more workers than lanes, or another number of workers than ``execution.workers`` says.
        TeamError: the others cannot be reached within ``execution.timeout_s``.
    """

    def __init__(
        self,
        recipe: Recipe,
        execution: Execution | None = None,
        *,
        resume: Resume = "never",
        about: Mapping[str, Any] | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.execution = execution or Execution()
        here = env.read()
        world_size = here.world_size if here else 1
        if self.execution.workers not in ("auto", world_size):
            raise ConfigError(
                "cannot start the run",
                found=f"{world_size} workers started, execution.workers={self.execution.workers}",
                needed="the same number",
                fix=f"Start it with torchrun --nproc_per_node={self.execution.workers}, or leave out workers",
            )
        lanes_of(0, world_size, recipe.lanes)
        self.device = resolve_device(recipe.device, here.local_rank if here else 0)
        self.recipe = dataclasses.replace(recipe, device="cuda" if self.device.type == "cuda" else "cpu")
        configure_process(threads=recipe.threads, device=self.device)
        self.team: Team = (
            SoloTeam(self.device, recipe.threads)
            if here is None or world_size == 1
            else TorchTeam(here, self.device, threads=recipe.threads, timeout_s=self.execution.timeout_s)
        )
        self.run_dir = Path(self.execution.run_dir) if self.execution.run_dir else None
        if self.run_dir is not None:
            self._claim(self.run_dir, resume)
        self.events = EventLog(
            self.run_dir / "events.jsonl" if self.run_dir and self.is_main else None, sinks if self.is_main else ()
        )
        self.position = 0
        self.stopped: int | None = None
        self._resume, self._about = resume, dict(about or {})
        self._tracked = Tracked()
        self._stop_requested = 0
        self._metrics: dict[str, float] = {}
        self._samples: int | None = None
        self._store: Store | None = None
        self._writer: Writer | None = None
        self._failure: CheckpointError | None = None
        if self.run_dir is not None:
            self._store = Store(
                self.run_dir / "checkpoints", keep=self.execution.keep, keep_best=self.execution.keep_best
            )
            if self.is_main:
                # A disk that hangs is this worker's error before the others' wait for it is theirs.
                self._writer = Writer(self._store, timeout_s=self.execution.timeout_s / 2)

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self.team.rank

    @property
    def world_size(self) -> int:
        """Workers of the team."""
        return self.team.world_size

    @property
    def local_rank(self) -> int:
        """This worker's number on its machine."""
        return self.team.local_rank

    @property
    def is_main(self) -> bool:
        """Whether this is worker 0, the one that writes. Never decide about training with it."""
        return self.team.rank == 0

    def print(self, *values: object) -> None:
        """`print`, once for the team."""
        if self.is_main:
            print(*values, flush=True)

    def track(self, **objects: Any) -> None:
        """Names what a step changes: modules, optimizers, anything with ``state_dict`` and ``load_state_dict``.

        All of it is saved and restored; modules are also made equal on all workers, to worker 0's. Call it before the
        first step, evaluation or save.

        Raises:
            UsageError: too late, a name twice, or an object without state.
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

    def steps(
        self,
        dataset: Dataset[Any],
        train_step: Callable[[Step], None],
        *,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Done]:
        """Runs ``train_step`` once for each step that is left, and yields what came of it. Collective.

        In the loop's body the step has happened, on every worker. After the body a checkpoint is due when
        ``execution.checkpoint_every`` says so, and always after the last step.

        Args:
            dataset: map-style; the same on every worker.
            train_step: called with a `Step`. State that it changes is tracked.
            collate: makes a micro-batch of a list of samples.

        Raises:
            CheckpointError: a checkpoint could not be written, or the one to resume from is for another dataset.
            NonFiniteError: a loss or gradient is not finite, and the recipe says ``raise``.
        """
        self._begin()
        plan = Plan.of(self.recipe, sample_count(dataset))
        self._check_samples(plan.samples)
        end = min(self.length(dataset), self.execution.stop_at or self.length(dataset))
        reducer = Reducer(
            self.team,
            self._tracked.parameters(),
            lanes=self.recipe.lanes,
            bucket_bytes=int(self.execution.bucket_mib * 2**20),
            gradients=self.recipe.gradients,
        )
        buffers = LaneBuffers(self._tracked.modules)
        policy = Policy(on_nonfinite=self.recipe.on_nonfinite, skip_loss_above=self.recipe.skip_loss_above)
        batches = self._loader(dataset, collate).train(plan, reducer.lanes, range(self.position, end))
        try:
            while self.position < end and self.stopped is None:
                step = Step(
                    number=self.position,
                    plan=plan,
                    batches=batches,
                    reducer=reducer,
                    buffers=buffers,
                    team=self.team,
                    policy=policy,
                    signals=self._signals(),
                )
                train_step(step)
                done = step.done()
                self.position = done.step
                self._metrics = {}
                if done.save_failed:
                    self._raise_failed_save()
                self._log_digest(done)
                yield done
                self.stopped = done.stop or None
                if self.position == end or self.stopped:
                    self.save()
                elif self.execution.checkpoint_every and self.position % self.execution.checkpoint_every == 0:
                    self.save(wait=not self.execution.async_checkpoint)
        finally:
            reducer.close()
            batches.close()

    def evaluate(
        self,
        dataset: Dataset[Any],
        metrics: Callable[[Any], Mapping[str, tuple[Tensor | float, float] | Metric]],
        *,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, Any]:
        """Every sample once, whatever the number of workers: sums and counts, computed once. Collective.

        Tracked modules are in eval mode meanwhile, and no gradients are recorded.

        Args:
            dataset: map-style.
            metrics: of one micro-batch, each as (sum, weight) or as one of `paceline.metrics`.
            collate: as in `steps`.

        Returns:
            Each metric over the whole dataset: of a pair its global sum over its global weight. Those that are single
            numbers are noted in the checkpoint of this position.

        Raises:
            UsageError: a metric of weight 0, of another kind in another micro-batch, or neither pair nor `Metric`.
        """
        self._begin()
        modes = [(part, part.training) for module in self._tracked.modules.values() for part in module.modules()]
        samples = sample_count(dataset)
        lanes = lanes_of(self.rank, self.world_size, self.recipe.lanes)
        mine: LaneMetrics = {}
        for part, _ in modes:
            part.training = False
        try:
            with torch.no_grad():
                for lane, number, batch in self._loader(dataset, collate).evaluate(
                    samples, self.recipe.micro_batch, lanes, self.recipe.lanes
                ):
                    seed_by(self.recipe.seed, "evaluate", number)
                    add(mine, lane, metrics(batch))
        finally:
            for part, mode in modes:
                part.training = mode
            seed_by(self.recipe.seed, "evaluated", self.position)  # what the loop's body draws is the same everywhere
        scores = computed(self.team.gather(mine), self.recipe.lanes)
        self._metrics |= {name: score for name, score in scores.items() if isinstance(score, float | int)}
        return scores

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        """Adds held-out metrics of this position to its checkpoint, beside those of `evaluate`: for ``keep_best``."""
        self._metrics |= metrics

    def save(self, *, wait: bool = True) -> None:
        """Saves a checkpoint of this position; does nothing without a run directory. Collective.

        Args:
            wait: until it is on disk. Otherwise it is written in the background, and a failure is raised, on every
                worker, at the end of a following step.

        Raises:
            CheckpointError: it could not be written; the ones before it are untouched.
        """
        self._begin()
        if self.run_dir is None:
            return
        if self._writer is not None:
            try:
                snapshot = Snapshot.take(
                    step=self.position,
                    states=self._tracked.states(),
                    position={"samples": self._samples},
                    metrics=self._metrics,
                )
                self._writer.start(snapshot, self.identity)
                if wait:
                    self._writer.wait()
            except CheckpointError as error:  # raised when the others know of it too
                self._note_failure(error)
        if wait and any(self.team.gather(self._save_failed())):
            self._raise_failed_save()

    def digest(self) -> str:
        """Digest of everything tracked: 32 hexadecimal digits. Collective.

        Raises:
            UsageError: the workers' states differ.
        """
        self._begin()
        return self._agreed_digest()[0]

    def _agreed_digest(self) -> tuple[str, dict[str, str]]:
        """The digest of all that is tracked, the same on all workers, and each tensor's."""
        tensors = {name: tensor_digest(name, tensor) for name, tensor in self._tracked.tensors().items()}
        whole = combined(tensors)
        everyone = self.team.gather(whole)
        if len(set(everyone)) > 1:
            raise UsageError(
                "the workers' states differ",
                found=", ".join(f"worker {rank}: {value[:12]}" for rank, value in enumerate(everyone)),
                needed="one digest",
                fix="State that a step changes must be tracked, and changed alike on every worker",
            )
        return whole, tensors

    def request_stop(self, exit_code: int) -> None:
        """Asks the whole team to save and stop after the step at work. Safe in a signal handler; not collective."""
        self._stop_requested = max(self._stop_requested, exit_code)

    def close(self) -> None:
        """Ends the run's threads and leaves the team."""
        try:
            self._close_files()
        finally:
            self.team.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if kind is None or self.world_size == 1:
            self.close()
            return
        # Leaving the team in order would wait for workers that may be waiting for this one: they see it end instead.
        self._close_files()

    def _close_files(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            self.events.close()

    def _claim(self, run_dir: Path, resume: Resume) -> None:
        """Worker 0 looks at the run directory; all go on, or none."""
        refusal: ConfigError | None = None
        if self.is_main:
            try:
                prepare_run_dir(run_dir, resume)
            except ConfigError as error:
                refusal = error
        if any(self.team.gather(refusal is not None)):
            self.team.close()
            raise refusal or TeamError("worker 0 refused the run directory", fix="See its error")

    @property
    def identity(self) -> Identity:
        """What a checkpoint of this run belongs to."""
        return Identity.of({"recipe": as_dict(self.recipe), **self._about, "tracked": self._tracked.identity()})

    def _begin(self) -> None:
        """Once, before anything else happens: equal states everywhere, then those of the checkpoint to resume from."""
        if self._tracked.begun:
            return
        self._tracked.begin(self.team)
        if not self._restore() and self.recipe.init_from is not None:
            self._tracked.load_weights(Path(self.recipe.init_from))
        workers = self.team.gather(os.getpid())
        self.events.emit(
            "start",
            workers=self.world_size,
            pids=workers,
            lanes=self.recipe.lanes,
            device=self.device.type,
            parameters=sum(parameter.numel() for parameter in self._tracked.parameters()),
            resumed_from=self.position or None,
        )

    def _restore(self) -> bool:
        """Loads the newest good checkpoint if there is one and ``resume`` allows it."""
        loaded = None if self._store is None or self._resume == "never" else self._store.load(self.identity)
        found = self.team.gather((loaded.step, loaded.path.name) if loaded else None)
        if len(set(found)) > 1:
            raise CheckpointError(
                "cannot resume",
                found=f"other checkpoints on other workers: {found}",
                needed="one run directory that all workers share",
                fix="Put the run directory on a shared file system",
            )
        if loaded is None:
            if self._resume == "must":
                raise CheckpointError(
                    "cannot resume",
                    found=f"no checkpoint in {self.run_dir}",
                    needed="one, for --resume must",
                    fix="Use --resume auto to start afresh where there is none",
                    cause="usage",
                )
            return False
        for line in loaded.passed_over:
            name, _, why = line.partition(": ")
            self.events.emit("passed_over", what=name, why=why)
        self._tracked.load(loaded.states)
        self.position = loaded.step
        self._samples = loaded.position["samples"]
        self._metrics = dict(loaded.metrics)
        return True

    def _check_samples(self, samples: int) -> None:
        if self._samples not in (None, samples):
            raise CheckpointError(
                "cannot resume",
                found=f"a dataset of {samples} samples",
                needed=f"{self._samples}, as the checkpoint's",
                fix="Train on the same data, or start another run from these weights with recipe.init_from",
                cause="usage",
            )
        self._samples = samples

    def _loader(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any] | None) -> Loader:
        return Loader(
            dataset,
            seed=self.recipe.seed,
            collate=collate,
            device=self.device,
            loader_workers=self.execution.loader_workers,
            threads=self.recipe.threads,
        )

    def _log_digest(self, done: Done) -> None:
        """For `verify`: the whole state's digest, each tensor's, and each lane's loss to the last bit."""
        every = self.execution.digest_every
        if every is None or done.step % every:
            return
        whole, tensors = self._agreed_digest()
        lanes = [loss.hex() for loss in done.lane_losses]
        self.events.emit("digest", step=done.step, digest=whole, lanes=lanes, tensors=tensors)

    def _signals(self) -> Signals:
        return Signals(stop=self._stop_requested, save_failed=self._save_failed())

    def _save_failed(self) -> bool:
        """On the worker that writes: whether a save has failed. Notes those that went well in the log."""
        while self._writer is not None and (outcome := self._writer.outcome()) is not None:
            if isinstance(outcome, Saved):
                self.events.emit("checkpoint", step=outcome.step, seconds=outcome.seconds, path=str(outcome.path))
            else:
                self._note_failure(outcome)
        return self._failure is not None

    def _note_failure(self, error: CheckpointError) -> None:
        self.events.emit("checkpoint", step=self.position, error=str(error))
        self._failure = error

    def _raise_failed_save(self) -> None:
        """The writer's own error on the worker that writes; the others only know that there was one."""
        raise self._failure or TeamError("worker 0 could not save a checkpoint", fix="See its error")
