"""The ranks of a run as processes: started as torchrun starts them, and ended without a trace. No torch here.

[Note: nobody is left behind] Each rank leads a process group, which is killed at the end with all that it has started.
What has left the group is known by the run's id in its environment. If the doctor itself is killed, the kernel ends the
ranks (parent-death signal), and the keeper, whose link to the doctor is cut then, ends the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from paceline import env
from paceline.doctor.watching import keeper
from paceline.doctor.watching.probe import serving
from paceline.doctor.watching.records import Account, legible
from paceline.doctor.watching.scratch import Scratch, with_originals
from paceline.errors import UsageError

__all__ = ["Gpus", "Rank", "started"]

_TAIL_BYTES = 16 * 1024
_PUT_IN_ORDER_S = 10.0
"""Who is asked to end has so long to write what it has begun to write."""
_POLL_S = 0.01
_MESSAGES = 256
"""Whoever tells without end shall not keep the others, and the clock, waiting."""
Gpus = Literal["none", "mapped", "pretended"]
"""``mapped``: what is asked of GPUs is done on the CPU; ``pretended``: besides, the script is told that there are
some."""


class Rank:
    """One rank's process.

    Attributes:
        output: descriptor from which to read what it prints.
        silent: its end of the link is closed, as happens when it ends, or another program takes its place.
        stacks: the file into which it writes its stacks when asked.
    """

    def __init__(
        self, number: int, popen: subprocess.Popen[bytes], link: socket.socket, stacks: Path, moved: dict[str, str]
    ) -> None:
        from paceline.supervisor.processes import Process  # not for the ranks: their probe is inside of this package

        assert popen.stdout is not None
        self.process = Process(popen.pid, link)
        self.account = Account(rank=number)
        self.stacks = stacks
        self.output = popen.stdout.fileno()
        self._popen, self._tail, self._moved = popen, b"", moved
        self._asked = self.silent = False
        os.set_blocking(self.output, False)

    def hear(self, most: int = _MESSAGES) -> bool:
        """Takes the messages that have come, not more than ``most`` of them; whether there will be more. What it tells
        after it was asked to end is of no interest."""
        for _ in range(most):
            try:
                message = self.process.link.recv(1 << 18, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                message = b""
            if not message:
                self.silent = True
                return False
            if not self._asked:
                self.account.take(message)
        return True

    def read(self) -> bool:
        """Takes what it has printed; whether there will be more."""
        for _ in range(_MESSAGES):
            try:
                printed = os.read(self.output, 1 << 16)
            except BlockingIOError:
                return True
            if not printed:
                return False
            self._tail = (self._tail + printed)[-_TAIL_BYTES:]
        return True

    def ask_to_end(self) -> None:
        """By SIGTERM, which waits for a save (`probe.files`), and which scripts can obey in their own way."""
        self.hear(10_000)
        self._asked = True
        self.process.signal(signal.SIGTERM)

    def end(self) -> None:
        """Kills it and all it has started, unless that has happened, and takes what is left of it."""
        self.process.kill_group(signal.SIGKILL)
        self.process.wait(5.0)
        self.hear(10_000)
        self.read()
        self.account.tail = legible(with_originals(self._tail.decode(errors="replace"), self._moved))
        self._popen.returncode = self.process.reap()
        assert self._popen.stdout is not None
        self._popen.stdout.close()


@contextlib.contextmanager
def started(
    script: Path,
    arguments: Sequence[str],
    workers: int,
    scratch: Scratch,
    gpus: Gpus,
    *,
    option: str | None = None,
    comparing: Path | None = None,
) -> Iterator[list[Rank]]:
    """The ranks, as processes that run; all are ended with the context.

    Args:
        gpus: what is done about GPUs that the script names. The ranks see none.
        option: by which each is told its local rank, too; ``None``: by none.
        comparing: what `probe.comparing` is to do, as JSON; ``None``: nothing.

    Raises:
        UsageError: the machine does not let them run.
    """
    with contextlib.ExitStack() as stack:
        run_id = uuid.uuid4().hex
        keeping = stack.enter_context(_keeper(run_id, scratch.home))
        stack.callback(keeper.end_all_of, run_id)
        ranks: list[Rank] = []
        words = [*map(scratch.translated, arguments)]
        with socket.create_server(("127.0.0.1", 0)) as listener:  # the ranks' from now on: with the store it is gone
            shared = {
                "parent": os.getpid(),
                "listener": listener.fileno(),
                "home": str(scratch.home),
                "moved": scratch.originals,
                "guarded": not scratch.in_place,
                "comparing": str(comparing) if comparing is not None else None,
            }
            for number in range(workers):
                environ = _environment(number, workers, listener.getsockname()[1], run_id, scratch)
                settings = {
                    **shared,
                    "rank": number,
                    "stacks": str(scratch.home / f"stacks-{number}"),
                    "gpus": _standing_in(gpus, number, workers),
                }
                own = [str(scratch.within(script)), *([f"{option}={number}"] if option is not None else [])]
                rank = _start(number, [*own, *words], environ, settings, scratch.within(Path.cwd()))
                stack.callback(rank.end)
                _tell_keeper(keeping, rank)
                ranks.append(rank)
        if scratch.in_place:  # what they write is kept, and shall be whole
            stack.callback(_let_end, ranks)
        yield ranks
        _be_sure_of_store(scratch)


def _let_end(ranks: Sequence[Rank]) -> None:
    """Asks all to end, and waits a while until they have."""
    for rank in ranks:
        rank.ask_to_end()
    deadline_s = time.monotonic() + _PUT_IN_ORDER_S
    while any(rank.process.ended() is None for rank in ranks) and time.monotonic() < deadline_s:
        for rank in ranks:  # who is not listened to cannot go on
            rank.hear()
            rank.read()
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _keeper(run_id: str, home: Path) -> Iterator[socket.socket]:
    """The link to a new `keeper`, which needs nothing of the package."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs, _refused():
            popen = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, str(theirs.fileno()), run_id, str(home)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        try:
            yield ours
            with contextlib.suppress(OSError):
                ours.send(b"done")
        finally:
            popen.kill()
            popen.wait()


def _tell_keeper(keeping: socket.socket, rank: Rank) -> None:
    try:
        keeping.send(str(rank.process.pid).encode())
    except OSError:
        raise UsageError(
            "cannot watch over the ranks",
            found="that the helper which ends them, should the doctor be killed, has died",
            fix="Is there memory left, and may more processes be started? Try again then",
        ) from None


def _be_sure_of_store(scratch: Scratch) -> None:
    """Raises UsageError: the ranks could not meet, and what they did shows nothing."""
    with contextlib.suppress(FileNotFoundError):
        said = (scratch.home / serving.FAILED).read_text()
        raise UsageError(
            "cannot let the ranks meet",
            found=f"that torch could not serve their store: {said}",
            needed="a torch whose torch.distributed works, and a loopback interface",
            fix="Mend that, or use --static",
        )


def _start(number: int, words: list[str], environ: dict[str, str], settings: dict[str, Any], folder: Path) -> Rank:
    with contextlib.ExitStack() as on_failure, _refused():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        on_failure.enter_context(ours)
        with theirs:
            told = json.dumps({**settings, "link": theirs.fileno()})
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{__package__}.probe", told, *words],
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=[theirs.fileno(), settings["listener"]],
                process_group=0,
            )
        on_failure.pop_all()
        return Rank(number, popen, ours, Path(settings["stacks"]), settings["moved"])


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Raises UsageError: the machine starts no more processes, or not with words of such a length."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            "cannot start the ranks",
            found=str(error),
            needed="memory, processes and open files for all of them",
            fix="Give fewer --workers or shorter arguments, or use --static",
        ) from None


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
    return environ | scratch.environment(environ)
