"""The parent process of a run on one machine: starts the workers, watches them, and tells how they ended.

It never computes, and does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.config import Execution, Recipe
from paceline.errors import EXIT_NO_PROGRESS
from paceline.events import warn
from paceline.supervisor.deaths import Deaths
from paceline.supervisor.endings import Outcome
from paceline.supervisor.handed import HandedSignals
from paceline.supervisor.job import Job
from paceline.supervisor.processes import Template
from paceline.supervisor.supervision import Supervision

__all__ = ["Outcome", "Template", "default_workers", "resolve_workers", "run_workers", "supervise"]

_FUTILE = 3
"""So many new beginnings in a row that came no further."""
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def resolve_workers(recipe: Recipe, execution: Execution) -> int:
    """How many workers to start on this machine; ``auto``: the `default_workers`, up to the lanes."""
    if execution.workers != "auto":
        return execution.workers
    return min(default_workers(cuda=recipe.device != "cpu"), recipe.lanes)


def default_workers(*, cuda: bool = True) -> int:
    """One per GPU if ``cuda`` may be used and is there, else one per two CPU cores, at least one."""
    if cuda and any(Path(device).exists() for device in _GPU_DRIVERS):  # else torch need not be imported to tell
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count()
    return max(1, len(os.sched_getaffinity(0)) // 2)


def supervise(
    words: Sequence[str],
    workers: int,
    *,
    record: Path | None = None,
    is_run: bool = False,
    template: Template | None = None,
) -> int:
    """`run_workers`, told as a command does: what failed goes to standard error, the exit code is returned."""
    outcome = run_workers(words, workers, record=record, is_run=is_run, template=template)
    if outcome.failure is not None:
        if sys.stdout.isatty():
            print("\x1b[?25h", end="", flush=True)  # a killed worker's progress display left the cursor hidden
        print(outcome.failure, file=sys.stderr, flush=True)
    return outcome.exit_code


def run_workers(
    words: Sequence[str],
    workers: int,
    *,
    record: Path | None = None,
    output: tuple[int, int] | None = None,
    is_run: bool = False,
    template: Template | None = None,
) -> Outcome:
    """Runs ``words`` in ``workers`` processes until all have ended.

    A worker that is lost is replaced, see ``Execution.on_loss``; when none is left, all begin again, and the run goes
    on from its newest checkpoint. SIGINT, SIGTERM, SIGUSR1 and SIGHUP are handed on to every worker, whose answer is
    theirs; the second ends all at once. When a worker fails, the others are ended within seconds. No process is left
    behind, whatever happens.

    Args:
        words: see `paceline.worker`; each worker finds its place in its environment (see `paceline.env`).
        workers: how many.
        record: where to write the workers' process ids, as JSON; ``None``: in the run's directory, if there is one.
        output: descriptors for what the workers print, and for their errors; ``None``: this process's own.
        is_run: the program is known to make a `paceline.Run`, and so to go on without a worker that is lost early.
        template: one that is open, and stays so; ``None``: one of its own.
    """
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
        store = stack.enter_context(socket.create_server(("127.0.0.1", 0))) if workers > 1 else None
        signals, template = stack.enter_context(HandedSignals()), template or stack.enter_context(Template())
        deaths, restarts, futile, furthest = Deaths(), 0, 0, -1
        cause, began_s = "start", 0.0
        history: list[dict[str, object]] = []
        while True:
            folder = home / str(restarts)
            folder.mkdir()
            job = Job(
                words=words,
                workers=workers,
                folder=folder,
                record=record,
                output=output,
                restarts=restarts,
                is_run=is_run,
                cause=cause,
                began_s=began_s,
                history=history,
            )
            team = Supervision(job, template, store, signals, deaths)
            outcome = team.run()
            if team.begin_again is None:
                return dataclasses.replace(outcome, asked=signals.asked)
            futile = futile + 1 if team.furthest <= furthest else 0
            furthest = max(furthest, team.furthest)
            if futile >= _FUTILE:
                told = f"paceline: error: {team.begin_again}; begun again {restarts} times, and came no further than "
                return Outcome(exit_code=EXIT_NO_PROGRESS, failure=f"{told}step {furthest}.")
            restarts += 1
            cause, began_s = f"{team.begin_again}; all begin again from the newest checkpoint", time.monotonic()
            warn(cause)
