"""Signals that ask a run to stop: they only set a flag, and the run saves after the step at work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline import env
from paceline.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, UsageError

__all__ = ["check_exit_code", "obeying_signals"]

_PREEMPTED = {signal.SIGTERM: EXIT_PREEMPTED, signal.SIGUSR1: EXIT_PREEMPTED}
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)


def check_exit_code(exit_code: int) -> None:
    """Raises `UsageError` for one that no process can end with, or that means success."""
    if not 1 <= exit_code <= 255:
        raise UsageError(
            "cannot stop the run",
            found=f"exit_code={exit_code}",
            needed="1 to 255",
            fix="Use 75: preempted, resumable",
        )


@contextmanager
def obeying_signals(request_stop: Callable[[int], None]) -> Iterator[None]:
    """Meanwhile SIGTERM and SIGUSR1 (preemption) ask for a stop by its exit code, and so does Ctrl-C when a launcher
    has started this worker; else it is a `KeyboardInterrupt`.

    The second of a kind ends the process at once. Not under our own supervisor, who judges what a second one is: a
    signal to all processes of a job comes from its sender, and handed on. A handler of the user's own stays; and
    outside of the main thread, where Python has no signals, nothing happens.
    """
    here = env.read()
    codes = _PREEMPTED if here is None else {**_PREEMPTED, signal.SIGINT: EXIT_INTERRUPTED}
    second_ends = here is None or here.link is None
    if threading.current_thread() is not threading.main_thread():
        codes = {}

    def handler(number: int, _: object) -> None:
        if second_ends:
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
