"""What a supervisor has to do, and the processes that do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.supervisor.processes import Process

__all__ = ["Job", "Worker"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run.

    Args:
        words: for `paceline.worker`.
        workers: of a whole team.
        folder: of the team alone: reports, records, pulses.
        record: where to write the workers' process ids; ``None``: the run's directory, if it has one.
        output: descriptors for what the workers print, and for their errors; ``None``: this process's own.
        restarts: how often a team has been started for this job before.
        is_run: the program is known to make a `Run`.
        cause: why this team was started, in words.
        began_s: when the cause was seen, `time.monotonic`; 0.0 for the first team.
        history: every change of membership so far, for ``workers.json``.
    """

    words: Sequence[str]
    workers: int
    folder: Path
    record: Path | None
    output: tuple[int, int] | None
    restarts: int
    is_run: bool
    cause: str
    began_s: float
    history: list[dict[str, object]]


@dataclass
class Worker:
    """One process, and how it ended."""

    member: int
    slot: int
    process: Process
    pulse: Path
    hello: bool = False
    met: bool = False
    bye: bool = False
    over: int | None = None
    runs: int = 0
    code: int | None = None
    ended: float = 0.0
    by_us: bool = False
    rank: int | None = None
    told: str | None = None
    idle_s: float = 0.0
    """For how long the others waited for it, before it was found to hang."""
    early: bool = False
    """It ended without a failure, and without having come to the end of its run."""
    lost: bool = False
    """It was lost, and the others go on without it."""
