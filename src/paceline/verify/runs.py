"""The runs under test: each in a directory of its own, in as many legs as it has worker counts."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from paceline.checkpoint import Loaded, Store
from paceline.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, PacelineError
from paceline.events import read_events
from paceline.faults import Faults
from paceline.parsing import Settings, dump
from paceline.verify.trace import Cost, Difference, StepBits, WeightGap, cost_of, trace_of

__all__ = ["Recompute", "Variation", "run", "shown", "stops"]

Recompute = str | list[str] | dict[str, str]
"""A way to recompute, as in `paceline.Execution`."""

_POLL_S = 0.2
_ENDING_S = 20.0
"""For a run that shall end before its time, which saves first: nobody needs what it saves."""
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


def run(variation: Variation, settings: Settings, steps: int | None, watch: Callable[[], None]) -> int:
    """Runs one variation and reads its log; returns the exit code of the leg that failed, or 0.

    Args:
        settings: of the run that is verified.
        steps: how many; ``None``: all.
        watch: called a few times a second.

    Raises:
        PacelineError: its log does not show that it ran as asked.
    """
    begun = time.monotonic()

    def tick() -> None:
        variation.seconds = time.monotonic() - begun
        watch()

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
        command = [sys.executable, "-m", "paceline", "train", str(config), "--resume"]
        code = _execute([*command, "must" if leg else "never"], variation.run_dir, tick)
        for _ in range(variation.faults.stops):
            if code in (EXIT_PREEMPTED, EXIT_INTERRUPTED):
                code = _execute([*command, "auto"], variation.run_dir, tick)  # as a launcher would
        if code != EXIT_DONE:
            return code
    tick()
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


def _execute(command: Sequence[str], logs: Path, watch: Callable[[], None]) -> int:
    """Runs a command whose output goes to files, and does not outlive this process's own end by signal."""
    with ExitStack() as stack:
        stdout, stderr = (
            stack.enter_context(logs.with_name(f"{logs.name}.{end}").open("ab")) for end in ("out", "err")
        )
        stack.enter_context(_terminable())
        process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr))
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
                watch()
        except BaseException:
            process.terminate()  # its supervisor hands it on, and leaves no worker behind
            try:
                process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its workers end with it
            raise
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
