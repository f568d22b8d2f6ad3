"""The ranks of a run as processes: started as torchrun starts them, and ended without a trace. No torch here.

[Note: nobody is left behind] Each rank leads a process group, which is killed at the end with all that it has started.
If the doctor itself is killed, the kernel ends the ranks (parent-death signal), and the store's process, whose link to
the doctor is cut then, ends their groups.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from paceline import env
from paceline.doctor.watching.records import Account
from paceline.doctor.watching.scratch import Scratch
from paceline.supervisor.processes import Process

__all__ = ["Gpus", "Rank", "started"]

_TAIL_BYTES = 16 * 1024
Gpus = Literal["none", "mapped", "pretended"]
"""``mapped``: what is asked of GPUs is done on the CPU; ``pretended``: besides, the script is told that there are
some."""


class Rank:
    """One rank's process.

    Attributes:
        output: descriptor from which to read what it prints.
        stacks: the file into which it writes its stacks when asked.
    """

    def __init__(self, number: int, popen: subprocess.Popen[bytes], link: socket.socket, stacks: Path) -> None:
        assert popen.stdout is not None
        self.process = Process(popen.pid, link)
        self.account = Account(rank=number)
        self.stacks = stacks
        self.output = popen.stdout.fileno()
        self._popen, self._tail = popen, b""
        os.set_blocking(self.output, False)

    def hear(self) -> bool:
        """Takes all messages that have come; whether there will be more."""
        while True:
            try:
                message = self.process.link.recv(1 << 18, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            if not message:
                return False
            self.account.take(message)

    def read(self) -> bool:
        """Takes what it has printed; whether there will be more."""
        for _ in range(64):  # whoever prints without end shall not keep the others waiting
            try:
                printed = os.read(self.output, 1 << 16)
            except BlockingIOError:
                return True
            if not printed:
                return False
            self._tail = (self._tail + printed)[-_TAIL_BYTES:]
        return True

    def end(self) -> None:
        """Kills it and all it has started, unless that has happened, and takes what is left of it."""
        self.process.kill_group(signal.SIGKILL)
        self.process.wait(5.0)
        self.hear()
        self.read()
        self.account.tail = self._tail.decode(errors="replace")
        self._popen.returncode = self.process.reap()
        assert self._popen.stdout is not None
        self._popen.stdout.close()


@contextlib.contextmanager
def started(script: Path, arguments: Sequence[str], workers: int, scratch: Scratch, gpus: Gpus) -> Iterator[list[Rank]]:
    """The ranks, as processes that run; all are ended with the context.

    Args:
        gpus: what is done about GPUs that the script names. The ranks see none.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        guard = stack.enter_context(_store(listener))
        ranks: list[Rank] = []
        run_id = uuid.uuid4().hex
        for number in range(workers):
            environ = _environment(number, workers, listener.getsockname()[1], run_id, scratch)
            rank = _start(
                number, [str(scratch.within(script)), *arguments], environ, scratch, _standing_in(gpus, number, workers)
            )
            stack.callback(rank.end)
            guard.send(str(rank.process.pid).encode())
            ranks.append(rank)
        yield ranks


@contextlib.contextmanager
def _store(listener: socket.socket) -> Iterator[socket.socket]:
    """The process of the store; the link to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{__package__}.store", str(theirs.fileno()), str(listener.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), listener.fileno()],
                process_group=0,
            )
        try:
            yield ours
            with contextlib.suppress(OSError):
                ours.send(b"done")
        finally:
            popen.kill()
            popen.wait()


def _start(
    number: int, words: list[str], environ: dict[str, str], scratch: Scratch, gpus: dict[str, Any] | None
) -> Rank:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stacks = scratch.home / f"stacks-{number}"
    settings = {
        "parent": os.getpid(),
        "link": theirs.fileno(),
        "stacks": str(stacks),
        "scratch": str(scratch.home),
        "moved": scratch.moved,
        "gpus": gpus,
    }
    probe = [sys.executable, "-P", "-m", f"{__package__}.probe", json.dumps(settings)]
    with theirs:
        popen = subprocess.Popen(
            [*probe, *words],
            cwd=scratch.within(Path.cwd()),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
    return Rank(number, popen, ours, stacks)


def _standing_in(gpus: Gpus, rank: int, workers: int) -> dict[str, Any] | None:
    """As `probe.gpus.put_on_cpu` takes it."""
    if gpus == "none":
        return None
    return {"local_rank": rank, "ranks": workers, "pretending": gpus == "pretended"}


def _environment(rank: int, workers: int, port: int, run_id: str, scratch: Scratch) -> dict[str, str]:
    """As torchrun gives it to a rank of one machine."""
    ours = env.for_worker(rank, rank, workers, port=port, report_dir=scratch.home, restarts=0)
    environ = {name: value for name, value in ours.items() if not name.startswith("PACELINE_")}
    environ |= {
        "LOCAL_WORLD_SIZE": str(workers),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(workers),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
    }
    environ.setdefault("OMP_NUM_THREADS", "1")
    environ["CUDA_VISIBLE_DEVICES"] = ""  # the same run on every machine
    if not scratch.in_place:
        environ["TMPDIR"] = str(scratch.temporary)
    return environ
