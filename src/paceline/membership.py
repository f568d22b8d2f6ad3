"""A team that goes on when workers are lost, and takes in new ones: generations, meeting, and the copy of state.

A loss ends in `StepAbandoned`, in whatever job meets it first. Who runs into it calls `FailoverTeam.reform`, or
`agree` does: leave the group, wait for the supervisor to publish the next generation, meet the others at its door,
connect, and be at one.

[Note: at one] Calls of the run and steps are numbered alike on every worker, and each begins with an exchange among
all. So workers are at most one apart, and whoever has completed most is right: it hands the result of that call to
those behind, or the state after that step. That state counts for nothing on a receiver before its digest matches: a
source may die in the middle of the copy. The step or call at work is then done again by all.

[Note: who joins] A worker that takes a lost one's place runs the user's program from its beginning. Until the loop over
the steps, the results of calls come from the records that worker 0 leaves in a directory; there it waits. The others
learn of it by a value that a step reduces anyway, so that all let it in between the same two steps. Loops that the
others have left already are empty for it, as for a run that is resumed at its end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.config import Execution, Recipe
from paceline.env import WorkerEnv
from paceline.errors import StepAbandoned, TeamError, UsageError
from paceline.link import Generation, Link
from paceline.pulse import Pulse
from paceline.records import Records
from paceline.stacks import dump_on_signal
from paceline.team import SoloTeam, Team, TorchTeam
from paceline.team.jobs import JobThread
from paceline.team.packing import packed, packed_apart, unpacked, unpacked_apart
from paceline.team.processes import refuse_second_group
from paceline.team.sockets import cut, open_sockets
from paceline.team.team import sendable

__all__ = ["FailoverTeam", "State", "join"]

T = TypeVar("T")

_POLL_S = 0.02
_CONNECT_S = 3.0
"""All stand at the door when they are told to connect."""
_KEYS = "paceline/meeting "
"""Before its number, in the names of keys in the store."""
_ENTERED, _LEFT = "the loop over the steps", "the end of the loop over the steps"
"""In place of a call's name."""


class State(Protocol):
    """What a worker that is behind, or new, takes over from one that is ahead."""

    @property
    def position(self) -> int:
        """Finished steps."""

    def pack(self) -> Any:
        """Picklable values, with tensors that are not copied."""

    def unpack(self, packed: Any) -> None:
        """Takes over what another worker has packed."""

    def digest(self) -> str:
        """Of all that trains, as it is now."""

    def changes(self) -> Changes:
        """Of all that trains, so far."""


class Changes(Protocol):
    """What has been changed, and how often."""

    def since(self, before: Any) -> bool:
        """Whether there were more."""


class FailoverTeam(TorchTeam):
    """One worker of a team under Paceline's supervisor. Joining is collective, except for a replacement.

    Args:
        env: this worker's place, from the supervisor.
        link: begins to hear of generations when it is given here.
        timeout_s: the others must answer within.
        settings: what the supervisor should know of the run.

    Attributes:
        generation: of which the group of this team is.
        state: set by the run before its first step.
        begun_again: the first generation and the seconds since its cause, when no worker of the team before was left.
        on_formed: called when a generation has formed, before what was at work is done again, with the seconds from
            its cause.
    """

    def __init__(
        self,
        env: WorkerEnv,
        device: torch.device,
        *,
        threads: int,
        timeout_s: float,
        settings: dict[str, Any],
        on_stop: Callable[[int], None],
    ) -> None:
        assert env.link is not None and env.report_dir is not None
        refuse_second_group()
        Team.__init__(self, rank=0, world_size=1, local_rank=env.local_rank, device=device, threads=threads)
        self._env, self._timeout_s = env, timeout_s
        self.state: State | None = None
        self.on_formed: Callable[[Generation, float], None] | None = None
        self.generation: Generation | None = None
        self._member, self._records = env.member, Records(env.report_dir / "records")
        self._group_of: int | None = None  # number of the generation whose group is open, or being opened
        self._others: dict[int, str] = {}  # sockets that were open before it
        self._own: dict[int, str] | None = None  # its own; None: they are being opened
        self._abandoned = False
        self._valid, self._in_loop = True, False
        self._spoiled_by = "no worker with a whole state is left"
        self._last: list[bytes] | None = []
        """What the last call gave; ``None``: that was a step."""
        self._after_step: Changes | None = None
        self.pulse = Pulse(env.report_dir / f"pulse-{env.member}")
        self._link = Link(
            env.link,
            self.pulse,
            on_generation=self._on_generation,
            on_stop=on_stop,
            on_stacks=dump_on_signal(env.report_dir / f"stacks-{env.member}"),
            on_beat=self._cut_again,
        )
        self._link.send("hello", **settings)
        first = self._link.await_generation(None, timeout_s)
        self.begun_again: tuple[Generation, float] | None = None
        if self._member in first.members:
            self.reform()
            if first.began_s:
                self.begun_again = first, round(time.monotonic() - first.began_s, 3)
        else:
            self.replaying, self._valid = True, False
            self.rank, self.world_size = len(first.members), len(first.members) + 1

    @property
    def candidate(self) -> bool:  # type: ignore[override]
        """Another worker waits to be let in at the end of a step."""
        return self._link.candidate

    # Calls of the whole team

    def agree(self, make: Callable[[], T], call: str) -> list[T]:
        self._refuse_within(call)
        if self.in_step:
            return super().agree(make, call)
        if self.replaying:
            return [unpacked(theirs) for theirs in self._records.replay(call, self.pulse)]
        calls = self.calls
        while self.calls == calls:
            try:
                self._last = self._attempt(make, call)
                self.calls += 1
            except StepAbandoned:
                self.reform()  # which may complete it, by what others have
        everyone = self._last or []
        if not self._in_loop:
            self._records.add(call, everyone, write=self.rank == 0)
        return [unpacked(theirs) for theirs in everyone]

    def _attempt(self, make: Callable[[], object], call: str) -> list[bytes]:
        self.pulse.call(call)
        mine = sendable(make())
        return self.submit(lambda: self._gather_bytes(mine, call)).wait()

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """As `Team.broadcast`; torn by a loss, it can only be begun again with the whole run."""
        if self.replaying:
            return  # the whole state will be copied
        try:
            super().broadcast(tensors)
        except StepAbandoned:
            assert self.generation is not None
            self._link.await_generation(self.generation.number, self._timeout_s)  # it was a loss, and no failure
            self._begin_again("a worker was lost while worker 0 handed out its weights")

    def step_done(self) -> None:
        super().step_done()
        assert self.state is not None
        self._last, self._after_step = None, self.state.changes()

    def spoiled(self, why: str) -> None:
        self._valid, self._spoiled_by = False, why

    def spread_stop(self, exit_code: int) -> None:
        self._link.send("stop", exit_code=exit_code)

    def check(self) -> None:
        if self._abandoned:
            raise StepAbandoned

    # The loop over the steps

    def enter_loop(self) -> bool:
        if self.replaying:
            self.pulse.enter("join")
            self._records.replay(_ENTERED, self.pulse)
            return self._wait_to_be_let_in()
        self._records.add(_ENTERED, [], write=self.rank == 0)
        self._in_loop = True
        return True

    def leave_loop(self) -> None:
        if self._in_loop:
            self._in_loop = False
            assert self.state is not None
            self._records.add(_LEFT, [], write=self.rank == 0)

    def admit(self) -> None:
        before = self.generation
        self.barrier("the next step")  # all have come here
        if self.generation is before and before is not None:  # else a worker was lost, and the others step on already
            self._link.send("admit", number=before.number)
            self.reform()

    def _wait_to_be_let_in(self) -> bool:
        """Whether this worker was; false when the others have left the loop."""
        waiting = False
        while not self._link.is_in(self._member):
            if self._records.peek() == _LEFT:
                self._records.replay(_LEFT, self.pulse)
                if waiting:
                    self._link.send("unwait")
                return False
            if not waiting:
                self._link.send("wait")
                waiting = True
            time.sleep(_POLL_S)
        self.fire("join", step=self._step())
        self._in_loop = True
        self.reform()
        return True

    # Alone, after losses, there is no group

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0) if self.world_size == 1 else super().all_gather(tensor)

    def all_reduce(self, tensor: Tensor) -> None:
        if self.world_size > 1:
            super().all_reduce(tensor)

    # Membership

    def reform(self) -> None:
        """Leaves what is left of the group, and returns when this worker is at one with the others in the newest
        generation: with other ranks, perhaps more `calls`, and after `on_formed`. Collective.

        Raises:
            TeamError: the run is over, or the others do not come within the timeout.
        """
        before = self.pulse.enter("wait")
        after = None if self.generation is None else self.generation.number
        while True:
            self._leave_group()
            generation = self._link.await_generation(after, self._timeout_s)
            if self._member not in generation.members:
                raise TeamError(
                    "this worker was given up",
                    found=generation.told,
                    needed="a worker that answers",
                    fix="See the supervisor's message",
                )
            self._link.send("ready", number=generation.number)
            meeting = self._link.await_go(generation, self._timeout_s)
            if meeting is None:
                continue
            after = generation.number
            try:
                self._meet(generation, f"{_KEYS}{meeting}")
                self._be_at_one()
            except StepAbandoned:
                continue
            break
        self._link.send("met", number=generation.number)
        self.generation, self.replaying = generation, False
        self.formed += 1
        self._records.catch_up(write=self.rank == 0)
        if self.on_formed is not None:
            self.on_formed(generation, round(time.monotonic() - generation.began_s, 3))
        self.pulse.enter(before)

    def _meet(self, generation: Generation, name: str) -> None:
        """Connects with the others of ``generation``, in the group ``name``, and returns when all have."""
        self.rank, self.world_size = generation.members.index(self._member), len(generation.members)
        self.fire("reform", step=self._step())
        self._abandoned = False
        self._others, self._own, self._group_of = open_sockets(), None, generation.number
        if self._link.superseded(generation.number):  # before there was anything to cut
            raise StepAbandoned
        if self.world_size > 1:
            with self._reaching():
                store = self._store()
                self._connect(store, name, min(_CONNECT_S, self._timeout_s))
        self._own = self._opened()
        self.submit(lambda: self.all_gather(torch.zeros(1, device=self.device))).wait()
        if self.world_size > 1 and self.rank == 0:
            with self._reaching():
                for key in store.list_keys():
                    if _KEYS in key and not key.startswith(name):
                        store.delete_key(key)

    def _be_at_one(self) -> None:
        """See [Note: at one]. Every method of the exchange runs as a job; a loss in it is one more `StepAbandoned`."""
        mine = torch.tensor([self._valid, self.calls], dtype=torch.float64, device=self.device)
        rows = self.submit(lambda: self.all_gather(mine)).wait().tolist()
        source, behind = _who_gives(rows)
        if source is None:
            self._begin_again(self._spoiled_by)
        elif behind and self.rank == source:
            self._give(behind, whole=all(rows[rank][0] for rank in behind))
        elif self.rank in behind:
            self._take(source)
        if behind:
            self.submit(lambda: self.all_gather(mine)).wait()  # nobody goes on before all are whole

    def _give(self, receivers: list[int], *, whole: bool) -> None:
        """Args: whole: all receivers have a state of their own, which is right unless the last call was a step."""
        given: dict[str, Any] = {"calls": self.calls, "last": self._last, "state": None, "digest": None}
        if self._in_loop and self.state is not None and not (whole and self._last is not None):
            if self._last is None and self._after_step is not None and self.state.changes().since(self._after_step):
                self._begin_again("the code between two steps had changed tracked state that others lack")
            given |= {"state": self.state.pack(), "digest": self.state.digest()}
        data, tensors = packed_apart(given)
        tensors = [tensor.contiguous() for tensor in tensors]
        header = packed((data, [(tensor.dtype, tensor.shape) for tensor in tensors]))
        parcel = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(self.device)
        size = torch.tensor([len(parcel)], device=self.device)
        full = [tensor.to(self.device) for tensor in tensors if tensor.numel()]
        self.fire("copy", step=self._step())
        sends = [(rank, one) for one in (size, parcel, *full) for rank in receivers]
        self.submit(lambda: self.swap(sends, [])()).wait()

    def _take(self, source: int) -> None:
        def receive(tensors: list[Tensor]) -> list[Tensor]:
            self.submit(lambda: self.swap([], [(source, tensor) for tensor in tensors if tensor.numel()])()).wait()
            return tensors

        (size,) = receive([torch.zeros(1, dtype=torch.int64, device=self.device)])
        (parcel,) = receive([torch.empty(int(size), dtype=torch.uint8, device=self.device)])
        data, kinds = unpacked(parcel.cpu().numpy().tobytes())
        tensors = receive([torch.empty(shape, dtype=dtype, device=self.device) for dtype, shape in kinds])
        self.fire("copy", step=self._step())
        given = unpacked_apart(data, tensors)
        if not self._valid and given["state"] is None:
            self._begin_again(self._spoiled_by)
        if given["state"] is not None and (given["last"] is None or not self._valid):
            assert self.state is not None
            self._valid = False
            self.state.unpack(given["state"])
            if self.state.digest() != given["digest"]:
                raise UsageError(
                    "cannot take over the state of another worker",
                    found="another state after it was loaded",
                    needed="objects whose load_state_dict takes over all that their state_dict gives",
                    fix="Look at the objects of your own that are tracked",
                )
            self._valid, self._after_step = True, self.state.changes()
        self.calls, self._last = given["calls"], given["last"]

    def _step(self) -> int:
        """The one at work, from 1."""
        return 1 if self.state is None else self.state.position + 1

    def _leave_group(self) -> None:
        """Cuts the group's connections first: the others then wait no longer, see [Note: why sockets are cut]."""
        self._cut()
        self._jobs.close()
        with contextlib.suppress(RuntimeError):  # of a group that is in pieces
            self._destroy()
        self._group_of = None
        self._jobs = JobThread(self._threads)

    def _cut(self) -> None:
        if self._group_of is None:
            return
        self._abort()
        cut(self._opened() if self._own is None else self._own)

    def _cut_again(self) -> None:
        """In the link's thread: what was not open yet when the group was cut the first time."""
        if self._abandoned and self._own is None:
            self._cut()

    def _opened(self) -> dict[int, str]:
        """Sockets that were opened since this worker came to the meeting."""
        return {descriptor: link for descriptor, link in open_sockets().items() if self._others.get(descriptor) != link}

    def _on_generation(self, generation: Generation) -> None:
        """In the link's thread: what is at work in the group of an earlier generation cannot end any more."""
        group = self._group_of
        if generation.cause in ("loss", "reform") and group is not None and group < generation.number:
            self._abandoned = True
            self._cut()

    def _lost(self, cause: str) -> BaseException:
        self._link.send("lost", number=self._group_of, why=cause)
        return StepAbandoned(cause)

    def close(self) -> None:
        """The end of the run has been agreed on, or this worker gives up."""
        super().close()
        self._link.send("bye")
        self._link.close()
        self.pulse.close()

    def _begin_again(self, why: str) -> NoReturn:
        """Asks for the whole run to be begun again, from its newest checkpoint, and waits for the end."""
        self._link.send("restart", why=why)
        time.sleep(self._timeout_s)
        raise TeamError(
            "cannot go on", found=why, needed="the supervisor to begin again", fix="Go on from the last checkpoint"
        )


def _who_gives(rows: Sequence[tuple[float, float]]) -> tuple[int | None, list[int]]:
    """Of whom the others take what they lack, and who lacks something: see [Note: at one].

    Args:
        rows: of each rank, whether its state is whole, and the calls that it has completed.

    >>> _who_gives([(1, 7), (1, 8), (0, 0), (1, 8)])
    (1, [0, 2])
    >>> _who_gives([(0, 7)])
    (None, [0])
    """
    whole = [rank for rank, (is_whole, _) in enumerate(rows) if is_whole]
    source = max(whole, key=lambda rank: (rows[rank][1], -rank)) if whole else None
    most = rows[source][1] if source is not None else 0
    return source, [rank for rank, (is_whole, calls) in enumerate(rows) if not is_whole or calls < most]


def join(
    here: WorkerEnv | None,
    recipe: Recipe,
    execution: Execution,
    device: torch.device,
    *,
    on_stop: Callable[[int], None],
) -> Team:
    """The team of this process: under Paceline's supervisor, under another launcher, or alone. Collective.

    Args:
        on_stop: called with an exit code when the supervisor asks all workers to save and stop.
    """
    threads, timeout_s = recipe.threads, execution.timeout_s
    if here is None or (here.link is None and here.world_size == 1):
        return SoloTeam(device, threads)
    if here.link is None:
        return TorchTeam(here, device, threads=threads, timeout_s=timeout_s)
    on_loss = execution.on_loss
    if on_loss == "auto":
        on_loss = "replace" if device.type == "cpu" else "restart"
    run_dir = str(Path(execution.run_dir).resolve()) if execution.run_dir else None
    told = {"on_loss": on_loss, "hang_after_s": execution.hang_after_s, "timeout_s": timeout_s, "run_dir": run_dir}
    return FailoverTeam(here, device, threads=threads, timeout_s=timeout_s, settings=told, on_stop=on_stop)
