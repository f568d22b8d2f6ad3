"""The runs under test: each in a directory of its own, in as many legs as it has worker counts.

A leg is what `paceline train` would be. This process is its supervisor, and all are forked from one template.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint import Loaded, Store
from paceline.config import Resume
from paceline.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, PacelineError
from paceline.events import read_events
from paceline.faults import Faults
from paceline.parsing import Settings, dump
from paceline.run_dir import prepare_run_dir
from paceline.supervisor import Template, run_workers
from paceline.verify.trace import Cost, Difference, StepBits, WeightGap, cost_of, trace_of

__all__ = ["Recompute", "Variation", "run", "shown", "stops"]

Recompute = str | list[str] | dict[str, str]
"""A way to recompute, as in `paceline.Execution`."""

_NAMED = 3
"""So many statements stand in a variation's name."""


@dataclass(kw_only=True)
class Variation:
    """One run under test, and what became of it."""

    workers: tuple[int, ...]
    run_dir: Path
    faults: Faults = dataclasses.field(default_factory=Faults)
    recompute: Recompute | None = None
    """A way to recompute other than the settings' own."""
    seconds: float = 0.0
    cost: Cost | None = None
    trace: list[StepBits] = dataclasses.field(default_factory=list)
    difference: Difference | None = None
    weights: WeightGap | None = None

    @property
    def name(self) -> str:
        """As in the table: ``2``, or ``2 > 3 > 1``, or ``2, recompute all``, or ``2, kill worker=1 step=3``."""
        statements = list(map(str, self.faults.statements))
        faults = "; ".join(statements[:_NAMED]) + ("; ..." if len(statements) > _NAMED else "")
        how = ([f"recompute {shown(self.recompute)}"] if self.recompute else []) + ([faults] if faults else [])
        return ", ".join([" > ".join(map(str, self.workers)), *how])

    @property
    def events(self) -> Path:
        """Its run log."""
        return self.run_dir / "events.jsonl"

    @property
    def errors(self) -> Path:
        """The file of what its processes said on standard error."""
        return self.run_dir.with_name(f"{self.run_dir.name}.err")

    def checkpoint(self, *states: str) -> Loaded:
        """The one after the last step, with ``states`` of it."""
        loaded = Store(self.run_dir / "checkpoints").load(None, only=states)
        if loaded is None or loaded.step != len(self.trace) or loaded.passed_over:
            raise PacelineError(
                f"cannot prove anything by the run with workers {self.name}",
                found=f"checkpoint {loaded.step if loaded else None} in {self.run_dir}",
                needed=f"a whole one of step {len(self.trace)}",
                fix="Run it again",
            )
        return loaded


def shown(way: Recompute) -> str:
    """As it is written on the command line.

    >>> shown("all"), shown(["blocks.0", "blocks.1"]), shown({"blocks.*": "full"})
    ('all', '[blocks.0, blocks.1]', '{blocks.*: full}')
    """
    if isinstance(way, dict):
        return f"{{{', '.join(f'{path}: {level}' for path, level in way.items())}}}"
    return way if isinstance(way, str) else f"[{', '.join(way)}]"


def stops(steps: int, legs: int) -> list[int]:
    """Where the legs of a run end.

    >>> stops(20, 3), stops(20, 1)
    ([6, 13, 20], [20])
    """
    return [leg * steps // legs for leg in range(1, legs + 1)]


def run(variation: Variation, settings: Settings, steps: int | None, template: Template) -> int:
    """Runs one variation and reads its log; returns the exit code of the leg that failed, or 0.

    Args:
        settings: of the run that is verified.
        steps: how many; ``None``: all.
        template: what the workers are forked from.

    Raises:
        PacelineError: its log does not show that it ran as asked.
        KeyboardInterrupt, SystemExit: this process was asked to end, and its workers have ended.
    """
    begun_s = time.monotonic()
    ends: list[int | None] = [*stops(steps, len(variation.workers))] if steps is not None else [None]
    disturbed = bool(variation.faults.statements)
    for leg, (count, stop) in enumerate(zip(variation.workers, ends, strict=True)):
        execution = dataclasses.replace(
            settings.execution,
            workers=count,
            run_dir=str(variation.run_dir),
            stop_at=stop,
            digest_every=1,
            tensorboard=False,
            faults=str(variation.faults) if disturbed else None,
        )
        if variation.recompute is not None:
            memory = execution.memory if variation.recompute == "auto" else None  # the others may need more
            execution = dataclasses.replace(execution, recompute=variation.recompute, memory=memory)
        elif execution.recompute != "auto":
            execution = dataclasses.replace(execution, memory=None)
        if not disturbed:
            execution = dataclasses.replace(execution, checkpoint_every=None, keep=1, keep_best=None)  # one at the stop
        config = variation.run_dir.with_name(f"{variation.run_dir.name}-leg{leg + 1}.yaml")
        config.write_text(dump(dataclasses.replace(settings, execution=execution)), encoding="utf-8")
        code = _train(variation, config, count, "must" if leg else "never", template)
        for _ in range(variation.faults.stops):
            if code in (EXIT_PREEMPTED, EXIT_INTERRUPTED):
                code = _train(variation, config, count, "auto", template)  # as a launcher would
        variation.seconds = time.monotonic() - begun_s
        if code != EXIT_DONE:
            return code
    events = read_events(variation.events)
    variation.trace = trace_of(events, workers=variation.workers, steps=steps, disturbed=disturbed)
    if disturbed:
        _check_fired(variation)
        variation.cost = cost_of(events)
    return EXIT_DONE


def _check_fired(variation: Variation) -> None:
    """A rehearsal in which nothing happened proves nothing."""
    if unfired := variation.faults.unfired(variation.run_dir / "faults"):
        raise PacelineError(
            f"cannot prove anything by the run with workers {variation.name}",
            found=f"{', '.join(map(repr, unfired))} not met in {len(variation.trace)} steps",
            needed="a run that meets every fault as often as asked",
            fix="Name a step, lane and place that this worker comes to. After a loss the others move up, and a "
            "replacement comes in, as the last, some steps later",
        )


def _train(variation: Variation, config: Path, workers: int, resume: Resume, template: Template) -> int:
    """`paceline train` with what it says in files beside the run's directory."""
    prepare_run_dir(variation.run_dir, resume)
    with (
        variation.run_dir.with_name(f"{variation.run_dir.name}.out").open("a") as out,
        variation.errors.open("a") as err,
        redirect_stderr(err),  # the supervisor's own words
    ):
        outcome = run_workers(
            ["call", "paceline.cli.running:train_as_worker", str(config), "--resume", resume],
            workers,
            record=variation.run_dir / "workers.json",
            output=(out.fileno(), err.fileno()),
            is_run=True,
            template=template,
        )
        if outcome.failure is not None:
            print(outcome.failure, file=err)
    if outcome.asked == signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.asked is not None:
        raise SystemExit(128 + outcome.asked)
    return outcome.exit_code
