"""The workers of a run: one object owns all communication, with three bodies. The only user of torch.distributed.

`SoloTeam` is one worker alone, `TorchTeam` a process group (gloo or nccl), `ThreadTeam` threads of one process for
tests. Pass the team in; nobody looks it up.

[Note: one thread issues all collectives] Two threads that issue collectives on one group pair up with the wrong ones of
the other workers: silent wrong sums. So every team has one communication thread. `Team.submit` hands it a job, jobs run
in order, and every worker must submit the same jobs in the same order. The methods marked *in a job* may be called only
there; `gather` and `barrier` are whole jobs, for any other thread, and wait. After a job has failed the team is broken:
jobs behind it would meet the wrong ones of the others, so they fail with the same error.

[Note: every call opens with its name] A collective under ``if run.is_main``, or a loop that one worker has left, pairs
one call with another: a hang, or silently wrong values. So each call of a run, a step or a gather, opens with one small
collective of one size (`Team.open`) that carries the call's name and place. The step's table of losses and the sizes of
gathered values ride on it: it costs nothing that was not sent before. All workers see a difference, and all raise.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import pickle
import queue
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # first imported after init_process_group it would keep the group alive at exit
from torch import Tensor

from paceline.determinism import configure_thread
from paceline.env import WorkerEnv
from paceline.errors import TeamError, UsageError

__all__ = ["Pending", "SoloTeam", "Team", "ThreadTeam", "TorchTeam"]

T = TypeVar("T")
_LOST = object()
_CALL_BYTES = 240
"""Of the name of a call that are shown."""
_ROOM = 128
"""Before a recipe is known: enough for a step's table with 64 lanes a worker."""


class Pending(Generic[T]):
    """A job given to the communication thread."""

    def __init__(self, future: Future[T], done: torch.cuda.Event | None = None) -> None:
        self._future, self._done = future, done

    def wait(self) -> T:
        """The job's result; raises what the job raised. On CUDA the current stream then waits for the job's stream."""
        result = self._future.result()
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        return result


class _JobThread:
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


class Team(ABC):
    """Workers that train together: ``rank`` of ``world_size``, on ``device``.

    Args:
        threads: torch threads of the communication thread, which adds gradients.

    Attributes:
        room: how many numbers may ride on the opening of a call. The same on every worker, always: so it follows from
            the recipe only after all have agreed on one.
        within: the step whose loop over micro-batches is at work, where nothing is called: workers have other numbers.
    """

    def __init__(self, *, rank: int, world_size: int, local_rank: int, device: torch.device, threads: int) -> None:
        self.rank, self.world_size, self.local_rank, self.device = rank, world_size, local_rank, device
        self.room = _ROOM
        self.within: str | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs = _JobThread(threads)

    def submit(self, job: Callable[[], T]) -> Pending[T]:
        """Runs ``job`` in the communication thread after those before it (on CUDA: on its stream, after all work queued
        on the current stream so far). Collective if the job is."""
        if self._stream is None:
            return Pending(self._jobs.submit(job))
        ready, done, stream = torch.cuda.Event(), torch.cuda.Event(), self._stream
        ready.record()

        def on_stream() -> T:
            torch.cuda.set_device(self.device)
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                result = job()
                done.record()
                return result

        return Pending(self._jobs.submit(on_stream), done)

    @abstractmethod
    def swap(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Callable[[], None]:
        """*In a job.* Starts sending tensors to ranks and receiving from ranks; what it returns waits for all of them.

        Between two ranks tensors arrive in the order in which they were sent. Contiguous, of the team's device.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """*In a job.* The sum over workers, in place, in whatever order the backend likes."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """*In a job.* ``tensor`` of every worker, stacked: shape ``(world_size, *tensor.shape)``."""

    def open(self, call: str, numbers: Tensor) -> Tensor:
        """*In a job.* Begins a call of the whole team: see [Note: every call opens with its name].

        Args:
            call: what this worker is about to do and where, the same on every worker.
            numbers: float64, 1-dim, at most ``room`` of them, of one length for one call.

        Returns:
            Everybody's ``numbers``, shape ``(world_size, len(numbers))``.

        Raises:
            UsageError: on every worker, when some are about to do something else.
        """
        if len(numbers) > self.room:
            raise AssertionError(f"{len(numbers)} numbers in a room for {self.room}")
        row = torch.zeros(1 + self.room, dtype=torch.float64, device=self.device)
        row[0] = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=6).digest(), "little")  # exact as a float
        row[1 : 1 + len(numbers)] = numbers
        rows = self.all_gather(row)
        if bool((rows[:, 0] != rows[0, 0]).any()):
            self._refuse_to_mix(call)
        return rows[:, 1 : 1 + len(numbers)]

    def _refuse_to_mix(self, call: str) -> None:
        text = call.encode()[:_CALL_BYTES].ljust(_CALL_BYTES)
        texts = self.all_gather(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)).cpu()
        calls = [bytes(row.tolist()).decode(errors="replace").strip() for row in texts]
        first = next(rank for rank, theirs in enumerate(calls) if theirs != calls[0])
        raise UsageError(
            "the workers have parted",
            found=f"worker 0 in {calls[0]}, worker {first} in {calls[first]}",
            needed="the same calls on every worker, in the same order",
            fix="Take calls of the run out of `if run.is_main`, and leave a loop over run.steps on all workers or none",
        )

    def _gather_packed(self, packed: bytes, call: str) -> list[Any]:
        """*In a job.* What was ``packed`` on every worker, in rank order."""
        mine = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(self.device)
        sizes = self.open(call, torch.tensor([len(mine)], dtype=torch.float64, device=self.device))[:, 0]
        padded = mine.new_zeros(int(sizes.max()))
        padded[: len(mine)] = mine
        rows = self.all_gather(padded).cpu().numpy()
        return [pickle.loads(row[: int(size)].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def gather(self, value: T, call: str = "gather") -> list[T]:
        """A picklable value from every worker, in rank order. Collective; waits.

        Args:
            call: the name under which it opens; what this is part of, and where.

        Raises:
            UsageError: it cannot be pickled.
        """
        self._refuse_within(call)
        try:
            packed = _packed(value)
        except Exception as error:  # whatever the value's own methods raise
            raise UsageError(
                "cannot gather from the workers",
                found=f"{type(value).__name__}: {error}",
                needed="something that can be pickled",
                fix="Gather numbers, text, tensors, or lists and dicts of them",
            ) from error
        return self.submit(lambda: self._gather_packed(packed, call)).wait()

    def _refuse_within(self, call: str) -> None:
        if self.within is not None:
            raise UsageError(
                f"cannot call {call} here",
                found=f"the loop over the micro-batches of {self.within}",
                needed="calls of the run outside of it: workers have different numbers of micro-batches",
                fix="Move the call behind the loop",
            )

    def barrier(self, call: str = "barrier") -> None:
        """Returns when every worker has called it. Collective."""
        self.gather(None, call)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites ``tensors``, of whatever strides, with worker 0's. Collective; waits."""

        def job() -> None:
            full = [tensor for tensor in tensors if tensor.numel()]
            packed = [tensor.contiguous() for tensor in full]  # the tensor itself, unless its strides are others
            if self.rank == 0:
                self.swap([(rank, tensor) for tensor in packed for rank in range(1, self.world_size)], [])()
                return
            self.swap([], [(0, tensor) for tensor in packed])()
            for tensor, received in zip(full, packed, strict=True):
                if received is not tensor:
                    tensor.copy_(received)

        self.submit(job).wait()

    def close(self) -> None:
        """Ends the communication thread, then the group, in that order: torch aborts at exit otherwise."""
        self._jobs.close()

    def leave(self) -> None:
        """Closes, unless a job is at work that waits for workers which may wait for this one."""
        if self.world_size == 1 or self._jobs.idle:
            self.close()


class SoloTeam(Team):
    """One worker, no process group. The communication thread still adds lanes, beside the backward."""

    def __init__(self, device: torch.device, threads: int = 1) -> None:
        super().__init__(rank=0, world_size=1, local_rank=0, device=device, threads=threads)

    def swap(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Callable[[], None]:
        if sends or receives:
            raise AssertionError("a worker alone has nobody to send to")
        return lambda: None

    def all_reduce(self, tensor: Tensor) -> None:
        pass

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)

    def gather(self, value: T, call: str = "gather") -> list[T]:
        self._refuse_within(call)
        return self.submit(lambda: [value]).wait()


class TorchTeam(Team):
    """Processes joined by torch.distributed: gloo on CPU, nccl on CUDA (nccl: written with care, not yet run).

    Args:
        env: this worker's place, from its launcher.
        timeout_s: seconds after which a wait for another worker is an error.
    """

    def __init__(self, env: WorkerEnv, device: torch.device, *, threads: int, timeout_s: float) -> None:
        if dist.is_initialized():
            raise UsageError(
                "cannot join the team",
                found="a process group in this process already",
                needed="one at a time",
                fix="Call run.close() before the next paceline.Run, and leave out torch.distributed.init_process_group",
            )
        super().__init__(
            rank=env.rank,
            world_size=env.world_size,
            local_rank=env.local_rank,
            device=device,
            threads=threads,
        )
        self._timeout_s = timeout_s
        timeout = datetime.timedelta(seconds=timeout_s)
        with self._reaching():
            store = dist.TCPStore(  # type: ignore[attr-defined]
                env.master_addr,
                env.master_port,
                env.world_size,
                is_master=env.rank == 0 and not env.store_hosted,
                timeout=timeout,
                wait_for_workers=False,
            )
            # A restarted launch, or a second run in these processes, meets the same store again: its keys must be new.
            made = store.add(f"paceline/{env.restarts}/teams of {env.rank}", 1)
            name = f"paceline/{env.restarts}/{made}"
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                device_id=device if device.type == "cuda" else None,
                store=dist.PrefixStore(name, store),  # type: ignore[attr-defined]
                rank=env.rank,
                world_size=env.world_size,
                timeout=timeout,
            )

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Around calls of torch.distributed only: elsewhere a RuntimeError is a bug, here it is a lost worker."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            raise TeamError(
                f"worker {self.rank} lost touch with the others",
                found=_cause(error),
                needed=f"all {self.world_size} workers alive and answering within {self._timeout_s:g} s",
                fix="Look for the first worker that failed, or raise execution.timeout_s",
            ) from error

    def swap(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Callable[[], None]:
        if not sends and not receives:
            return lambda: None
        ops = [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in sends]
        ops += [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in receives]
        with self._reaching():
            works = dist.batch_isend_irecv(ops)

        def wait() -> None:
            with self._reaching():
                for work in works:
                    work.wait()

        return wait

    def all_reduce(self, tensor: Tensor) -> None:
        with self._reaching():
            dist.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        with self._reaching():
            dist.all_gather_single(gathered.view(-1), tensor.contiguous().view(-1))
        return gathered

    def close(self) -> None:
        super().close()
        if dist.is_initialized():
            dist.destroy_process_group()


class _Pickler(pickle.Pickler):
    """Pickles tensors by their bytes: a tenth of the time that torch's own way takes for small ones."""

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided
        if not plain or value.requires_grad or value.is_quantized:
            return NotImplemented
        flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
        return _tensor, (flat.view(torch.uint8).numpy().tobytes(), value.dtype, value.shape)


def _tensor(data: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _packed(value: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def _cause(error: BaseException) -> str:
    """The first sentence of what torch says, without the line of its source."""
    line = re.sub(r"^\[[^\]]*\] *", "", str(error).strip().splitlines()[0])
    return re.split(r"\. (?=[A-Z])|\.$", line)[0]


class ThreadTeam(Team):
    """Workers as threads of one process, over queues: the same calls without processes. Made by `ThreadTeam.of`."""

    def __init__(self, rank: int, world_size: int, mail: dict[tuple[int, int], queue.Queue[Any]]) -> None:
        super().__init__(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            device=torch.device("cpu"),
            threads=torch.get_num_threads(),
        )
        self._mail = mail

    @classmethod
    def of(cls, world_size: int) -> list[ThreadTeam]:
        """One team member for each of ``world_size`` threads."""
        mail: dict[tuple[int, int], queue.Queue[Any]] = {
            (a, b): queue.Queue() for a in range(world_size) for b in range(world_size)
        }
        return [cls(rank, world_size, mail) for rank in range(world_size)]

    def _post(self, rank: int, value: Any) -> None:
        self._mail[self.rank, rank].put(value)

    def _take(self, rank: int) -> Any:
        try:
            value = self._mail[rank, self.rank].get(timeout=30)
        except queue.Empty:
            value = _LOST
        if value is _LOST:
            self._mail[rank, self.rank].put(_LOST)  # for whatever else waits for that worker
            raise TeamError(f"worker {self.rank} lost touch with worker {rank}")
        return value

    def swap(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Callable[[], None]:
        for rank, tensor in sends:
            self._post(rank, tensor.clone())

        def wait() -> None:
            for rank, tensor in receives:
                tensor.copy_(self._take(rank))

        return wait

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(self.all_gather(tensor).sum(0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        for rank in range(self.world_size):
            self._post(rank, tensor.clone())
        return torch.stack([self._take(rank) for rank in range(self.world_size)])

    @staticmethod
    def run(world_size: int, work: Callable[[Team], T], timeout_s: float = 60.0) -> list[T]:
        """Runs ``work(team)`` in one thread per worker and returns the results in rank order.

        Raises:
            The first exception by time, an echo (`TeamError`) only when there is nothing else.
        """
        teams = ThreadTeam.of(world_size)
        results: dict[int, T] = {}
        failures: list[BaseException] = []

        def body(team: ThreadTeam) -> None:
            configure_thread(1)
            try:
                results[team.rank] = work(team)
            except BaseException as error:  # every failure of a thread must reach the caller
                failures.append(error)
                for rank in range(world_size):
                    team._post(rank, _LOST)

        threads = [threading.Thread(target=body, args=(team,), daemon=True) for team in teams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
        for team in teams:
            team.close()
        if failures:
            raise next((error for error in failures if not isinstance(error, TeamError)), failures[0])
        if len(results) < world_size:
            raise TeamError(
                "cannot finish", found=f"workers {sorted(set(range(world_size)) - set(results))} still at work"
            )
        return [results[rank] for rank in range(world_size)]
