"""The communication thread: see [Note: one thread issues all collectives] in `paceline.team.team`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

from paceline.determinism import configure_thread
from paceline.errors import UsageError
from paceline.pulse import Pulse

__all__ = ["JobThread", "Pending"]

T = TypeVar("T")


class Pending(Generic[T]):
    """A job given to the communication thread."""

    def __init__(self, future: Future[T], pulse: Pulse, done: torch.cuda.Event | None = None) -> None:
        self._future, self._pulse, self._done = future, pulse, done

    def wait(self) -> T:
        """The job's result; raises what the job raised. On CUDA the current stream then waits for the job's stream."""
        before = self._pulse.enter("wait")
        try:
            result = self._future.result()
        finally:
            self._pulse.enter(before)
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        return result


class JobThread:
    """Runs jobs one after the other.

    A daemon thread, which no executor of the standard library has: after a failure the interpreter must be able to end
    although a job still waits for a worker that may never answer.
    """

    def __init__(self, threads: int) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(threads,), name="paceline-communication", daemon=True)
        self._thread.start()
        self._closed = False
        self._last: Future[Any] | None = None

    def submit(self, job: Callable[[], T]) -> Future[T]:
        if self._closed:  # nobody would ever answer
            raise UsageError(
                "cannot call the team",
                found="a run that has ended",
                needed="all calls before its end",
                fix="Move the call before run.close(), or into the block of `with Run(...)`",
            )
        future: Future[T] = Future()
        self._queue.put((future, job))
        self._last = future
        return future

    @property
    def idle(self) -> bool:
        """Whether all jobs have ended."""
        return self._last is None or self._last.done()

    def close(self) -> None:
        """Returns when all jobs are done and the thread has ended."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _run(self, threads: int) -> None:
        configure_thread(threads)
        broken: BaseException | None = None
        while (item := self._queue.get()) is not None:
            future, job = item
            try:
                if broken is not None:
                    raise broken
                future.set_result(job())
            except BaseException as error:  # raised where somebody waits for it
                broken = error
                future.set_exception(error)
            del item, future, job  # or the last job would keep its tensors alive
