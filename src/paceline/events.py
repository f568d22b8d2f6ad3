"""The run log: one JSON object a line, appended as things happen, and handed to sinks such as the progress display."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import DataError

__all__ = ["EventLog", "Sink", "read_events", "warn"]


class Sink(Protocol):
    """Takes every event of a run. One that raises is dropped; it can never stop a run."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Shows or sends one event: ``{"time": unix seconds, "event": kind, ...}``."""

    def close(self) -> None:
        """No further event will come."""


class EventLog:
    r"""Appends events to a file and hands them to sinks.

    Worker 0 has one; the other workers need none. A line is written whole, with one system call and no buffer, so the
    log of a killed process is good up to its last event; the torn line that a full disk or a crash of the machine may
    leave is cut off. A log that cannot be written is reported once and never stops a run.

    Args:
        path: the file, continued if it exists; ``None``: sinks only.
        sinks: told of every event, in this order.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "events.jsonl"
    >>> log = EventLog(path)
    >>> log.emit("step", step=1, loss=2.5)
    >>> log.close()
    >>> [(event["event"], event["loss"]) for event in read_events(path)]
    [('step', 2.5)]
    """

    def __init__(self, path: Path | None, sinks: Sequence[Sink] = ()) -> None:
        self._path = path
        self._sinks = list(sinks)
        self._file: int | None = None
        self._written = 0
        self._warned = False
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._written = _whole_lines(self._file)
            os.ftruncate(self._file, self._written)

    def emit(self, event: str, /, **fields: Any) -> None:
        """Records one event; the time is added.

        In the file a float that JSON cannot hold becomes ``"nan"``, ``"inf"`` or ``"-inf"``, which ``float()`` reads.
        """
        record = {"time": time.time(), "event": event, **fields}
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
