"""Shows how far a long look is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["Tell", "waiting"]

Tell = Callable[[int, int], None]
"""Says that so many of so many parts are done."""


@contextmanager
def waiting(what: str, *, patience_s: float = 3.0, stream: TextIO | None = None) -> Iterator[Tell]:
    """A display of parts done of parts in all. Whoever waits less than ``patience_s`` sees nothing of it.

    Args:
        what: the words in front.
        stream: where to; default standard error.
    """
    console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
    live = console.is_terminal and not console.is_dumb_terminal
    columns = (TextColumn(what), MofNCompleteColumn(), BarColumn(None), TimeElapsedColumn())
    bar = Progress(*columns, console=console, auto_refresh=False, expand=True, transient=True) if live else None
    begun, shown = time.monotonic(), False

    def tell(done: int, total: int) -> None:
        nonlocal shown
        if time.monotonic() - begun < patience_s:
            return
        if bar is None:
            print(f"{what}: {done} of {total}, {time.monotonic() - begun:.0f} s", file=console.file, flush=True)
            return
        if not shown:
            bar.start()
            bar.add_task(what)
            shown = True
        bar.update(bar.task_ids[0], completed=done, total=total, refresh=True)

    try:
        yield tell
    finally:
        if bar is not None and shown:
            bar.stop()
