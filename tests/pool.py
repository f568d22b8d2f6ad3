"""Jobs of several workers in real processes, kept alive until a job of theirs fails, with a deadline on everything.

A job is a function that can be imported and its arguments; it runs in the main thread of each of the first N processes,
in the environment that a launcher would give to N workers. The store where they meet is served by this process on a
loopback socket that the system chose, so that no port is drawn by lottery.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.context import ForkServerProcess

__all__ = ["Outcome", "Pool", "WorkersFailedError"]

# Forked from a clean server that has imported torch once: seconds saved for each process, and as good as spawned.
PRELOAD = ["torch", "torch._dynamo", "paceline.train"]


COMPILERS = ("tqdm_monitor", "ThreadPoolExecutor-")
"""Threads that torch's compiler keeps; Paceline starts none of these names."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended on one worker.

    Args:
        value: what it returned.
        error: class of the exception it raised, or ``died``, or ``late``; ``None`` when it returned.
        message: of the exception.
        trace: its traceback, or the stacks of a late one.
        at: when it ended, by the monotonic clock that all processes of a machine share.
    """

    rank: int
    value: Any = None
    error: str | None = None
    message: str = ""
    trace: str = ""
    at: float = 0.0


class WorkersFailedError(AssertionError):
    """A job failed: every worker's traceback, the first failure first, echoes after what they echo."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        failures = sorted((o for o in outcomes if o.error), key=lambda o: (o.error == "TeamError", o.at))
        self.failures = failures
        parts = [f"{len(failures)} of {len(outcomes)} workers failed"]
        parts += [f"--- worker {o.rank}: {o.error} {o.message}\n{o.trace}" for o in failures]
        super().__init__("\n".join(parts))


@dataclass
class _Member:
    process: ForkServerProcess
    connection: Connection
    stacks: Path


class Pool:
    """Processes for jobs; started when first needed, and again when one has failed."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._started = directory, 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._members: list[_Member] = []
        self._grow(1)  # the server too: from now on it is no test's child process

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            with suppress(OSError):
                member.connection.send(None)
        for member in self._members:
            self._end(member, patience_s=5)

    def run(self, job: Callable[..., Any], *args: Any, workers: int, deadline_s: float = 90) -> list[Any]:
        """What ``job(*args)`` returns on each of ``workers``, in rank order.

        Raises:
            WorkersFailedError: an exception, a death or a missed deadline.
        """
        outcomes = self.attempt(job, *args, workers=workers, deadline_s=deadline_s)
        if any(outcome.error for outcome in outcomes):
            raise WorkersFailedError(outcomes)
        return [outcome.value for outcome in outcomes]

    def attempt(
        self, job: Callable[..., Any], *args: Any, workers: int, deadline_s: float = 90, grace_s: float = 30.0
    ) -> list[Outcome]:
        """How ``job(*args)`` ended on each of ``workers``, in rank order; for jobs that shall fail.

        What a job has begun may take ``grace_s`` to end after it, on a busy machine too; nobody waits who need not.
        """
        self._grow(workers)
        members = self._members[:workers]
        with _launcher(workers) as environments:
            for member, environment in zip(members, environments, strict=True):
                member.connection.send((job, args, environment, grace_s))
            outcomes = self._collect(members, time.monotonic() + deadline_s)
        for rank, outcome in outcomes.items():
            if outcome.error:
                self._end(members[rank], patience_s=0 if outcome.error == "late" else 10)
                self._members.remove(members[rank])
        return [outcomes[rank] for rank in range(workers)]

    def _collect(self, members: Sequence[_Member], deadline: float) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        by_connection: dict[Any, int] = {member.connection: rank for rank, member in enumerate(members)}
        while len(outcomes) < len(members):
            waiting = [connection for connection, rank in by_connection.items() if rank not in outcomes]
            ready: list[Any] = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                for connection in waiting:
                    rank = by_connection[connection]
                    outcomes[rank] = Outcome(rank=rank, error="late", trace=_stacks(members[rank]), at=deadline)
            for connection in ready:
                rank = by_connection[connection]
                try:
                    outcomes[rank] = Outcome(rank=rank, **connection.recv())
                except EOFError:
                    members[rank].process.join(10)
                    code = members[rank].process.exitcode
                    outcomes[rank] = Outcome(rank=rank, error="died", message=f"exit code {code}", at=time.monotonic())
        return outcomes

    def _grow(self, workers: int) -> None:
        while len(self._members) < workers:
            ours, theirs = self._context.Pipe()
            self._started += 1
            stacks = self._directory / f"stacks-{self._started}"
            process = self._context.Process(target=_serve, args=(theirs, stacks), daemon=False)
            process.start()
            theirs.close()
            self._members.append(_Member(process, ours, stacks))

    @staticmethod
    def _end(member: _Member, *, patience_s: float) -> None:
        member.process.join(patience_s)
        if member.process.is_alive():
            member.process.kill()
            member.process.join(10)
        member.connection.close()


@contextmanager
def _launcher(workers: int) -> Iterator[list[dict[str, str]]]:
    """The environment of each worker; for more than one, with a store that lives as long as the block."""
    if workers == 1:
        yield [{}]
        return
    from torch import distributed

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    shared = {"WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    yield [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(workers)]
    del store


def _stacks(member: _Member) -> str:
    """The stacks of all threads of a process that works too long."""
    with suppress(ProcessLookupError):
        os.kill(member.process.pid or 0, signal.SIGUSR2)
    time.sleep(0.5)
    return member.stacks.read_text()


def _serve(connection: Connection, stacks: Path) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed test session leaves no processes
    multiprocessing.set_start_method("fork", force=True)  # the platform's, for the job's own; not the pool's
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
        while True:
            try:
                order = connection.recv()
            except EOFError:
                return
            if order is None:
                return
            outcome = _do(*order)
            connection.send(outcome)
            if "error" in outcome:  # as a worker of a launcher: its end is how the others learn of it
                return


def _do(job: Callable[..., Any], args: Sequence[Any], environment: Mapping[str, str], grace_s: float) -> dict[str, Any]:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in signals}
    os.environ.update(environment)
    outcome: dict[str, Any]
    try:
        outcome = {"value": job(*args)}
    except BaseException as error:  # every failure is the test's to see
        trace = "".join(traceback.format_exception(error))
        outcome = {"error": type(error).__name__, "message": str(error), "trace": trace}
    outcome["at"] = time.monotonic()
    for name in environment:
        del os.environ[name]
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if "error" not in outcome and (leaks := _leaks(grace_s)):
        outcome |= {"error": "leak", "message": f"the job leaves behind: {', '.join(leaks)}"}
    return outcome


def _leaks(grace_s: float) -> list[str]:
    import psutil
    from torch import distributed

    deadline = time.monotonic() + grace_s
    while True:
        threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        leaks = [f"thread {name}" for name in threads if not name.startswith(COMPILERS)]
        leaks += [f"process {child.pid}" for child in psutil.Process().children()]
        leaks += ["a process group"] if distributed.is_initialized() else []
        if not leaks or time.monotonic() > deadline:
            return leaks
        gc.collect()  # a reference cycle may hold it
        time.sleep(0.02)
