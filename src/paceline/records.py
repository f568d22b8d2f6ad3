"""What the calls of a run gave, in files, for a worker that takes a lost one's place and repeats them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from paceline.errors import UsageError
from paceline.pulse import Pulse
from paceline.team.packing import packed, unpacked

__all__ = ["Records"]

_POLL_S = 0.02


class Records:
    """What the calls before and between the loops over the steps gave, for workers that come later.

    Worker 0 writes; each worker remembers the last, since worker 0 may die before it has.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._count, self._last = directory, 0, b""
        directory.mkdir(exist_ok=True)

    def add(self, call: str, everyone: list[bytes], *, write: bool) -> None:
        self._last = packed((call, everyone))
        self._count += 1
        self.catch_up(write=write)

    def catch_up(self, *, write: bool) -> None:
        """Writes the last record if nobody has."""
        if write and self._last and not self._path(self._count - 1).exists():
            part = self._directory / f"part-{os.getpid()}"
            part.write_bytes(self._last)
            part.replace(self._path(self._count - 1))

    def peek(self) -> str | None:
        """The call of the next record to replay; ``None``: not yet there."""
        path = self._path(self._count)
        return unpacked(path.read_bytes())[0] if path.exists() else None

    def replay(self, call: str, pulse: Pulse) -> list[bytes]:
        """What ``call`` gave the others, once they have made it.

        Raises:
            UsageError: they made another one in its place.
        """
        before = pulse.enter("join")
        while (theirs := self.peek()) is None:
            time.sleep(_POLL_S)
        if theirs != call:
            raise UsageError(
                "cannot take the place of a lost worker",
                found=f"{call}, where the others had {theirs}",
                needed="a program that makes the same calls whenever it is run",
                fix="Take calls of the run out of conditions that depend on the time, files or random numbers; "
                "or set execution.on_loss: shrink",
            )
        everyone: list[bytes] = unpacked(self._path(self._count).read_bytes())[1]
        self._count += 1
        pulse.enter(before)
        return everyone

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:06}"
