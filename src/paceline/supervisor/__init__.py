"""The parent process of a run on one machine: starts the workers, watches them, and tells how they ended.

It holds the key-value store in which workers meet, and never computes. torch is imported only for that store.

[Note: process groups] Each worker leads a process group of its own. So Ctrl-C on a terminal reaches the supervisor
alone, which hands it on once; and ending a worker ends what it started. A worker dies with its supervisor, even when
that is killed: the kernel's parent-death signal is set before the worker's program begins, and a supervisor that was
gone by then is noticed by its missing process id. A dead worker is left unreaped to the end, which keeps its group's
number from being given to strangers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from paceline import env
from paceline.config import Execution, Recipe
from paceline.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    PacelineError,
)
from paceline.run_dir import replace_text

__all__ = ["Outcome", "default_workers", "resolve_workers", "run_workers", "supervise"]

_GRACE_S = 3.0
"""After a failure the other workers have this long to end by themselves and say so."""
_STOPPING_S = 10.0
"""After a signal workers end together; one that is left alone, such as in the middle of joining, is not waited for."""
_POLL_S = 0.02
_STOPS = {EXIT_DONE, EXIT_PREEMPTED, EXIT_INTERRUPTED}
_FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,  # the terminal is gone: save and stop
}
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_BOOTSTRAP = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL; survives exec
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def resolve_workers(recipe: Recipe, execution: Execution) -> int:
    """How many workers to start on this machine; ``auto``: the `default_workers`, up to the lanes."""
    if execution.workers != "auto":
        return execution.workers
    return min(default_workers(cuda=recipe.device != "cpu"), recipe.lanes)


def default_workers(*, cuda: bool = True) -> int:
    """One per GPU if ``cuda`` may be used and is there, else one per two CPU cores, at least one."""
    if cuda and any(Path(device).exists() for device in _GPU_DRIVERS):  # else torch need not be imported to tell
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count()
    return max(1, len(os.sched_getaffinity(0)) // 2)


def supervise(command: Sequence[str], workers: int, *, record: Path | None = None) -> int:
    """`run_workers`, told as a command does: what failed goes to standard error, the exit code is returned."""
    outcome = run_workers(command, workers, record=record)
    if outcome.failure is not None:
        if sys.stdout.isatty():
            print("\x1b[?25h", end="", flush=True)  # a killed worker's progress display left the cursor hidden
        print(outcome.failure, file=sys.stderr, flush=True)
    return outcome.exit_code


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a team of workers ended.

    Args:
        exit_code: of the whole, a documented one.
        failure: the first failure and what followed from it, in lines for a person; ``None``: none failed.
    """

    exit_code: int
    failure: str | None = None


def run_workers(command: Sequence[str], workers: int, *, record: Path | None = None) -> Outcome:
    """Runs ``command`` in ``workers`` processes until all have ended.

    SIGINT, SIGTERM, SIGUSR1 and SIGHUP are handed on to every worker, whose answer is theirs. When a worker fails, the
    others are ended within seconds. No process is left behind, whatever happens.

    Args:
        command: program and arguments; each worker finds its place in its environment (see `paceline.env`).
        workers: how many.
        record: where to write the workers' process ids, as JSON.
    """
    with contextlib.ExitStack() as stack:
        report_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0))) if workers > 1 else None
        port = listener.getsockname()[1] if listener is not None else None
        team = stack.enter_context(_Workers(report_dir))
        for rank in range(workers):
            team.start(rank, command, env.for_worker(rank, workers, port=port, report_dir=report_dir))
        if record is not None:
            pids = [{"rank": rank, "pid": worker.pid} for rank, worker in enumerate(team.processes)]
            replace_text(record, json.dumps({"generation": 0, "workers": pids}) + "\n")
        # Now, beside the workers, which import torch as well before they ask for it.
        store = None if listener is None else _store(listener)
        team.wait()
        del store
        return _conclude(team.endings())


@dataclass(frozen=True)
class _Ending:
    """How one worker ended. ``exit_code`` is negative for a signal; ``by_us``: ended because another failed."""

    rank: int
    exit_code: int
    time: float
    by_us: bool
    report: dict[str, Any] | None

    @property
    def kind(self) -> str:
        if self.report is not None:
            return str(self.report["kind"])
        if self.by_us:
            return "echo"
        return "signal" if self.exit_code < 0 else "exit"

    @property
    def order(self) -> tuple[int, float]:
        """Who is to blame comes first. A death by signal is nobody's echo, unless it is abort(), which libraries call
        when a peer is gone."""
        rank = {"signal": 0 if self.exit_code != -signal.SIGABRT else 1, "echo": 2}.get(self.kind, 1)
        return rank, float(self.report["time"]) if self.report else self.time


class _Workers:
    """The worker processes: started, handed signals, reaped; as a context, killed at its end."""

    def __init__(self, report_dir: Path) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._report_dir = report_dir
        self._ended: dict[int, tuple[int, float]] = {}
        self._killed: set[int] = set()
        self._stopping = False
        self._received: list[int] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> _Workers:
        if threading.current_thread() is threading.main_thread():
            for number in (*_FORWARDED, signal.SIGTSTP):
                before = signal.getsignal(number)
                if number != signal.SIGHUP or before is not signal.SIG_IGN:  # nohup
                    self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for rank, process in enumerate(self.processes):
            if rank not in self._ended:
                _kill_group(process, signal.SIGKILL)
            process.wait()
            _end_group(process)
        for number, before in self._handlers.items():
            signal.signal(number, before)

    def start(self, rank: int, command: Sequence[str], environ: dict[str, str]) -> None:
        """Starts the worker of the next rank."""
        bootstrap = [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, str(os.getpid())]
        self.processes.append(
            subprocess.Popen([*bootstrap, *command], env=environ, process_group=0, stdin=subprocess.DEVNULL)
        )

    def wait(self) -> None:
        """Returns when all have ended: by themselves, or killed some seconds after the first failure."""
        deadline: float | None = None
        while len(self._ended) < len(self.processes):
            self._hand_on_signals()
            for rank, process in enumerate(self.processes):
                code = None if rank in self._ended else _exit_code(process)
                if code is not None:
                    self._ended[rank] = (code, time.time())
                    if self._stopping:
                        deadline = deadline or time.monotonic() + _STOPPING_S
                    if code not in _STOPS:
                        _kill_group(process, signal.SIGKILL)  # forked children hold its connections open
                        deadline = deadline or time.monotonic() + _GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                for rank, process in enumerate(self.processes):
                    if rank not in self._ended:
                        self._killed.add(rank)
                        _kill_group(process, signal.SIGKILL)
            time.sleep(_POLL_S)

    def endings(self) -> list[_Ending]:
        """One per worker, the one to blame first."""
        endings = []
        for rank, (code, ended) in self._ended.items():
            if self._stopping and code in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGUSR1):
                code = EXIT_INTERRUPTED if code == -signal.SIGINT else EXIT_PREEMPTED  # before it could answer better
            if self._stopping and rank in self._killed:
                code = EXIT_INTERRUPTED
            path = self._report_dir / f"worker-{rank}.json"
            told = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
            endings.append(_Ending(rank, code, ended, rank in self._killed, told))
        return sorted(endings, key=lambda ending: ending.order)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self._received.append(number)

    def _hand_on_signals(self) -> None:
        while self._received:
            number = self._received.pop(0)
            if number == signal.SIGTSTP:  # Ctrl-Z: stop all, and go on together
                self._signal_all(signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
                self._signal_all(signal.SIGCONT)
            else:
                self._stopping = True
                self._signal_all(_FORWARDED[signal.Signals(number)])

    def _signal_all(self, number: signal.Signals) -> None:
        for rank, process in enumerate(self.processes):
            if rank not in self._ended:
                os.kill(process.pid, number)


def _conclude(endings: Sequence[_Ending]) -> Outcome:
    """From the first failure, in the order of ``endings``."""
    failed = [ending for ending in endings if ending.exit_code not in _STOPS]
    if not failed:
        stops = [ending.exit_code for ending in endings if ending.exit_code != EXIT_DONE]
        return Outcome(exit_code=stops[0] if stops else EXIT_DONE)
    first, *others = failed
    told = first.report
    if told is None:
        lines = [f"paceline: error: {_unreported(first)}"]
    elif told["kind"] == "exception":
        lines = [f"paceline: worker {first.rank} failed:", told["traceback"].rstrip()]
    else:
        lines = [f"paceline: error: {told['message']}"]
        # Every worker that met the mistake, since it may stand in two places: one call here, another there.
        alike = [ending.report for ending in failed if ending.report and ending.report["message"] == told["message"]]
        lines += [f"  worker {report['rank']} at {report['place']}" for report in alike if report["place"]]
    echoes = 0
    for other in others:
        if told and other.report and other.report["message"] == told["message"]:
            echoes += told["kind"] == "exception"
        elif other.kind == "echo":
            echoes += 1
        else:
            what = other.report["message"] if other.report else str(_unreported(other))
            lines.append(f"paceline: worker {other.rank} failed too: {what}")
    if echoes:
        lines.append(f"paceline: {echoes} other worker{'s' if echoes > 1 else ''} ended because of it")
    return Outcome(exit_code=int(told["exit_code"]) if told else EXIT_FAILED, failure="\n".join(lines))


def _unreported(ending: _Ending) -> PacelineError:
    if ending.exit_code >= 0:
        return PacelineError(
            f"worker {ending.rank} ended",
            found=f"exit code {ending.exit_code} without a reason",
            needed="0",
            fix="Look above for what it printed",
        )
    hints = {
        signal.SIGKILL: "Out of memory? See `dmesg`. Go on from the last checkpoint with --resume",
        signal.SIGBUS: "Is /dev/shm or the disk full? Go on from the last checkpoint with --resume",
    }
    number = signal.Signals(-ending.exit_code)
    return PacelineError(
        f"worker {ending.rank} was killed",
        found=f"{number.name} ({signal.strsignal(number)})",
        needed="every worker alive to the end",
        fix=hints.get(
            number, "Run with PYTHONFAULTHANDLER=1 to see where; go on from the last checkpoint with --resume"
        ),
    )


def _store(listener: socket.socket) -> object:
    """Serves a key-value store on ``listener``, for as long as what it returns lives."""
    import torch.distributed as dist

    host, port = listener.getsockname()
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a process that has ended (negative: the signal), without reaping it; else ``None``."""
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _kill_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signals a worker and all it started. A group without members is no more."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends what a reaped worker left behind: with a second to put its things in order, such as shared memory."""
    deadline = time.monotonic() + 1.0
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            os.killpg(process.pid, 0)
        os.killpg(process.pid, signal.SIGKILL)
