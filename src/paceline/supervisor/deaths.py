"""Workers that died by a signal: what they died of, and whether the step that they were in is to blame."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.pulse import Beat
from paceline.supervisor.endings import signal_name
from paceline.supervisor.watch import oom_kills

__all__ = ["FROM_OUTSIDE", "Death", "Deaths"]

FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""Signals that others send. A worker that dies by another one has done it to itself."""
_POISONED = 3


class Deaths:
    """What is remembered of the deaths in all teams of a job."""

    def __init__(self) -> None:
        self.places: Counter[tuple[int, int]] = Counter()
        """Step and lane in which workers died by their own doing."""
        self.starved = oom_kills()


@dataclass(frozen=True, kw_only=True)
class Death:
    """One worker's.

    Args:
        rank: of the worker.
        cause: in a sentence.
        poisoned: what to tell when its step and lane has ended as many workers as is enough.
    """

    rank: int
    cause: str
    poisoned: PacelineError | None

    @classmethod
    def of(cls, rank: int, number: int, beat: Beat | None, hang: str | None, before: Deaths) -> Death:
        """
        Args:
            number: of the signal.
            beat: the last of its pulse.
            hang: what was told of it, if it was ended because it hung.
            before: what is remembered; takes note of this one.
        """
        starved_before, before.starved = before.starved, oom_kills()
        starved = number == signal.SIGKILL and hang is None and (before.starved or 0) > (starved_before or 0)
        why = "was killed for want of memory" if starved else f"was killed by {signal_name(number)}"
        where = "" if beat is None or beat.step is None else f" in step {beat.step}"
        cause = hang or f"worker {rank} {why}{where}"
        by_itself = starved or hang is not None or number not in FROM_OUTSIDE
        poisoned = None
        in_a_lane = beat is not None and beat.activity in ("load", "compute")
        if by_itself and in_a_lane and beat is not None and beat.step is not None and beat.lane is not None:
            before.places[beat.step, beat.lane] += 1
            if before.places[beat.step, beat.lane] >= _POISONED:
                poisoned = _poisoned(beat.step, beat.lane, cause)
        return cls(rank=rank, cause=cause, poisoned=poisoned)


def _poisoned(step: int, lane: int, cause: str) -> PacelineError:
    return PacelineError(
        f"cannot get past step {step}",
        found=f"lane {lane} of it has ended {_POISONED} workers, the last: {cause}",
        needed="samples and code that do not end the process",
        fix="See its samples with `paceline order`, run it alone with PYTHONFAULTHANDLER=1 to see where, and mend the "
        "data or the code; or start another run from the newest weights with recipe.init_from and another recipe.seed",
    )
