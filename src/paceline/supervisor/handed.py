"""Signals that the supervisor hands on to its workers."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["HandedSignals"]

_FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,  # the terminal is gone: save and stop
    signal.SIGTSTP: signal.SIGTSTP,
}


class HandedSignals:
    """As a context: signals to this process are noted, to be handed on, and do nothing else.

    Outside of the main thread Python has no signals.

    Attributes:
        asked: by which of them this process was last asked to end; ``None``: by none.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._noted: list[signal.Signals] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> HandedSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _FORWARDED:
                before = signal.getsignal(number)
                if number != signal.SIGHUP or before is not signal.SIG_IGN:  # nohup
                    self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._handlers.items():
            signal.signal(number, before)

    def take(self) -> list[signal.Signals]:
        """Those since the last call, as they are for the workers."""
        noted, self._noted = self._noted, []
        return noted

    def _note(self, number: int, _: FrameType | None) -> None:
        if number != signal.SIGTSTP:
            self.asked = signal.Signals(number)
        self._noted.append(_FORWARDED[signal.Signals(number)])
