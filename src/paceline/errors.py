"""The exception tree: every error a user can meet says what is wrong, what was found, what is needed and what to do.

>>> print(ConfigError("cannot deal lanes", found="lanes=8, workers=12", needed="workers <= lanes", fix="Use -n 8"))
cannot deal lanes: found lanes=8, workers=12, need workers <= lanes. Use -n 8.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar, Literal

__all__ = [
    "EXIT_BAD_USAGE",
    "EXIT_DONE",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_NO_PROGRESS",
    "EXIT_POISONED",
    "EXIT_PREEMPTED",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "NonFiniteError",
    "OutOfMemoryError",
    "PacelineError",
    "RunStopped",
    "StepAbandoned",
    "TeamError",
    "UsageError",
    "WorkerError",
    "did_you_mean",
]

EXIT_DONE = 0
EXIT_FAILED = 1
"""The user's code failed, or two runs' bits differ."""
EXIT_BAD_USAGE = 2
EXIT_PREEMPTED = 75
"""Stopped by SIGTERM after a checkpoint: start it again with ``--resume``."""
EXIT_POISONED = 76
"""The same step and lane has ended workers three times."""
EXIT_NO_PROGRESS = 77
"""Started again and again without getting any further: do not requeue."""
EXIT_INTERRUPTED = 130
"""Stopped by Ctrl-C after a checkpoint."""


class PacelineError(Exception):
    """A mistake that a user can mend, told in four beats; the command line prints it without a traceback.

    Args:
        problem: what could not be done, without a full stop.
        found: what was there.
        needed: what would have been right.
        fix: what to do now, one or more sentences; the last full stop is added.
    """

    exit_code: ClassVar[int] = EXIT_FAILED

    def __init__(
        self, problem: str, *, found: str | None = None, needed: str | None = None, fix: str | None = None
    ) -> None:
        self.problem, self.found, self.needed, self.fix = problem, found, needed, fix
        facts = ", ".join(part for part in (found and f"found {found}", needed and f"need {needed}") if part)
        text = f"{problem}: {facts}" if facts else problem
        super().__init__(" ".join(part if part[-1] in ".?!" else f"{part}." for part in (text, fix) if part))


class ConfigError(PacelineError):
    """A recipe, an execution or a command line that cannot be run."""

    exit_code = EXIT_BAD_USAGE


class DataError(PacelineError):
    """Data that is missing, damaged or does not fit the task."""

    exit_code = EXIT_BAD_USAGE


class CheckpointError(PacelineError):
    """A checkpoint that cannot be written, read, or belongs to another run.

    ``cause`` tells the two apart: a refused resume is a usage error, a full disk is a failure.
    """

    def __init__(self, *args: str, cause: Literal["usage", "failure"] = "failure", **beats: str) -> None:
        super().__init__(*args, **beats)
        self.exit_code = EXIT_BAD_USAGE if cause == "usage" else EXIT_FAILED  # type: ignore[misc]


class UsageError(PacelineError):
    """A call of the Python API at the wrong moment or with the wrong arguments."""


class NonFiniteError(PacelineError):
    """A loss or gradient that is NaN or infinite, agreed on by all workers."""


class OutOfMemoryError(PacelineError):
    """A step that needed more memory than there was."""


class TeamError(PacelineError):
    """The other workers cannot be reached. Mostly an echo: the first failure is elsewhere."""


class StepAbandoned(BaseException):
    """A worker was lost in a step or a call, which is now done again. Not an `Exception`, so that no handler of the
    user's takes it for an error: it must reach the run."""


class RunStopped(SystemExit):
    """The run was asked to stop, by a signal or `Run.request_stop`, and has saved: the program ends with that code."""


class WorkerError(PacelineError):
    """A worker that `paceline.launch` has started failed. The text is the supervisor's, with the worker's traceback."""

    def __init__(self, failure: str) -> None:
        super().__init__(failure)
        self.args = (failure,)  # as it is: it may end in a traceback


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """The sentence that names the nearest of ``choices``, or lists them.

    >>> did_you_mean("lane", ["lanes", "steps"])
    "Did you mean 'lanes'?"
    >>> did_you_mean("x", ["lanes", "steps"])
    'Known names: lanes, steps.'
    """
    names = sorted(choices)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"Did you mean '{near[0]}'?" if near else f"Known names: {', '.join(names)}."
