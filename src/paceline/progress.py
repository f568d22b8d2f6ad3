"""What shows people how far things are: sinks of a run (a live display, plain lines, TensorBoard), bytes, a long wait.

Of the workers only worker 0 has sinks. None of these has a thread of its own or touches the run; one that fails is
dropped by the `EventLog`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

from paceline.events import warn

__all__ = ["Progress", "Tell", "TensorBoard", "bytes_progress", "waiting"]

_SPEEDS = {"tokens_per_s": "tokens/s", "samples_per_s": "samples/s"}
_NOT_METRICS = {"time", "event", "step", "seconds"}


class _Console(Console):
    """A console whose reader may leave, such as ``head``: an error like any other, where rich would end the program."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())  # what is left would fail again at exit
        raise BrokenPipeError("its reader has left")


class Progress:
    """Shows a run to a person.

    On a terminal: a bar with what is left, the newest figures under it, and all else scrolling above. Elsewhere: one
    line per event, so that the log of a batch job reads like a table.

    Args:
        stream: where to; default standard output.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = _Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TextColumn("{task.fields[left]}"))
            self._bar = Bar(*columns, console=self._console, auto_refresh=False, expand=True)
            self._task = self._bar.add_task("", total=None, left="")
            self._figures = Text("starting ...", style="dim", overflow="ellipsis", no_wrap=True)
            self._live = Live(Group(self._bar, self._figures), console=self._console, auto_refresh=False)
        self._steps: int | None = None
        self._begun: tuple[float, int] | None = None

    def event(self, event: Mapping[str, Any]) -> None:
        """Shows one event; unknown kinds are passed over."""
        show: Callable[[Mapping[str, Any]], None] | None = getattr(self, f"_show_{event['event']}", None)
        if show is not None:
            show(event)

    def close(self) -> None:
        """Leaves the last state of the display on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show_start(self, event: Mapping[str, Any]) -> None:
        self._steps = event.get("steps")
        self._begun = event["time"], event.get("resumed_from") or 0
        workers, lanes = event["workers"], event["lanes"]
        drive = "worker drives" if workers == 1 else "workers drive"
        where = f"{workers} {drive} {_counted(lanes, 'lane')} on {event['device']}"
        if "batch" in event:
            micro_batch = event["micro_batch"]
            micro_steps = _counted(event["batch"] // (lanes * micro_batch), "micro-step")
            where += f", batch {event['batch']} = {_counted(lanes, 'lane')} x {micro_steps} x {micro_batch}"
        resumed = f"; goes on from step {event['resumed_from']}" if event.get("resumed_from") else ""
        if self._live is not None:
            self._live.start()
        self._say(f"{where}, {_short(event['parameters'])} parameters{resumed}", style="bold")

    def _show_lr_scaling(self, event: Mapping[str, Any]) -> None:
        ratio = f"{event['batch']}/{event['base_batch']}"
        factor = f"sqrt({ratio})" if event["rule"] == "sqrt" else f"{ratio} ({event['rule']})"
        self._say(f"lr {event['lr']:.2e} = {event['base_lr']:.2e} x {factor}")

    def _show_recompute(self, event: Mapping[str, Any]) -> None:
        self._say(f"recompute: {event['told']}")

    def _show_step(self, event: Mapping[str, Any]) -> None:
        self._steps = event.get("steps", self._steps)
        left = self._time_left(event)
        figures = [f"loss {event['loss']:.4f}"]
        if "bits_per_byte" in event:
            figures.append(f"{event['bits_per_byte']:.3f} bits/byte")
        figures += [f"{_short(event[name])} {unit}" for name, unit in _SPEEDS.items() if name in event]
        figures.append(f"lr {event['lr']:.2e}")
        if event.get("grad_norm") is not None:
            figures.append(f"grad norm {event['grad_norm']:.3f}")
        if event.get("skipped"):
            figures.append("update skipped")
        if self._live is None:
            of = f"/{self._steps}" if self._steps else ""
            self._say(f"step {event['step']}{of}  {'  '.join(figures)}  {left}".rstrip())
            return
        self._bar.update(self._task, completed=event["step"], total=self._steps, left=left)
        self._figures.plain = "  ".join(figures)
        self._figures.style = "yellow" if event.get("skipped") else "none"
        self._live.refresh()

    def _show_evaluate(self, event: Mapping[str, Any]) -> None:
        # A confusion matrix is for the log.
        scores = {n: value for n, value in event.items() if n not in _NOT_METRICS and isinstance(value, float | int)}
        told = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in scores.items())
        self._say(f"step {event['step']}  held-out  {told}  ({event['seconds']:.1f} s)", style="cyan")

    def _show_checkpoint(self, event: Mapping[str, Any]) -> None:
        if "error" in event:
            self._say(f"step {event['step']}  not saved: {event['error']}", style="bold red")
        else:
            self._say(f"step {event['step']}  saved {event['path']} ({event['seconds']:.1f} s)", style="dim")

    def _show_membership(self, event: Mapping[str, Any]) -> None:
        if self._live is not None and not self._live.is_started:
            self._live.start()  # the worker that showed the run so far is gone
        workers = "1 worker goes" if event["workers"] == 1 else f"{event['workers']} workers go"
        self._say(f"{event['cause']}; {workers} on after {event['seconds']:.2f} s", style="yellow")

    def _show_passed_over(self, event: Mapping[str, Any]) -> None:
        self._say(f"passed over {event['what']}: {event['why']}", style="yellow")

    def _show_end(self, event: Mapping[str, Any]) -> None:
        self.close()
        self._say(f"{event['status']} at step {event['step']}, digest {event['digest']}", style="bold")

    def _say(self, line: str, style: str = "none") -> None:
        self._console.print(Text(line, style=style))  # Text, since an error may hold what rich would take for markup
        if self._live is None:
            self._console.file.flush()

    def _time_left(self, event: Mapping[str, Any]) -> str:
        if self._begun is None or self._steps is None:
            return ""
        begun, first = self._begun
        done = event["step"] - first
        return f"eta {_clock((event['time'] - begun) / done * (self._steps - event['step']))}" if done > 0 else ""


class TensorBoard:
    """Writes scalars for TensorBoard. A missing package or directory costs one warning and switches it off.

    Args:
        directory: where the event files go.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None
        self._opened = False

    def event(self, event: Mapping[str, Any]) -> None:
        """Writes the numbers of a step or an evaluation."""
        prefix = {"step": "train", "evaluate": "held_out"}.get(event["event"])
        if prefix is not None and not self._opened:
            self._open()
        if self._writer is None or prefix is None:
            return
        for name, value in event.items():
            if name not in _NOT_METRICS | {"steps", "samples", "skipped"} and isinstance(value, (int, float)):
                self._writer.add_scalar(f"{prefix}/{name}", value, event["step"], walltime=event["time"])
        if prefix == "held_out":
            self._writer.flush()

    def close(self) -> None:
        """Writes what is pending."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> None:
        """At the first event: of all workers only the one that tells shall make files."""
        self._opened = True
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._directory))
        except ImportError:
            warn("execution.tensorboard is on, but tensorboard is not installed: pip install 'paceline[tensorboard]'.")
        except OSError as error:
            warn(f"cannot write for TensorBoard to {self._directory}: {error.strerror}. The run goes on without.")


@contextlib.contextmanager
def bytes_progress(what: str, stream: TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """A display of bytes done of bytes in all: a bar on a terminal, elsewhere a line per tenth.

    Args:
        what: the word in front.
        stream: where to; default standard error.
    """
    console = _Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
    if console.is_terminal and not console.is_dumb_terminal:
        columns = (TextColumn(what), BarColumn(None), DownloadColumn(), TransferSpeedColumn())
        with Bar(*columns, console=console, auto_refresh=False, expand=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total, refresh=True)
        return
    told = 0

    def tell(done: int, total: int) -> None:
        nonlocal told
        if total and done * 10 // total > told:
            told = done * 10 // total
            print(f"{what}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB", file=console.file, flush=True)

    yield tell


Tell = Callable[[str], None]
"""Says what is done from now on."""

_LIVE_S = 0.5


@contextlib.contextmanager
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
        with Bar(*columns, console=console, transient=True) as line:
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


def _short(number: float) -> str:
    """Three digits and a unit.

    >>> _short(1234567), _short(38_000.0), _short(950)
    ('1.23M', '38.0k', '950')
    """
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size * 0.9995:
            return f"{number / size:#.3g}".rstrip(".") + unit
    return f"{number:.3g}"


def _counted(number: int, what: str) -> str:
    """
    >>> _counted(1, "lane"), _counted(8, "lane")
    ('1 lane', '8 lanes')
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> _clock(59.6), _clock(3725)
    ('1:00', '1:02:05')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
