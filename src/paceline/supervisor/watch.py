"""Who hangs? Decided from what the workers' pulses say, without touching a process.

Only one worker of a team that hangs is to blame; the others wait for it, and say so:

>>> def doing(activity: Activity, since_s: float) -> Beat:
...     many = {name: 50 for name in ("load", "compute", "update", "body")}
...     return Beat(beat_s=99.9, since_s=since_s, activity=activity, step=12, phase=None, lane=3, call=None,
...                 seen=many, longest_s=dict.fromkeys(many, 0.2), main_thread=0)
>>> watch = Watch(hang_after_s=None, timeout_s=600)
>>> hang = watch.look([
...     Watched(id=0, rank=0, beat=doing("wait", 62.0), stopped=False),
...     Watched(id=1, rank=1, beat=doing("compute", 61.5), stopped=False),
... ], now_s=100.0)
>>> print(hang.told("train.py:31"))
worker 1 hangs in step 12, lane 3, at train.py:31: computing for 38.5 s, so far 0.2 s at most

[Note: whose time counts] Time in which the supervisor itself did not look is nobody's fault: it was stopped, with its
workers most likely (Ctrl-Z), or starved as they were. After such a gap every worker's time begins anew. And a worker
that was stopped takes the pause for time at work, from which a deadline far too long would be learned: from then on
nothing is learned from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.pulse import Activity, Beat

__all__ = ["Hang", "Watch", "Watched", "is_stopped", "oom_kills"]

_STALE_S = 5.0
"""A heart that beats several times a second and has not for so long is not merely late."""
_FACTOR = 10.0
_LEAST_S = 30.0
_ENOUGH = 3
"""What a deadline is learned from: so many times the longest of at least so many, but not less than this."""

_USERS: frozenset[Activity] = frozenset({"load", "compute", "update", "body"})
"""What ``hang_after_s`` is about: the course of steps."""
_REGULAR: frozenset[Activity] = frozenset({"load", "compute", "update", "evaluate"})
"""What takes about as long each time, so that a deadline can be learned. Not the code between steps, which may draw
pictures after every thousandth, nor a save, which may find the disk busy."""
_IN_A_LANE: frozenset[Activity] = frozenset({"load", "compute", "evaluate"})
_AFTER_A_STEP: frozenset[Activity] = frozenset({"body", "evaluate", "save", "end"})

_DOING: dict[Activity, str] = {
    "start": "starting",
    "load": "waiting for its next micro-batch",
    "compute": "computing",
    "wait": "waiting for others",
    "update": "updating",
    "body": "in the code between steps",
    "evaluate": "evaluating",
    "save": "saving a checkpoint",
    "join": "catching up with the others",
    "end": "ending",
}


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A member of the team as the supervisor sees it.

    Args:
        id: never used again.
        rank: its place in the present generation, by which people know it.
        beat: what its pulse says; ``None``: nothing yet.
        stopped: the process is stopped (`is_stopped`).
    """

    id: int
    rank: int
    beat: Beat | None
    stopped: bool


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A worker that is to blame for the others' waiting, or for nothing happening at all.

    Args:
        id: of the member.
        rank: its place in the team.
        activity: what it does.
        step: from 1; ``None``: it has not come to its first.
        phase: of the step, from 0; ``None``: not told.
        lane: ``None``: what it does belongs to no lane.
        elapsed_s: since when it does so; of a stopped one, or one in ``wait``, how long it has given no sign of life.
        deadline_s: what it exceeded.
        longest_s: the longest that this took so far, of any worker, first times left out; ``None``: not known.
        stopped: the process was stopped from outside.
        silent: no thread of it runs, though it is not stopped.
    """

    id: int
    rank: int
    activity: Activity
    step: int | None
    phase: int | None
    lane: int | None
    elapsed_s: float
    deadline_s: float
    longest_s: float | None
    stopped: bool
    silent: bool

    def told(self, line: str | None) -> str:
        """One sentence for a person.

        Args:
            line: of the user's code, where the worker is (see `paceline.stacks.users_line`).
        """
        if self.stopped:
            return f"worker {self.rank} is stopped (SIGSTOP) {self._where()}"
        doing = f"no sign of life for {self.elapsed_s:.1f} s"
        if self.activity != "wait":
            doing = f"{_DOING[self.activity]} for {self.elapsed_s:.1f} s"
            if self.longest_s is not None:
                doing += f", so far {_short(self.longest_s)} at most"
        at = f", at {line}" if line else ""
        why = " (its other threads do not run either: a call into C code that keeps the GIL)" if self.silent else ""
        return f"worker {self.rank} hangs {self._where()}{at}: {doing}{why}"

    def _where(self) -> str:
        if self.activity == "join":
            return "while joining"
        if self.step is None:
            return "before its first step"
        if self.activity in _AFTER_A_STEP:
            where = f"after step {self.step}"
        else:
            where = f"in step {self.step}" + (f", phase {self.phase + 1}" if self.phase else "")
        return where + (f", lane {self.lane}" if self.lane is not None else "")


class Watch:
    """Looks again and again, some times a second, and learns how long things take.

    Who waits for others is never to blame. Of those that do something else, one hangs that does it for longer than its
    deadline:

    * ``hang_after_s``, when given, for loading, computing, updating and the code between steps;
    * else, and always for evaluating: ten times the longest that any member took for the same, but at least 30 s and at
      most ``timeout_s``;
    * ``timeout_s`` for all else, and as long as there is too little to go by: up to the second step of this member,
      and while all members together have not done the same three times, each one's first left out.

    A stopped process hangs whatever it was doing. One whose heart has stopped though it is not stopped keeps all its
    threads from running; since nobody can wait for others like that, it has the deadline of computing even in a wait.

    Args:
        hang_after_s: the user's own deadline; ``None``: learn it.
        timeout_s: after which waiting for others is an error.
    """

    def __init__(self, hang_after_s: float | None, timeout_s: float) -> None:
        self._hang_after_s, self._timeout_s = hang_after_s, timeout_s
        self._stale_s = min(_STALE_S, hang_after_s or _STALE_S)
        self._gap_s = max(self._stale_s / 2, 1.0)
        self._looked_s: float | None = None
        self._from_s = 0.0
        self._met_s: dict[int, float] = {}
        self._unfit: set[int] = set()
        self._measured: dict[tuple[int, Activity], int] = {}
        self._longest_s: dict[Activity, float] = {}

    def look(self, members: Sequence[Watched], now_s: float) -> Hang | None:
        """The member that is longest over its deadline; ``None``: nobody is.

        Args:
            members: all of them, but those known to be dead.
            now_s: `time.monotonic`, after the pulses were read.
        """
        if self._looked_s is not None and now_s - self._looked_s > self._gap_s:  # [Note: whose time counts]
            self._from_s = now_s
            self._unfit |= set(self._met_s)
        self._looked_s = now_s
        self._met_s = {member.id: self._met_s.get(member.id, now_s) for member in members}
        self._unfit |= {member.id for member in members if member.stopped}
        self._unfit &= set(self._met_s)
        for member in members:
            self._learn(member)
        hangs = [hang for member in members if (hang := self._judge(member, now_s)) is not None]
        return max(hangs, key=lambda hang: hang.elapsed_s - hang.deadline_s, default=None)

    def _learn(self, member: Watched) -> None:
        if member.beat is None or member.id in self._unfit:
            return
        for activity, longest_s in member.beat.longest_s.items():
            self._measured[member.id, activity] = member.beat.seen[activity] - 1
            self._longest_s[activity] = max(longest_s, self._longest_s.get(activity, 0.0))

    def _judge(self, member: Watched, now_s: float) -> Hang | None:
        beat = member.beat
        met_s = self._met_s[member.id]
        silent_s = now_s - max(met_s if beat is None else beat.beat_s, self._from_s)
        elapsed_s = now_s - max(met_s if beat is None else beat.since_s, self._from_s)
        activity: Activity = "start" if beat is None else beat.activity
        silent = beat is not None and silent_s > self._stale_s
        if member.stopped:
            elapsed_s, deadline_s = silent_s, self._stale_s
        elif activity != "wait":
            deadline_s = self._deadline_s(activity, beat)
        elif silent_s > _STALE_S:
            elapsed_s, deadline_s = silent_s, self._deadline_s("compute", beat)
        else:
            return None
        if elapsed_s <= deadline_s:
            return None
        return Hang(
            id=member.id,
            rank=member.rank,
            activity=activity,
            step=beat.step if beat is not None else None,
            phase=beat.phase if beat is not None else None,
            lane=beat.lane if beat is not None and activity in _IN_A_LANE else None,
            elapsed_s=elapsed_s,
            deadline_s=deadline_s,
            longest_s=self._longest_s.get(activity),
            stopped=member.stopped,
            silent=silent and not member.stopped,
        )

    def _deadline_s(self, activity: Activity, beat: Beat | None) -> float:
        settled = beat is not None and activity in beat.seen and ("body" in beat.seen or activity not in _USERS)
        if settled and self._hang_after_s is not None and activity in _USERS:
            return self._hang_after_s
        if settled and activity in _REGULAR and self._times_measured(activity) >= _ENOUGH:
            return min(max(_FACTOR * self._longest_s[activity], _LEAST_S), self._timeout_s)
        return self._timeout_s

    def _times_measured(self, activity: Activity) -> int:
        return sum(times for (_, of), times in self._measured.items() if of == activity)


def _short(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{max(seconds, 0.001) * 1e3:.0f} ms"


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal, such as SIGSTOP. One that is gone is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(b")")[2].split()[0] == b"T"  # before it the program's name, which may hold anything


def oom_kills() -> int | None:
    """How many processes this machine's kernel has killed since it started because memory ran out.

    What makes a SIGKILL out of nowhere likely to be one of those is a number that has grown. ``None``: not told.
    """
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
