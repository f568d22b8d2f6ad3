"""Signals that ask a run to stop: they only set a flag, and the run saves after the step at work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED

__all__ = ["obeying_signals"]

_PREEMPTED = {signal.SIGTERM: EXIT_PREEMPTED, signal.SIGUSR1: EXIT_PREEMPTED}
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)


@contextmanager
def obeying_signals(request_stop: Callable[[int], None], *, keyboard: bool) -> Iterator[None]:
    """Meanwhile SIGTERM and SIGUSR1 (preemption) ask for a stop by its exit code; the second one ends at once.

    A handler of the user's own stays; and outside of the main thread, where Python has no signals, nothing happens.

    Args:
        keyboard: Ctrl-C (SIGINT) too, which else is a `KeyboardInterrupt`.
    """
    codes = {**_PREEMPTED, signal.SIGINT: EXIT_INTERRUPTED} if keyboard else _PREEMPTED
    if threading.current_thread() is not threading.main_thread():
        codes = {}

    def handler(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        request_stop(codes[signal.Signals(number)])

    before = {number: signal.getsignal(number) for number in codes if signal.getsignal(number) in _DEFAULT}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
