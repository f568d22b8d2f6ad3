"""Tells the parent what happens in this rank, and where in the user's code."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.callsite import in_libraries
from paceline.doctor.watching.records import Place, pack
from paceline.doctor.watching.scratch import with_originals

__all__ = ["Recorder", "RefusedError"]

_DEPTH = 6
"""So many of the user's lines are told of a call."""


class RefusedError(PermissionError):
    """What the script may not do. The only thing raised by a hook that the script shall notice."""


class Recorder:
    """The rank's end of the sockets to the parent.

    Args:
        link: of messages, which arrive whole or not at all, whichever process of the rank sends them.
        moved: folders in which the script runs, and those that they stand for.

    Attributes:
        syncs: how many times this rank has met the others.
    """

    def __init__(self, link: socket.socket, moved: dict[str, str]) -> None:
        self._link, self._moved = link, moved
        self._numbers, self._main = itertools.count(1), os.getpid()
        self._kept: dict[str, str | None] = {}
        self.syncs = 0

    def tell(self, kind: str, *, places: tuple[Place, ...] | None = None, **facts: Any) -> int:
        """Tells of something; the number by which to tell of its end."""
        number = next(self._numbers)  # of this thread, whatever others tell meanwhile
        found = self.places() if places is None else places
        self._send(
            kind=kind,
            number=number,
            places=[(place.path, place.line, place.function) for place in found],
            syncs=self.syncs,
            facts=facts,
        )
        return number

    def done(self, number: int, *, failed: bool = False, **facts: Any) -> None:
        """What was told as `number` is over."""
        self._send(kind="failed" if failed else "done", of=number, facts=facts)

    @contextlib.contextmanager
    def unnoticed(self) -> Iterator[None]:
        """What is raised inside is told as a ``fault``, and goes no further: looking on must not be noticed.

        But for `RefusedError`.
        """
        try:
            yield
        except RefusedError:
            raise
        except Exception as error:
            self.tell("fault", text=f"{type(error).__name__}: {error}", places=())

    def places(self, within: FrameType | None = None) -> tuple[Place, ...]:
        """The user's lines that this thread is in, innermost first; ``within``: from that frame on outwards."""
        found: list[Place] = []
        frame: FrameType | None = within or sys._getframe(1)
        while frame is not None and len(found) < _DEPTH:
            if (path := self.users_path(frame.f_code.co_filename)) is not None:
                found.append(Place(path, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return tuple(found)

    def users_path(self, file: str) -> str | None:
        """The file as the user knows it; ``None``: it is of a library."""
        if file not in self._kept:
            self._kept[file] = None if in_libraries(file) else self.original(str(Path(file).absolute()))
        return self._kept[file]

    def original(self, path: str) -> str:
        """A path in a folder that stands for another one, as it is there."""
        for scratch, original in self._moved.items():
            if path == scratch or path.startswith(scratch + os.sep):
                return str(Path(original) / path[len(scratch) + 1 :])
        return path

    def shown(self, text: str) -> str:
        """A text in which paths are as the user knows them."""
        return with_originals(text, self._moved)

    def called_by_user(self) -> bool:
        """Whether the hooked function was called by a line of the user's, not by a library."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").startswith("paceline."):
            frame = frame.f_back
        return frame is not None and self.users_path(frame.f_code.co_filename) is not None

    def _send(self, **message: Any) -> None:
        pid, aside = os.getpid(), threading.get_ident() != threading.main_thread().ident
        message |= {"at_s": time.monotonic(), "child": None if pid == self._main else pid, "aside": aside}
        message["aside"] = threading.current_thread() is not threading.main_thread()
        with contextlib.suppress(OSError):  # the parent has ended: so will this process
            self._link.sendall(pack(message))
