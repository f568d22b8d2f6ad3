"""One run under chaos: started, watched, signalled from outside, and looked over afterwards. What `chaos.py` stands on.

Nothing here knows Paceline's inside: a run is a command, its process ids stand in ``workers.json``, what happened in
``events.jsonl``, and the rest is the kernel's word in ``/proc``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.events import read_events
from paceline.stacks import STACKS_SIGNAL

__all__ = [
    "ROOT",
    "BrokenPromiseError",
    "Started",
    "listeners",
    "newest_checkpoint",
    "paceline",
    "steps_of",
    "torchrun",
]

ROOT = Path(__file__).resolve().parents[1]
_MARK = "CHAOS_RUN"
_ORPHANS_S = 2.0
"""After its end, or that of its supervisor, all processes of a run must be gone within so long."""
_POLL_S = 0.002


class BrokenPromiseError(Exception):
    """A run that did not do what it should."""


def paceline(*words: str) -> list[str]:
    """The command as a user types it."""
    return [sys.executable, "-m", "paceline", *words]


def torchrun(workers: int, *words: str) -> list[str]:
    """The same under torchrun, which starts all workers again when one is lost."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc_per_node={workers}", "--max-restarts=3", *words),
    ]


class Started:
    """A command at work in a session of its own; as a context, nothing of it is left behind, whatever happens.

    Args:
        words: from the program on.
        run_dir: where its run lives; its output goes to a file beside it.
        deadline_s: for the whole command. After that it hangs, which is a `BrokenPromiseError`.
    """

    def __init__(self, words: Sequence[str], run_dir: Path, *, deadline_s: float) -> None:
        self.run_dir, self.log = run_dir, run_dir.with_suffix(".log")
        self._token = uuid.uuid4().hex
        self._deadline = time.monotonic() + deadline_s
        self._deadline_s = deadline_s
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                words,
                cwd=ROOT,
                env={**os.environ, _MARK: self._token},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_everything()
        self.process.wait()

    # What is there

    def processes(self) -> list[int]:
        """Every live process of the run, found by an environment that all of them inherit, also when orphaned."""
        found = []
        mark = f"{_MARK}={self._token}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0") and not _is_dead(entry):
                        found.append(int(entry.name))
        return found

    def workers(self) -> dict[int, int]:
        """Process id by rank, as ``workers.json`` has it; empty while it is not there."""
        try:
            told = json.loads((self.run_dir / "workers.json").read_text())
        except FileNotFoundError:
            return {}
        return {worker["rank"]: worker["pid"] for worker in told["workers"]}

    def changes(self) -> list[dict[str, Any]]:
        """What ``workers.json`` tells of losses and new generations."""
        told: list[dict[str, Any]] = json.loads((self.run_dir / "workers.json").read_text())["changes"]
        return told

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Of ``events.jsonl``; none while it is not there."""
        path = self.run_dir / "events.jsonl"
        return read_events(path, kind) if path.exists() else []

    def last_step(self) -> int:
        """Finished steps."""
        return max((event["step"] for event in self.events("step")), default=0)

    def running(self) -> bool:
        return self.process.poll() is None

    # Waiting

    def until(self, what: Callable[[], object]) -> bool:
        """Waits until ``what`` is true; false when the command ends first.

        Raises:
            BrokenPromiseError: the deadline is over.
        """
        while not what():
            if not self.running():
                return bool(what())
            self._check_deadline()
            time.sleep(_POLL_S)
        return True

    def sleep(self, seconds: float) -> bool:
        """Whether the command still runs after ``seconds``."""
        over = time.monotonic() + seconds
        return self.until(lambda: time.monotonic() > over) and self.running()

    def end(self, code: int = 0) -> None:
        """Waits for the command's end, with exit code ``code``, and that nothing of it is left behind.

        Raises:
            BrokenPromiseError: it hangs, ends otherwise, or leaves processes.
        """
        self.until(lambda: False)
        if self.process.returncode != code:
            raise BrokenPromiseError(f"exit code {self.process.returncode} instead of {code}: {self.said()}")
        self.expect_nobody()

    def expect_nobody(self) -> None:
        """That all processes are gone, soon.

        Raises:
            BrokenPromiseError: some are not; they are killed.
        """
        over = time.monotonic() + _ORPHANS_S
        while orphans := self.processes():
            if time.monotonic() > over:
                told = ", ".join(f"{pid} ({_command(pid)})" for pid in orphans)
                self.kill_everything()
                raise BrokenPromiseError(f"left behind: {told}")
            time.sleep(0.02)

    def said(self) -> str:
        """The last line of its output that tells of something wrong, or the last of all."""
        lines = self.log.read_text(errors="replace").splitlines()
        wrong = [line for line in lines if "rror" in line]
        return (wrong or lines or ["nothing"])[-1][:300]

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            stacks = self._stacks()
            path = self.run_dir.with_suffix(".stacks")
            path.write_text(stacks)
            print(stacks, file=sys.stderr)
            self.kill_everything()
            raise BrokenPromiseError(f"hangs: not ended in {self._deadline_s:.0f} s; stacks in {path}")

    def _stacks(self) -> str:
        """Of every worker: they write them to a file that they hold open, when asked by a signal."""
        texts = []
        for pid in self.processes():
            file = next((path for path in _open_files(pid) if Path(path).name.startswith("stacks-")), None)
            if file is not None:
                size = Path(file).stat().st_size
                os.kill(pid, STACKS_SIGNAL)
                time.sleep(0.5)
                texts.append(f"=== process {pid}\n{Path(file).read_text(errors='replace')[size:]}")
        return "\n".join(texts)

    # Violence

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> float:
        """Signals one process of the run; when, in unix seconds. One that has just ended is no harm."""
        at = time.time()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return at

    def kill_everything(self, known: Sequence[int] = ()) -> float:
        """SIGKILL to every process of the run, as a machine that loses power; when it began, in unix seconds.

        Args:
            known: processes of it, to save the time of looking for them first.
        """
        at, pids = time.time(), known
        while pids or (pids := self.processes()):
            for pid in sorted(pids, key=lambda pid: pid != self.process.pid):  # the one that would mend it goes first
                self.kill(pid)
            self.process.poll()
            pids = ()
        return at


def steps_of(events: Sequence[dict[str, Any]]) -> list[int]:
    """The finished steps in the order of the log. With nothing lost and nothing redone they count from 1."""
    return [event["step"] for event in events if event["event"] == "step"]


def newest_checkpoint(run_dir: Path) -> int:
    """Step of the newest one that is committed, by its name; 0: none."""
    names = [path.name for path in run_dir.glob("checkpoints/step-*") if path.name.removeprefix("step-").isdecimal()]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def listeners(pids: Sequence[int]) -> list[str]:
    """Addresses on which these processes listen, from the kernel's table: ``127.0.0.1:80`` or ``[::]:80``."""
    inodes = set()
    for pid in pids:
        inodes |= {path[8:-1] for path in _open_files(pid) if path.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(_address(fields[1]))
    return sorted(found)


def _address(text: str) -> str:
    """``0100007F:1F90`` as people write it: the kernel prints each 32 bits in this machine's byte order."""
    host, port = text.split(":")
    raw = b"".join(int(host[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(host), 8))
    address = ipaddress.ip_address(raw)
    return f"[{address}]:{int(port, 16)}" if address.version == 6 else f"{address}:{int(port, 16)}"


def _open_files(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(str(link.readlink()))
    return found


def _is_dead(entry: Path) -> bool:
    return entry.joinpath("stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
    return "?"
