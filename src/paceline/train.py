"""`paceline train`, written on the loop-level API and nothing else."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from paceline import env
from paceline.config import Execution, Recipe, Resume
from paceline.determinism import compile_blocks, forked_randomness
from paceline.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    ConfigError,
    OutOfMemoryError,
    RunStopped,
    UsageError,
    did_you_mean,
)
from paceline.events import Sink, warn
from paceline.memory.peak import Peak, resident_bytes
from paceline.optim import build_optimizer, learning_rate, peak_lr
from paceline.parsing import Settings, dump
from paceline.planning.budget import Budget
from paceline.planning.command import what_fits
from paceline.planning.fitting import Fitted, fit_run
from paceline.planning.state import process_bytes
from paceline.progress import Progress, TensorBoard
from paceline.run import Run
from paceline.run_dir import replace_text
from paceline.step import Done, Step
from paceline.tasks import Task

__all__ = ["train", "train_settings"]


def train(
    task: Task,
    recipe: Recipe,
    execution: Execution,
    *,
    resume: Resume = "never",
    about: Mapping[str, Any] | None = None,
    sinks: Sequence[Sink] = (),
) -> int:
    """Trains ``task`` to the end of the recipe, or to a stop. Collective: one call in each worker.

    Args:
        about: JSON that a resume must match: the task's class and arguments. The data's fingerprint is added.
        sinks: told of every event, on worker 0.

    Returns:
        The exit code: done, preempted or interrupted.

    Raises:
        PacelineError: whatever `Run` and the task raise; the checkpoints so far stay good.
    """
    about = {**(about or {}), "data": task.fingerprint()}
    task.chunk_loss(recipe.loss_chunks, samples=recipe.micro_batch)
    with Run(recipe, execution, resume=resume, about=about, sinks=sinks) as run, Peak(run.device) as most:
        with forked_randomness(run.device):
            process = process_bytes(run.recipe) if _plans_memory(execution) else 0  # before there is a model
        model = _built(task).to(run.device)
        run.track(model=model)
        peak = peak_lr(recipe.optimizer, recipe.batch)
        optimizer = build_optimizer(model, recipe.optimizer, batch=recipe.batch)
        if recipe.compile:
            compile_blocks(model)
        run.track(optimizer=optimizer)
        model.train()
        if _plans_memory(execution):
            _fit(run, task, model, process)
        data = task.train_data()
        steps = run.length(data)
        reporter = _Reporter(run, task, model, steps)

        def train_step(step: Step) -> None:
            for batch in step:
                with run.autocast():
                    loss, weight = _pair(task, task.loss(model, batch))
                step.backward(loss, weight=weight)
            lr = learning_rate(recipe.schedule, peak, step.number, steps)
            step.update(optimizer, lr=lr, max_norm=recipe.max_norm)

        reporter.log_scaling()
        with suppress(RunStopped):  # told in the result
            for done in run.steps(data, train_step, collate=task.collate):
                reporter.log(done)
                reporter.evaluate(done)
        peaks = run.team.gather(most.bytes, "the most memory")
        run.events.emit("memory", peaks=peaks, source=most.source)
        return reporter.finish()


def train_settings(settings: Settings, *, resume: Resume) -> int:
    """`train` as `paceline train` does it: shown on standard output, and ``config.yaml`` written. Collective."""
    sinks: list[Sink] = [_ConfigFile(settings), Progress()]
    if settings.execution.tensorboard:
        sinks.append(TensorBoard(settings.run_dir / "tensorboard"))
    task = settings.task.make()
    arguments = {name: value for name, value in settings.task.init_args.items() if name not in task.places}
    about = {"task": {"class_path": settings.task.class_path, "init_args": arguments}}
    before = resident_bytes()
    try:
        return train(task, settings.recipe, settings.execution, resume=resume, about=about, sinks=sinks)
    except OutOfMemoryError as error:
        raise _advised(error, settings, before) from error


def _advised(error: OutOfMemoryError, settings: Settings, process: int) -> OutOfMemoryError:
    """With the micro-batches that would have fitted into what this worker holds as it fails: there was no more."""
    here = env.read()
    on_gpu = torch.cuda.is_initialized()
    held = torch.cuda.get_device_properties(0).total_memory if on_gpu else resident_bytes()
    budget = Budget(size=held, source="what this worker could have")
    settings = dataclasses.replace(
        settings, recipe=dataclasses.replace(settings.recipe, device="cuda" if on_gpu else "cpu")
    )
    try:
        fix = what_fits(settings, workers=here.world_size if here else 1, budget=budget, process=process)
    except Exception:  # the plan is a courtesy: the error that counts is the one that is there
        return error
    return OutOfMemoryError(
        error.problem, found=error.found, needed=error.needed, fix=f"{fix} `paceline plan` shows more"
    )


def _plans_memory(execution: Execution) -> bool:
    return execution.recompute == "auto" or execution.memory is not None


def _fit(run: Run, task: Task, model: nn.Module, process: int) -> None:
    """What worker 0 measures is done everywhere: equal workers are equally fast. Collective."""

    def fitted() -> Fitted:  # again, should a worker be lost meanwhile
        workers, device = run.world_size, run.device
        return fit_run(task, model, run.recipe, run.execution, device=device, workers=workers, process=process)

    chosen = run.team.agree(fitted, "what to recompute")[0]
    recompute = run.execution.recompute
    if recompute == "auto":
        recompute = {path: str(level) for path, level in chosen.levels.items()}
    run.execution = dataclasses.replace(run.execution, recompute=recompute, memory=None)  # seen to
    if chosen.note is not None and run.is_main:
        warn(f"memory was counted on real tensors, since the loss cannot run on shapes alone ({chosen.note})")
    run.events.emit("recompute", **chosen.event())


def _built(task: Task) -> nn.Module:
    model = task.build_model()
    if not isinstance(model, nn.Module):
        found = _kind(model)
        raise UsageError(
            f"cannot train what {type(task).__name__}.build_model returns", found=found, needed="a torch.nn.Module"
        )
    return model


def _pair(task: Task, returned: object) -> tuple[Any, Any]:
    if not isinstance(returned, Sequence) or len(returned) != 2:
        raise UsageError(
            f"cannot take what {type(task).__name__}.loss returns",
            found=f"{len(returned)} values" if isinstance(returned, Sequence) else _kind(returned),
            needed="a pair: the loss summed over the micro-batch, and how many samples or tokens it is a sum over",
            fix="Return loss.sum(), len(batch)",
        )
    return returned[0], returned[1]


def _kind(value: object) -> str:
    return "None" if value is None else f"an object of {type(value).__qualname__}"


class _ConfigFile:
    """Writes ``config.yaml`` when the run has started: a refused resume must not change that of the run there.

    ``device: auto`` becomes what it turned out to be.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "start":
            recipe = dataclasses.replace(self._settings.recipe, device=event["device"])
            text = dump(dataclasses.replace(self._settings, recipe=recipe))
            replace_text(self._settings.run_dir / "config.yaml", text)

    def close(self) -> None:
        """Nothing is held."""


class _Reporter:
    """What a run tells: losses and speed by cadence, held-out metrics, and in the end its result."""

    def __init__(self, run: Run, task: Task, model: nn.Module, steps: int) -> None:
        self._run, self._task, self._model, self._steps = run, task, model, steps
        self._last = min(steps, run.execution.stop_at or steps)
        self._held_out = task.valid_data()
        if self._held_out is None and run.execution.keep_best is not None:
            raise ConfigError(
                "cannot keep the best checkpoint",
                found=f"keep_best={run.execution.keep_best!r}, and no held-out data",
                needed="held-out data to measure it on",
                fix="Leave out execution.keep_best, or prepare data with a held-out part",
            )
        self._known: dict[str, Any] = {}
        # Of what has no tokens the log says samples. `result.json` has the one name, as documented.
        self._speed = "samples_per_s" if task.tokens_per_sample() == 1 else "tokens_per_s"
        self._begun, self._samples = time.perf_counter(), 0

    def log_scaling(self) -> None:
        """One `lr_scaling` event, if the learning rate follows the batch."""
        recipe, chosen = self._run.recipe, self._run.recipe.optimizer
        if chosen.lr_scaling != "none":
            lr = peak_lr(chosen, recipe.batch)
            scale = {"rule": chosen.lr_scaling, "batch": recipe.batch, "base_batch": chosen.base_batch}
            self._run.events.emit("lr_scaling", lr=lr, base_lr=chosen.lr, **scale)

    def log(self, done: Done) -> None:
        """One `step` event every ``log_every`` steps, for the last step, and for each that was skipped."""
        self._samples += done.samples
        if not (self._due(done, self._run.execution.log_every) or done.skipped or done.stop):
            return
        elapsed_s = time.perf_counter() - self._begun
        per_s = self._samples * self._task.tokens_per_sample() / elapsed_s
        self._known |= {"loss": done.loss, "tokens_per_s": per_s}
        self._run.events.emit(
            "step",
            step=done.step,
            steps=self._steps,
            epoch=done.epoch,
            loss=done.loss,
            **{self._speed: per_s},
            **self._task.derive({"loss": done.loss}, "train"),
            grad_norm=done.grad_norm,
            lr=done.lr,
            skipped=done.skipped,
            samples=done.samples,
        )
        self._restart_clock()

    def evaluate(self, done: Done) -> None:
        """Held-out metrics every ``evaluate_every`` steps and after the last. Collective."""
        if self._held_out is None or not self._due(done, self._run.execution.evaluate_every):
            return
        begun = time.perf_counter()
        scores = self._run.evaluate(self._held_out, self._measure, collate=self._task.collate)
        scores |= self._task.derive(scores, "valid")
        self._run.note_metrics(scores)
        best = self._run.execution.keep_best
        if best is not None and best not in scores and self._run.is_main:
            warn(f"execution.keep_best keeps nothing: found no metric {best!r}. {did_you_mean(best, scores)}")
        self._run.events.emit("evaluate", step=done.step, seconds=time.perf_counter() - begun, **scores)
        self._restart_clock()

    def finish(self) -> int:
        """Writes ``result.json``, whole or not at all; returns the exit code. Collective."""
        run = self._run
        code = run.stopped or EXIT_DONE
        done = "done" if run.position == self._steps else "stopped"
        status = {EXIT_DONE: done, EXIT_PREEMPTED: "preempted", EXIT_INTERRUPTED: "interrupted"}[code]
        result = {"status": status, "step": run.position, "steps": self._steps, "digest": run.digest()}
        result |= {"loss": None, "tokens_per_s": None, **self._before(), **self._known, "workers": run.world_size}
        run.events.emit("end", **result)
        run.team.agree(lambda: self._write(result), "the result")  # by another, should worker 0 be lost here
        return code

    def _write(self, result: Mapping[str, Any]) -> None:
        if self._run.run_dir is not None and self._run.is_main:
            replace_text(self._run.run_dir / "result.json", json.dumps(result, indent=2) + "\n")

    def _before(self) -> dict[str, Any]:
        """What ``result.json`` said of this very step: a resume with nothing left to do does not forget it."""
        run = self._run
        path = None if run.run_dir is None or not run.is_main else run.run_dir / "result.json"
        try:
            before = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}
            return {name: before[name] for name in ("loss", "tokens_per_s") if before.get("step") == run.position}
        except (OSError, ValueError, LookupError, AttributeError):  # damaged: not worth a run that is done
            return {}

    def _due(self, done: Done, every: int | None) -> bool:
        return done.step == self._last or (every is not None and done.step % every == 0)

    def _measure(self, batch: Any) -> Mapping[str, Any]:
        with self._run.autocast():
            return self._task.evaluate(self._model, batch)

    def _restart_clock(self) -> None:
        self._begun, self._samples = time.perf_counter(), 0
