"""How the workers of a run ended, whom to blame, and how that is told. Pure."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, PacelineError

__all__ = ["STOPS", "Ending", "Outcome", "conclude", "signal_name"]

STOPS = {EXIT_DONE, EXIT_PREEMPTED, EXIT_INTERRUPTED}
"""Exit codes of a worker that has not failed."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a team of workers ended.

    Args:
        exit_code: of the whole, a documented one.
        failure: the first failure and what followed from it, in lines for a person; ``None``: none failed.
        members: numbers of the workers that were in the team at its end, in the order of their ranks.
        asked: the last signal by which the supervisor was asked to end, and the workers by it; ``None``: by none.
    """

    exit_code: int
    failure: str | None = None
    members: tuple[int, ...] = ()
    asked: signal.Signals | None = None


@dataclass(frozen=True)
class Ending:
    """How one worker ended. ``exit_code`` is negative for a signal; ``by_us``: ended because another failed; ``told``:
    why, if it hung; ``early``: without a failure, while the others go on."""

    rank: int
    exit_code: int
    time: float
    by_us: bool
    report: dict[str, Any] | None
    told: str | None = None
    early: bool = False

    @property
    def kind(self) -> str:
        if self.report is not None:
            return str(self.report["kind"])
        if self.by_us:
            return "echo"
        return "signal" if self.exit_code < 0 else "exit"

    @property
    def order(self) -> tuple[int, float]:
        """Who is to blame comes first. A death by signal is nobody's echo, unless it is abort(), which libraries call
        when a peer is gone."""
        rank = {"signal": 0 if self.exit_code != -signal.SIGABRT else 1, "echo": 2}.get(self.kind, 1)
        return rank, float(self.report["time"]) if self.report else self.time


def conclude(endings: Sequence[Ending], answers: Collection[int] = STOPS) -> Outcome:
    """From the first failure, in the order of ``endings``.

    Args:
        answers: exit codes of workers that have not failed.
    """
    failed = [ending for ending in endings if ending.exit_code not in answers]
    if not failed:
        stops = [ending.exit_code for ending in endings if ending.exit_code != EXIT_DONE]
        return Outcome(exit_code=stops[0] if stops else EXIT_DONE)
    first, *others = failed
    told = first.report
    if told is None:
        lines = [f"paceline: error: {_unreported(first)}"]
    elif told["kind"] == "exception":
        lines = [f"paceline: worker {first.rank} failed:", told["traceback"].rstrip()]
    else:
        lines = [f"paceline: error: {told['message']}"]
        # Every worker that met the mistake, since it may stand in two places: one call here, another there.
        alike = [ending.report for ending in failed if ending.report and ending.report["message"] == told["message"]]
        lines += [f"  worker {report['rank']} at {report['place']}" for report in alike if report["place"]]
    echoes = 0
    for other in others:
        if told and other.report and other.report["message"] == told["message"]:
            echoes += told["kind"] == "exception"
        elif other.kind == "echo":
            echoes += 1
        else:
            what = other.report["message"] if other.report else str(_unreported(other))
            lines.append(f"paceline: worker {other.rank} failed too: {what}")
    if echoes:
        lines.append(f"paceline: {echoes} other worker{'s' if echoes > 1 else ''} ended because of it")
    return Outcome(exit_code=int(told["exit_code"]) if told else EXIT_FAILED, failure="\n".join(lines))


def _unreported(ending: Ending) -> PacelineError:
    if ending.early:
        return PacelineError(
            f"worker {ending.rank} has ended before the others",
            found="exit code 0 in the middle of the run, or without a paceline.Run",
            needed="the same calls on every worker",
            fix="Make the run on every worker, and leave it on all or none",
        )
    if ending.told is not None:
        return PacelineError(
            ending.told, needed="every worker at work to the end", fix="Go on from the last checkpoint with --resume"
        )
    if ending.exit_code >= 0:
        return PacelineError(
            f"worker {ending.rank} ended",
            found=f"exit code {ending.exit_code} without a reason",
            needed="0",
            fix="Look above for what it printed",
        )
    hints = {
        signal.SIGKILL: "Out of memory? See `dmesg`. Go on from the last checkpoint with --resume",
        signal.SIGBUS: "Is /dev/shm or the disk full? Go on from the last checkpoint with --resume",
    }
    number = signal.Signals(-ending.exit_code)
    return PacelineError(
        f"worker {ending.rank} was killed",
        found=f"{number.name} ({signal.strsignal(number)})",
        needed="every worker alive to the end",
        fix=hints.get(
            number, "Run with PYTHONFAULTHANDLER=1 to see where; go on from the last checkpoint with --resume"
        ),
    )


def signal_name(number: int) -> str:
    """``SIGKILL (Killed)``"""
    return f"{signal.Signals(number).name} ({signal.strsignal(number)})"
