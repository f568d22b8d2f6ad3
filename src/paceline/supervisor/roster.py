"""Who is in the team: generations, and what is said to whom about them. Pure: takes what happened, fills an outbox.

    >>> roster = Roster([0, 1, 2])
    >>> for member in (0, 1, 2): roster.hello(member)
    >>> roster.gone(1, "worker 1 was killed (SIGKILL)", now_s=5.0)
    >>> roster.generation.number, roster.generation.members
    (1, (0, 2))

[Note: the door] A generation is published after the lost process has ended, so that nothing of it can speak any more.
Its members say when they stand at the door; when all do, they are told to connect. One that dies before is missed here,
not in the middle of connecting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from paceline.link import Cause, Generation

__all__ = ["Roster"]

_STRENGTH: list[Cause] = ["left", "join", "reform", "loss"]
"""Causes of a generation. Of those that came before it could meet, the last one here is told."""


class Roster:
    """The members of one team.

    Args:
        first: ids of the workers of generation 0, in the order of their ranks.
        told: why there is a team, in words.
        began_s: when that was; 0.0: nobody was held up.

    Attributes:
        generation: the newest.
        outbox: messages to be sent: member, kind, fields.
        formed: the newest generation has met.
        finishers: members, in the order of their ranks, of the last generation before workers came to their end.
    """

    def __init__(self, first: Sequence[int], told: str = "start", began_s: float = 0.0) -> None:
        self.generation = Generation(number=0, members=tuple(first), cause="start", told=told, began_s=began_s)
        self.outbox: list[tuple[int, str, dict[str, Any]]] = []
        self.formed = False
        self.finishers = self.generation.members
        self._runs: Counter[int] = Counter()
        self._ready: set[int] = set()
        self._met: set[int] = set()
        self._waiting: list[int] = []
        self._done: set[int] = set()
        self._meetings = 0

    def is_member(self, worker: int) -> bool:
        """Whether ``worker`` is in the newest generation."""
        return worker in self.generation.members

    @property
    def several_runs(self) -> bool:
        """Whether some worker is in its second run: what came before cannot be told to one that comes later."""
        return any(runs > 1 for runs in self._runs.values())

    @property
    def apart(self) -> bool:
        """Whether the members are in different runs of one program, one after the other."""
        return len({self._runs[member] for member in self.generation.members}) > 1

    def hello(self, worker: int) -> None:
        """``worker`` begins a run."""
        self._runs[worker] += 1
        self._ready.discard(worker)
        self._done.discard(worker)
        self._say(worker, "generation", **self.generation.as_dict())
        if self._waiting:
            self._say(worker, "candidate")

    def ready(self, worker: int, number: int) -> None:
        """``worker`` stands at the door of generation ``number``."""
        if number != self.generation.number or not self.is_member(worker):
            return
        self._ready.add(worker)
        if self._ready.issuperset(self.generation.members):
            self._meetings += 1
            self._ready.clear()
            self._met.clear()
            for member in self.generation.members:
                self._say(member, "go", number=number, meeting=self._meetings)

    def met(self, worker: int, number: int) -> None:
        """``worker`` has connected with the others of generation ``number``, and is at one with them."""
        if number == self.generation.number and self.is_member(worker):
            self._met.add(worker)
            self.formed = self._met.issuperset(self.generation.members)

    def bye(self, worker: int) -> None:
        """``worker`` has come to the end of its run, whatever its program does from now on."""
        self._done.add(worker)

    def gone(self, worker: int, told: str, *, now_s: float) -> None:
        """``worker`` has been lost, and its process has ended."""
        self._remove(worker, "loss", told, now_s)

    def left(self, worker: int, *, now_s: float) -> None:
        """``worker`` has come to the end of its program."""
        self._remove(worker, "left", f"worker {worker} has ended", now_s)

    def wait(self, worker: int) -> None:
        """``worker`` takes the place of a lost one, and waits to be let in."""
        if worker not in self._waiting and not self.is_member(worker):
            self._waiting.append(worker)
        for member in self.generation.members:
            self._say(member, "candidate")

    def unwait(self, worker: int) -> None:
        """The loop at whose door ``worker`` stood has ended."""
        if worker in self._waiting:
            self._waiting.remove(worker)

    def admit(self, number: int, *, now_s: float) -> None:
        """The members of generation ``number`` stand between two steps, and take in those that wait."""
        if number == self.generation.number:
            members = (*self.generation.members, *self._waiting)
            joined, self._waiting = len(self._waiting), []
            told = {0: "nobody has come in", 1: "a new worker has come in"}.get(
                joined, f"{joined} new workers have come in"
            )
            self._publish(members, "join", told, joined=joined, now_s=now_s)

    def reform(self, told: str, *, now_s: float) -> None:
        """The members cannot reach each other, though all are alive."""
        self._publish(self.generation.members, "reform", told, now_s=now_s)

    def _remove(self, worker: int, cause: Cause, told: str, now_s: float) -> None:
        self.unwait(worker)
        if self.is_member(worker):
            members = tuple(member for member in self.generation.members if member != worker)
            self._publish(members, cause, told, lost=1, now_s=now_s)

    def _publish(
        self, members: tuple[int, ...], cause: Cause, told: str, *, lost: int = 0, joined: int = 0, now_s: float
    ) -> None:
        before = self.generation
        if cause != "left":
            self.finishers = members
            members = tuple(member for member in members if member not in self._done)
        if not self.formed and before.cause in _STRENGTH:  # its members never met: this one tells that news too
            lost, joined, now_s = lost + before.lost, joined + before.joined, before.began_s
            told = f"{before.told}; {told}" if cause == "loss" else before.told
            cause = max(before.cause, cause, key=_STRENGTH.index)
        self.generation = Generation(
            number=before.number + 1, members=members, cause=cause, told=told, lost=lost, joined=joined, began_s=now_s
        )
        self.formed = False
        self._ready.clear()
        self._met.clear()
        for member in members:
            self._say(member, "generation", **self.generation.as_dict())
            if self._waiting:
                self._say(member, "candidate")

    def _say(self, worker: int, kind: str, **fields: Any) -> None:
        self.outbox.append((worker, kind, fields))
