"""Shows what a long look is at: a line that moves on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["Tell", "waiting"]

Tell = Callable[[str], None]
"""Says what is done from now on."""

_LIVE_S = 0.5


@contextmanager
def waiting(
    what: str, *, patience_s: float = 2.0, every_s: float = 10.0, stream: TextIO | None = None
) -> Iterator[Tell]:
    """A display of what is done, and for how long. Whoever waits less than ``patience_s`` sees nothing of it.

    A thread of its own shows it, so that time moves on whatever the work is in.

    Args:
        what: the words in front.
        every_s: between plain lines; a terminal is kept up to date.
        stream: where to; default standard error.
    """
    console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
    live = console.is_terminal and not console.is_dumb_terminal
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    begun, doing, ended = time.monotonic(), "", threading.Event()

    def tell(now: str) -> None:
        nonlocal doing
        doing = now

    def show() -> None:
        if ended.wait(patience_s):
            return
        if not live:
            told = True
            while told:
                print(f"{what}: {doing}, {time.monotonic() - begun:.0f} s", file=console.file, flush=True)
                told = not ended.wait(every_s)
            return
        with Progress(*columns, console=console, transient=True) as line:
            task = line.add_task(what)
            while not ended.wait(_LIVE_S):
                line.update(task, description=f"{what}: {doing}")

    thread = threading.Thread(target=show, name="waiting", daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        ended.set()
        thread.join()
