"""`paceline train`, written on the loop-level API and nothing else."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.config import Execution, Recipe
from paceline.determinism import compile_blocks, seed_by
from paceline.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED
from paceline.events import Sink
from paceline.optim import build_optimizer, learning_rate
from paceline.run import Resume, Run
from paceline.step import Step
from paceline.tasks import Task

__all__ = ["train"]


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
        about: the task's class and arguments, which a resume must match.
        sinks: told of every event, on worker 0.

    Returns:
        The exit code: done, preempted or interrupted.
    """
    data = {"data": task.fingerprint()}
    with Run(recipe, execution, resume=resume, about={**(about or {}), **data}, sinks=sinks) as run:
        seed_by(recipe.seed, "model")
        model = task.build_model().to(run.device)
        optimizer = build_optimizer(model, recipe.optimizer)
        if recipe.compile:
            compile_blocks(model)
        run.track(model=model, optimizer=optimizer)
        training, held_out = task.train_data(), task.valid_data()
        total = run.length(training)
        last = min(total, execution.stop_at or total)

        def train_step(step: Step) -> None:
            for batch in step:
                with run.autocast():
                    loss, weight = task.loss(model, batch)
                step.backward(loss, weight=weight)
            lr = learning_rate(recipe.schedule, recipe.optimizer.lr, step.number, total)
            step.update(optimizer, lr=lr, max_norm=recipe.max_norm)

        def measure(batch: Any) -> Mapping[str, Any]:
            with run.autocast():
                return task.evaluate(model, batch)

        def evaluate() -> None:
            if held_out is None:
                return
            begun = time.perf_counter()
            scores = run.evaluate(held_out, measure, collate=task.collate)
            scores |= task.derive(scores, "valid")
            run.note_metrics(scores)
            run.events.emit("evaluate", step=run.position, seconds=time.perf_counter() - begun, **scores)

        _obey_signals(run)
        model.train()
        begun, samples = time.perf_counter(), 0
        for done in run.steps(training, train_step, collate=task.collate):
            samples += done.samples
            if done.step % execution.log_every == 0 or done.step == last or done.skipped:
                now = time.perf_counter()
                speed = samples * task.tokens_per_sample() / (now - begun)
                begun, samples = now, 0
                run.events.emit(
                    "step",
                    step=done.step,
                    steps=total,
                    epoch=done.epoch,
                    loss=done.loss,
                    **task.derive({"loss": done.loss}, "train"),
                    grad_norm=done.grad_norm,
                    lr=done.lr,
                    skipped=done.skipped,
                    samples=done.samples,
                    tokens_per_s=speed,
                )
            if done.step == last or (execution.evaluate_every and done.step % execution.evaluate_every == 0):
                evaluate()
                begun, samples = time.perf_counter(), 0
        return _finish(run, total)


def _obey_signals(run: Run) -> None:
    """SIGTERM and SIGUSR1 (preemption) and Ctrl-C: save after the step at work and stop; the second ends at once."""
    codes = {signal.SIGTERM: EXIT_PREEMPTED, signal.SIGUSR1: EXIT_PREEMPTED, signal.SIGINT: EXIT_INTERRUPTED}

    def handler(number: int, _: object) -> None:
        run.request_stop(codes[signal.Signals(number)])
        signal.signal(number, signal.SIG_DFL)

    for number in codes:
        signal.signal(number, handler)


def _finish(run: Run, total: int) -> int:
    """Writes ``result.json`` whole or not at all, and says how the run ended."""
    code = run.stopped or EXIT_DONE
    names = {EXIT_DONE: "done" if run.position == total else "stopped"}
    status = names.get(code, "preempted" if code == EXIT_PREEMPTED else "interrupted")
    result = {
        "status": status,
        "step": run.position,
        "steps": total,
        "digest": run.digest(),
        "workers": run.world_size,
    }
    run.events.emit("end", **result)
    if run.run_dir is not None and run.is_main:
        part = run.run_dir / "result.json.tmp"
        part.write_text(json.dumps(result, indent=2) + "\n")
        part.replace(run.run_dir / "result.json")
    return code
