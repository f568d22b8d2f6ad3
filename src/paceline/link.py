"""What a worker and its supervisor say to each other: small JSON messages over a pair of sockets.

A message is a list: its kind, then its fields.

From a worker: ``hello`` (a run begins here, with these settings), ``ready`` (stands at the door of a generation),
``met`` (is at one with the others in it), ``lost`` (cannot reach the others), ``wait`` (takes a lost worker's place,
and waits to be let in), ``unwait`` (that loop has ended), ``admit`` (let those in that wait), ``stop`` (was asked to
save and stop), ``restart`` (nobody has a whole state), ``bye`` (the run has ended here), ``over``
(so has the program).

From the supervisor: ``generation``, ``go`` (all stand at its door: connect), ``candidate`` (one waits), ``stop``,
``stacks`` (write down where you are), ``end`` (the run is over, this is why).

A loss: ``generation`` to the survivors, ``ready`` from each, ``go`` to all, ``met`` from each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import EXIT_FAILED, TeamError
from paceline.pulse import Pulse

__all__ = ["Cause", "Generation", "Link", "decode", "encode", "tell"]

Cause = Literal["start", "loss", "left", "join", "reform"]

_BEAT_S = 0.25
_MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One membership of the team.

    Args:
        number: from 0.
        members: ids of the workers in the order of their ranks.
        cause: why there is a new one; after ``loss`` and ``reform`` the step at work is abandoned.
        told: that cause, in words.
        lost: how many workers of the generation before are gone.
        joined: how many are new.
        began_s: when the supervisor saw the cause, `time.monotonic`, which processes of one machine share.
    """

    number: int
    members: tuple[int, ...]
    cause: Cause
    told: str
    lost: int = 0
    joined: int = 0
    began_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return dataclasses.asdict(self)

    def told_to_people(self) -> dict[str, Any]:
        """As fields of an event."""
        numbers = {"workers": len(self.members), "lost": self.lost, "joined": self.joined}
        return {"generation": self.number, "cause": self.told, **numbers}

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Generation:
        """From JSON."""
        return cls(**{**fields, "members": tuple(fields["members"])})


def encode(kind: str, **fields: Any) -> bytes:
    """One message."""
    return json.dumps([kind, fields]).encode()


def decode(message: bytes) -> tuple[str, dict[str, Any]]:
    """Its kind and fields."""
    kind, fields = json.loads(message)
    return kind, fields


def tell(descriptor: int, kind: str, **fields: Any) -> None:
    """One message to the supervisor, where there is no `Link`. If it is gone, nothing."""
    with contextlib.suppress(OSError), socket.fromfd(descriptor, socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.send(encode(kind, **fields))


class Link:
    """A worker's end. A thread of its own reads the messages, and beats the pulse: it is alive while a step computes.

    Args:
        descriptor: of the socket; stays open, for the next run of this process.
        pulse: of this worker.
        on_generation: called in the link's thread with each new generation.
        on_stop: called in the link's thread with the exit code of a stop that the whole team is asked for.
        on_stacks: called in the link's thread when the supervisor asks for this worker's stacks.
        on_beat: called in the link's thread a few times a second.
    """

    def __init__(
        self,
        descriptor: int,
        pulse: Pulse,
        *,
        on_generation: Callable[[Generation], None],
        on_stop: Callable[[int], None],
        on_stacks: Callable[[], None],
        on_beat: Callable[[], None],
    ) -> None:
        self._socket = socket.fromfd(descriptor, socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pulse, self._on_generation, self._on_stop = pulse, on_generation, on_stop
        self._on_stacks, self._on_beat = on_stacks, on_beat
        self._changed = threading.Condition()
        self._newest: Generation | None = None
        self._go: tuple[int, int] | None = None  # a generation, and the number of its meeting
        self._over: str | None = None
        self._closed = False
        self.candidate = False
        self._thread = threading.Thread(target=self._listen, name="paceline-link", daemon=True)
        self._thread.start()

    def send(self, kind: str, **fields: Any) -> None:
        """One message to the supervisor. A supervisor that is gone takes this process with it."""
        try:
            self._socket.send(encode(kind, **fields))
        except OSError as error:
            raise TeamError(
                "the supervisor is gone",
                found=str(error),
                needed="it alive to the end",
                fix="Go on from the last checkpoint with --resume",
            ) from error

    def await_generation(self, after: int | None, timeout_s: float) -> Generation:
        """The newest generation, once there is one after ``after``.

        Raises:
            TeamError: the run is over, or nobody says anything for ``timeout_s``.
        """
        newest: Generation = self._await(lambda: self._newest if self._is_newer(after) else None, timeout_s)
        return newest

    def await_go(self, generation: Generation, timeout_s: float) -> int | None:
        """Once all stand at the door of ``generation``: the number of this meeting, no other has it. ``None`` when
        there is a newer generation."""

        def verdict() -> tuple[int | None] | None:
            if self._is_newer(generation.number):
                return (None,)
            return (self._go[1],) if self._go and self._go[0] == generation.number else None

        meeting: tuple[int | None] = self._await(verdict, timeout_s)
        return meeting[0]

    def is_in(self, member: int) -> bool:
        """Whether the newest generation has ``member``."""
        with self._changed:
            return self._newest is not None and member in self._newest.members

    def superseded(self, number: int) -> bool:
        """Whether there is a newer generation than that."""
        with self._changed:
            return self._is_newer(number)

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        self._thread.join()
        self._socket.close()

    def _is_newer(self, than: int | None) -> bool:
        return self._newest is not None and (than is None or self._newest.number > than)

    def _await(self, answer: Callable[[], Any], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (found := answer()) is None:
                if self._over is not None:
                    raise TeamError(self._over)
                if not self._changed.wait(min(1.0, max(0.0, deadline - time.monotonic()))):
                    if time.monotonic() < deadline:
                        continue
                    raise TeamError(
                        "cannot go on without a lost worker",
                        found=f"no word from the supervisor or the other workers for {timeout_s:g} s",
                        needed="all of them at the same door",
                        fix="Look for what holds up the others, or raise execution.timeout_s",
                    )
        return found

    def _listen(self) -> None:
        try:
            self._hear()
        except BaseException:  # without its link a worker would be taken for hung, and nobody would know why
            traceback.print_exc()
            os._exit(EXIT_FAILED)

    def _hear(self) -> None:
        while not self._closed:
            self._pulse.beat()
            self._on_beat()
            if not select.select([self._socket], [], [], _BEAT_S)[0]:
                continue
            try:
                message = self._socket.recv(_MESSAGE_BYTES)
            except ConnectionResetError:
                return
            if not message:
                return  # the kernel ends this process with its supervisor
            self._take(*decode(message))

    def _take(self, kind: str, fields: dict[str, Any]) -> None:
        with self._changed:
            if kind == "generation":
                self._newest = Generation.of(fields)
                self.candidate = False
            elif kind == "go":
                self._go = fields["number"], fields["meeting"]
            elif kind == "candidate":
                self.candidate = True
            elif kind == "end":
                self._over = fields["told"]
            self._changed.notify_all()
        if kind == "generation" and self._newest is not None:
            self._on_generation(self._newest)
        elif kind == "stop":
            self._on_stop(fields["exit_code"])
        elif kind == "stacks":
            self._on_stacks()
