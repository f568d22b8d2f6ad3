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

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.faults import Faults, Place
from paceline.pulse import Pulse
from paceline.team.jobs import JobThread, Pending
from paceline.team.packing import packed, unpacked

__all__ = ["SoloTeam", "Team", "sendable"]

T = TypeVar("T")
_CALL_BYTES = 240
"""Of the name of a call that are shown."""
_ROOM = 128
"""Before a recipe is known: enough for a step's table with 64 lanes a worker."""


class Team(ABC):
    """Workers that train together: ``rank`` of ``world_size``, on ``device``.

    Args:
        threads: torch threads of the communication thread, which adds gradients.

    Attributes:
        room: how many numbers may ride on the opening of a call. The same on every worker, always: so it follows from
            the recipe only after all have agreed on one.
        within: the step whose loop over micro-batches is at work, where nothing is called: workers have other numbers.
        in_step: a step is at work: what fails in it is not done again by itself, but with the whole step.
        pulse: where this worker says what it is doing.
        faults: those to rehearse, each once: marked in the directory ``fault_marks``.
        replaying: this worker takes the place of a lost one, and is told what the others' calls gave so far.
        candidate: another worker waits to be let in at the end of a step.
        formed: how often the team has been formed anew: ranks may be others each time.
        calls: how many calls and steps of this run the team has completed.
    """

    replaying = False
    candidate = False

    def __init__(self, *, rank: int, world_size: int, local_rank: int, device: torch.device, threads: int) -> None:
        self.rank, self.world_size, self.local_rank, self.device = rank, world_size, local_rank, device
        self.room = _ROOM
        self.within: str | None = None
        self.in_step = False
        self.pulse = Pulse(None)
        self.faults = Faults()
        self.fault_marks: Path | None = None
        self.calls = self.formed = 0
        self._threads = threads
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs = JobThread(threads)

    def submit(self, job: Callable[[], T]) -> Pending[T]:
        """Runs ``job`` in the communication thread after those before it (on CUDA: on its stream, after all work queued
        on the current stream so far). Collective if the job is."""
        if self._stream is None:
            return Pending(self._jobs.submit(job), self.pulse)
        ready, done, stream = torch.cuda.Event(), torch.cuda.Event(), self._stream
        ready.record()

        def on_stream() -> T:
            torch.cuda.set_device(self.device)
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                result = job()
                done.record()
                return result

        return Pending(self._jobs.submit(on_stream), self.pulse, done)

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

    def _gather_bytes(self, mine: bytes, call: str) -> list[bytes]:
        """*In a job.* Everybody's bytes, in rank order."""
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
        sizes = self.open(call, torch.tensor([len(sent)], dtype=torch.float64, device=self.device))[:, 0]
        padded = sent.new_zeros(int(sizes.max()))
        padded[: len(sent)] = sent
        rows = self.all_gather(padded).cpu().numpy()
        return [row[: int(size)].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def gather(self, value: T, call: str = "gather") -> list[T]:
        """A picklable value from every worker, in rank order. Collective; waits.

        Args:
            call: the name under which it opens; what this is part of, and where.

        Raises:
            UsageError: it cannot be pickled.
        """
        return self.agree(lambda: value, call)

    def agree(self, make: Callable[[], T], call: str) -> list[T]:
        """What ``make`` gives on every worker, in rank order. Collective; waits.

        When a worker is lost meanwhile ``make`` is called again: what it gives may depend on the team. It is not called
        at all where others have completed this call already, nor where a replacement repeats it.

        Raises:
            UsageError: it cannot be pickled.
        """
        self._refuse_within(call)
        mine = sendable(make())
        everyone = self.submit(lambda: self._gather_bytes(mine, call)).wait()
        return [unpacked(theirs) for theirs in everyone]

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

    def check(self) -> None:
        """Raises `StepAbandoned` when a worker was lost: what is being computed will be done again. Not collective."""

    def reform(self) -> None:
        """After `StepAbandoned`: joins those that are left, and is at one with them. Collective."""
        raise AssertionError("this team cannot go on without a worker")

    def spoiled(self, why: str) -> None:
        """Before `reform`: this worker's state is that of no step. Not collective."""

    def step_done(self) -> None:
        """A step has happened."""
        self.calls += 1

    def enter_loop(self) -> bool:
        """The loop over the steps begins: a worker that takes a lost one's place waits here until it is let in.

        Returns:
            Whether there is a loop left to take part in.
        """
        return True

    def leave_loop(self) -> None:
        """The loop over the steps has ended."""

    def admit(self) -> None:
        """Between two steps, when all know of a `candidate`: takes it in. Collective."""

    def spread_stop(self, exit_code: int) -> None:
        """Tells the other workers at once that this one was asked to stop. Safe in a signal handler; not collective."""

    def fire(self, place: Place, *, step: int | None = None, lane: int | None = None) -> None:
        """Here a rehearsed fault may strike. Not collective."""
        self.faults.fire(place, worker=self.rank, step=step, lane=lane, once=self.fault_marks)

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

    def agree(self, make: Callable[[], T], call: str) -> list[T]:
        self._refuse_within(call)
        value = make()
        return self.submit(lambda: [value]).wait()


def sendable(value: Any) -> bytes:
    """``value`` packed. Raises `UsageError` for what cannot be pickled."""
    try:
        return packed(value)
    except Exception as error:  # whatever the value's own methods raise
        raise UsageError(
            "cannot gather from the workers",
            found=f"{type(value).__name__}: {error}",
            needed="something that can be pickled",
            fix="Gather numbers, text, tensors, or lists and dicts of them",
        ) from error
