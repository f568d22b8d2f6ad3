"""The run log: one JSON object a line, appended as things happen, and handed to sinks such as the progress display."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import DataError

__all__ = ["EventLog", "Sink", "read_events", "warn"]


_WAITING = 64
"""Events that a worker remembers which is not worker 0."""
_TAIL_BYTES = 1 << 20


class Sink(Protocol):
    """Takes every event of a run. One that raises is dropped; it can never stop a run."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Shows or sends one event: ``{"time": unix seconds, "event": kind, ...}``."""

    def close(self) -> None:
        """No further event will come."""


class EventLog:
    r"""Appends events to a file and hands them to sinks.

    Every worker has one, and worker 0's is active. Another that takes over appends what worker 0 has left out of the
    events that both of them came by: it may have died before it wrote the last ones. A line is written whole, with one
    system call and no buffer, so the log of a killed process is good up to its last event; the torn line that a full
    disk or a crash of the machine may leave is cut off. A log that cannot be written is reported once and never stops a
    run.

    Args:
        path: the file, continued if it exists; ``None``: sinks only.
        sinks: told of every event, in this order.
        active: writes and tells.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "events.jsonl"
    >>> log = EventLog(path)
    >>> log.emit("step", step=1, loss=2.5)
    >>> log.close()
    >>> [(event["event"], event["loss"]) for event in read_events(path)]
    [('step', 2.5)]
    """

    def __init__(self, path: Path | None, sinks: Sequence[Sink] = (), *, active: bool = True) -> None:
        self._path = path
        self._sinks = list(sinks)
        self._file: int | None = None
        self._written = 0
        self._warned = False
        self._active = active
        self._waiting: deque[dict[str, Any]] = deque(maxlen=_WAITING)
        if active:
            self._open()

    def emit(self, event: str, /, **fields: Any) -> None:
        """Records one event; the time is added.

        In the file a float that JSON cannot hold becomes ``"nan"``, ``"inf"`` or ``"-inf"``, which ``float()`` reads.
        """
        record = {"time": time.time(), "event": event, **fields}
        if self._active:
            self._tell(record)
        else:
            self._waiting.append(record)

    def take_over(self) -> None:
        """From now on this log is the active one. Harmless when it is already."""
        if self._active:
            return
        self._active = True
        self._open()
        there = self._newest_events()
        for record in self._waiting:
            if (record["event"], record.get("step")) not in there:
                self._tell(record)
        self._waiting.clear()

    def forget(self) -> None:
        """Events so far were those of a program that repeated what the others had done."""
        self._waiting.clear()

    def _open(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._written = _whole_lines(self._file)
            os.ftruncate(self._file, self._written)

    def _newest_events(self) -> set[tuple[str, Any]]:
        """Kind and step of the last events in the file."""
        if self._file is None or self._path is None:
            return set()
        tail = os.pread(self._file, _TAIL_BYTES, max(0, self._written - _TAIL_BYTES))
        lines = tail.split(b"\n")[0 if self._written <= _TAIL_BYTES else 1 :]
        events = [json.loads(line) for line in lines if line.startswith(b"{")]
        return {(event["event"], event.get("step")) for event in events}

    def _tell(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._append(self._file, json.dumps(_plain(record), allow_nan=False).encode() + b"\n")
        for sink in list(self._sinks):
            try:
                sink.event(record)
            except Exception as error:
                self._drop(sink, error)

    def close(self) -> None:
        """Closes the file and every sink. Harmless when called again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        while self._sinks:
            sink = self._sinks[-1]
            try:
                sink.close()
            except Exception as error:
                self._drop(sink, error)
            else:
                self._sinks.pop()

    def _append(self, file: int, line: bytes) -> None:
        try:
            if os.write(file, line) != len(line):
                raise OSError("only a part of the line could be written")
        except OSError as error:
            os.ftruncate(file, self._written)  # gives space back, so it works on a full disk
            if not self._warned:
                warn(f"cannot write {self._path}: {error}. The run goes on; its log has gaps.")
            self._warned = True
        else:
            self._written += len(line)

    def _drop(self, sink: Sink, error: Exception) -> None:
        self._sinks.remove(sink)
        warn(f"{type(sink).__name__} failed and is switched off: {type(error).__name__}: {error}. The run goes on.")


def read_events(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The events of a log in order, all or those of one ``kind``; a torn last line is not an event.

    Raises:
        DataError: the file is missing, or a line in it is no JSON object.
    """
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")
    except OSError as error:
        raise DataError(f"cannot read the run log {path}", found=error.strerror, fix="Name a run directory") from None
    events = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            event = json.loads(line)
            if not isinstance(event, dict):
                raise ValueError
        except ValueError:
            raise DataError(
                f"cannot read the run log {path}",
                found=f"line {number}: {line[:60].decode(errors='replace')!r}",
                needed="one JSON object a line",
                fix="Delete that line; a run log is never read back by a run",
            ) from None
        if kind is None or event.get("event") == kind:
            events.append(event)
    return events


def warn(message: str) -> None:
    """One line on standard error for what a person should know and no run should stop for."""
    print(f"paceline: warning: {message}", file=sys.stderr, flush=True)


def _whole_lines(file: int) -> int:
    """Bytes up to and with the last newline."""
    end = os.lseek(file, 0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(below) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(below) for below in value]
    return value
