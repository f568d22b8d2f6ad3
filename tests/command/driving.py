"""`python -m paceline ...` as a user starts it: its output, its exit code, its processes; nobody is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from paceline.events import read_events
from resident import Forked, Resident

__all__ = [
    "TINY",
    "Ended",
    "Started",
    "forking_from",
    "paceline",
    "reached",
    "result",
    "script",
    "start",
    "torchrun",
    "wait_for",
    "write_tiny",
]

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"
DEADLINE_S = 240.0
"""For one command: tens of times what it needs, so that only what hangs runs into it."""
LOOK_S = 0.25
"""How often it is seen which processes a command has."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a command left; ``time``: when it had ended, in unix seconds."""

    code: int
    out: str
    err: str
    time: float

    def check(self, code: int = 0) -> Ended:
        """Fails with all that the command said unless it ended with ``code``."""
        assert self.code == code, f"exit code {self.code} instead of {code}\n{self.out}\n{self.err}"
        return self

    @property
    def error(self) -> str:
        """The one error that a user's mistake may print: a single line, no traceback."""
        lines = [line for line in self.err.splitlines() if line.startswith("paceline: error: ")]
        assert len(lines) == 1 and "Traceback" not in self.err + self.out, f"{self.out}\n{self.err}"
        return lines[0].removeprefix("paceline: error: ")


class Started:
    """A command that is running, in a session of its own.

    Args:
        words: the command line, from the program on.
        cwd: where it runs; relative paths in configurations begin there.
        extra: environment variables on top of this process's.
        resident: what it is forked from, if it runs Python; ``None``: it starts anew.
    """

    process: subprocess.Popen[bytes] | Forked

    def __init__(
        self,
        words: list[str],
        cwd: Path,
        extra: Mapping[str, str] | None = None,
        *,
        resident: Resident | None = None,
    ) -> None:
        self._begun = time.monotonic()
        logs = cwd / "logs"
        logs.mkdir(exist_ok=True)
        self._out, self._err = (logs / f"{time.monotonic_ns()}.{end}" for end in ("out", "err"))
        environ = {**os.environ, **(extra or {})}
        with self._out.open("w") as out, self._err.open("w") as err:
            if resident is None:
                self.process = subprocess.Popen(
                    words,
                    cwd=cwd,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            else:
                assert words[0] == sys.executable
                self.process = resident.start(words[1:], cwd, environ, self._out, self._err)
        self._seen: dict[int, psutil.Process] = {self.process.pid: psutil.Process(self.process.pid)}

    def all_processes(self) -> set[psutil.Process]:
        """The command's process and every one that it has started: of its session, or begun by one of them."""
        found = {pid: (parent, session) for pid, parent, session in _processes()}
        grew = True
        while grew:
            new = {
                pid
                for pid, (parent, session) in found.items()
                if pid not in self._seen and (parent in self._seen or session == self.process.pid)
            }
            for pid in new:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._seen[pid] = psutil.Process(pid)
            grew = bool(new & self._seen.keys())
        return set(self._seen.values())

    def wait(self) -> Ended:
        """Until it ends, by the deadline, and everything it has started with it."""
        look_s = 0.0
        while self.process.poll() is None:
            now_s = time.monotonic()
            if now_s > look_s + LOOK_S:
                look_s = now_s
                self.all_processes()
            if now_s - self._begun > DEADLINE_S:
                self.kill()
                raise AssertionError(f"still running after {DEADLINE_S:.0f} s\n{self._texts()}")
            time.sleep(0.02)
        ended = time.time()
        _, orphans = psutil.wait_procs(self.all_processes(), timeout=30)
        for orphan in orphans:
            orphan.kill()
        assert not orphans, f"left behind: {orphans}"
        out, err = self._texts()
        return Ended(code=self.process.wait(), out=out, err=err, time=ended)

    def kill(self) -> None:
        """SIGKILL to the command and all of its processes at once, as a machine that loses power."""
        processes = self.all_processes()
        for process in processes:
            if process.is_running():
                process.send_signal(signal.SIGKILL)
        self.process.wait()
        _, alive = psutil.wait_procs(processes, timeout=30)
        assert not alive, f"alive after SIGKILL: {alive}"

    def _texts(self) -> tuple[str, str]:
        return self._out.read_text(), self._err.read_text()


def _processes() -> Iterator[tuple[int, int, int]]:
    """Process id, parent and session of each, in one look: `psutil` reads as much for the children of one."""
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                fields = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
                yield int(entry.name), int(fields[1]), int(fields[3])


_resident: list[Resident] = []
"""What commands are forked from, while `forking_from` is open."""


@contextlib.contextmanager
def forking_from(resident: Resident) -> Iterator[None]:
    """Inside, commands are forked from ``resident``."""
    _resident.append(resident)
    yield
    _resident.remove(resident)


def start(*words: str, cwd: Path, extra: Mapping[str, str] | None = None, anew: bool = False) -> Started:
    """Starts ``python -m paceline`` with ``words``.

    Args:
        words: behind the program's name.
        cwd: where it runs.
        extra: environment variables on top of this process's.
        anew: in a fresh interpreter, as its user would; else forked from one that has imported what it needs, unless
            it measures what a process holds.
    """
    return script("-m", "paceline", *words, cwd=cwd, extra=extra, anew=anew)


def script(*words: str, cwd: Path, extra: Mapping[str, str] | None = None, anew: bool = False) -> Started:
    """Starts ``python`` with ``words``: ``-m paceline ...``, or a script and its arguments. As `start`."""
    anew = anew or not _resident or "--execution.memory" in words
    resident = None if anew else _resident[-1]
    return Started([sys.executable, *words], cwd, extra, resident=resident)


def torchrun(workers: int, *words: str, cwd: Path, extra: Mapping[str, str] | None = None) -> Started:
    """Starts ``torchrun`` on this machine with so many workers: a script and its arguments. As `start`."""
    how = ("--standalone", f"--nproc_per_node={workers}")
    return script("-m", "torch.distributed.run", *how, *words, cwd=cwd, extra=extra)


def paceline(*words: str, cwd: Path, extra: Mapping[str, str] | None = None, anew: bool = False) -> Ended:
    """Runs ``python -m paceline`` with ``words`` to its end. As `start`."""
    return start(*words, cwd=cwd, extra=extra, anew=anew).wait()


def result(run_dir: Path) -> dict[str, Any]:
    """A run's ``result.json``."""
    read: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return read


def write_tiny(directory: Path, device: str) -> Path:
    """The example as it is, but for its device."""
    path = directory / TINY.name
    path.write_text(TINY.read_text().replace("recipe:\n", f"recipe:\n  device: {device}\n"))
    return path


def reached(run_dir: Path, step: int) -> bool:
    """Whether a run that logs every step has finished ``step``."""
    log = run_dir / "events.jsonl"
    return log.exists() and any(event["step"] >= step for event in read_events(log, "step"))


def wait_for(what: Callable[[], object], of: Started) -> None:
    """Until ``what`` is true. Fails when the command ends first, or at the deadline."""
    begun = time.monotonic()
    while not what():
        assert of.process.poll() is None, f"ended too early: {of.wait()}"
        assert time.monotonic() - begun < DEADLINE_S
        time.sleep(0.002)
