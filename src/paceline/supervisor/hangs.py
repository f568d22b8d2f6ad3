"""Hangs of real processes: looks at their pulses, and of one that hangs keeps where all of them are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.events import warn
from paceline.pulse import Beat, read_pulse
from paceline.stacks import Dumping, collect, new_file, users_line
from paceline.supervisor.processes import Process
from paceline.supervisor.watch import Hang, Watch, Watched, is_stopped

__all__ = ["Hangs", "Suspect"]


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A member of the team that lives.

    Args:
        id: never used again.
        rank: its place.
        process: its own.
        pulse: the file of its pulse.
        stacks: the file into which it writes its stacks.
        ask: asks it to do so.
    """

    id: int
    rank: int
    process: Process
    pulse: Path
    stacks: Path
    ask: Callable[[], None]


class Hangs:
    """Looks for one that hangs, see `Watch` for when it does.

    Attributes:
        furthest: the furthest step that a worker has come to.
    """

    def __init__(self, hang_after_s: float | None, timeout_s: float, furthest: int = 0) -> None:
        self._watch = Watch(hang_after_s, timeout_s)
        self.furthest = furthest

    def look(self, members: Sequence[Suspect]) -> Hang | None:
        """The one to blame, if any."""
        beats = {member.id: read_pulse(member.pulse) for member in members}
        for beat in beats.values():
            self.saw(beat)
        watched = [
            Watched(id=one.id, rank=one.rank, beat=beats[one.id], stopped=is_stopped(one.process.pid))
            for one in members
        ]
        return self._watch.look(watched, time.monotonic())

    def saw(self, beat: Beat | None) -> None:
        """Takes note of how far a worker has come."""
        if beat is not None and beat.step is not None:
            self.furthest = max(self.furthest, beat.step)

    def tell(self, hang: Hang, members: Sequence[Suspect], run_dir: Path | None) -> str:
        """What to tell of ``hang``. The stacks of all ``members`` are kept in a file of the run's directory."""
        into = new_file(run_dir / "hangs", hang.step, hang.rank) if run_dir is not None else None
        beats = {member.id: read_pulse(member.pulse) for member in members}
        dumping = [
            Dumping(rank=one.rank, pid=one.process.pid, path=one.stacks, doing=_doing(beats[one.id]), ask=one.ask)
            for one in members
        ]
        try:
            text = collect(dumping, hang.rank, into)
        except OSError as error:
            warn(f"cannot keep the stacks of a worker that hangs: {error}")
            text, into = "", None
        beat = beats[hang.id]
        told = hang.told(users_line(text, beat.main_thread) if beat is not None else None)
        return told if into is None else f"{told}; stacks in {into}"


def _doing(beat: Beat | None) -> str:
    if beat is None:
        return "start"
    step = f", step {beat.step}" if beat.step is not None else ""
    call = f", {beat.call}" if beat.activity == "wait" and beat.call else ""
    return f"{beat.activity}{step}{call}"
