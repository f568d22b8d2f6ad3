"""Follows the ranks of a run until it is over, or has shown enough. No torch here."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.doctor.watching.ranks import Rank
from paceline.doctor.watching.records import MEETINGS, Account, Run, Stopped
from paceline.stacks import Dumping, collect, users_line

__all__ = ["follow", "patience_s"]

_TICK_S = 0.5
_STUCK_S = 4.0
"""All ranks wait for each other, or have ended, and nothing has moved for so long: it never will. A loaded machine
keeps a process waiting for a second or two."""
_STILL_S = 20.0
"""The same of ranks of which it is not known what they wait for: a disk, a download, a lock."""
_NAP_S = 60.0
"""Nobody sleeps longer than that at a time who means to go on."""
_GRACE_S = 4.0
"""When one rank has failed, the others have so long to fail too, so that each tells its own reason."""
_FINISH_S = 5.0
"""When all have taken their steps, they have so long to come to their end, where more is to be seen: what is saved, who
has a batch more than the others, what is left undone."""
_BUSY = 0.06
"""A rank that takes this share of a core computes; one that waits, with gloo's and a monitor's threads, stays below."""


def follow(ranks: Sequence[Rank], *, steps: int, deadline_s: float, tell: Callable[[str], None] | None = None) -> Run:
    """Returns when all have ended, or one has failed, or each has taken ``steps`` steps and goes on, or none moves any
    more, or time is up. Ranks that still run are left running, and are to be ended.

    Args:
        deadline_s: when time is up, by `time.monotonic`.
        tell: is told how far the ranks are, whenever that changes.
    """
    following = _Following(ranks, steps, deadline_s, tell)
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.process.link, selectors.EVENT_READ, (rank.hear, rank))
            selector.register(rank.output, selectors.EVENT_READ, (rank.read, rank))
            selector.register(rank.process.pidfd, selectors.EVENT_READ, (None, rank))
        while (stopped := following.over()) is None:
            for key, _ in selector.select(_TICK_S):
                action, rank = key.data
                if action is None:
                    following.has_ended(rank)
                    selector.unregister(key.fileobj)
                elif not action():
                    selector.unregister(key.fileobj)
    if stopped == "hang":
        _tell_where(ranks)
    return Run(accounts=[rank.account for rank in ranks], stopped=stopped)


class _Following:
    """What is known of the ranks while they run."""

    def __init__(
        self, ranks: Sequence[Rank], steps: int, deadline_s: float, tell: Callable[[str], None] | None
    ) -> None:
        self._ranks, self._steps, self._deadline_s = ranks, steps, deadline_s
        self._tell, self._told = tell, ""
        self._moves = 0
        self._cpu_s = dict.fromkeys(range(len(ranks)), 0.0)
        self._moved_s = self._looked_s = time.monotonic()
        self._failed_s: float | None = None
        self._enough_s: float | None = None

    def has_ended(self, rank: Rank) -> None:
        rank.hear()
        account = rank.account
        account.code, account.ended_s = rank.process.ended(), time.monotonic()
        self._moved_s = account.ended_s
        if account.code and self._failed_s is None:
            self._failed_s = account.ended_s

    def over(self) -> Stopped | None:
        """Why it is over; ``None``: it is not. Costs the same however much was told; what costs more than a glance is
        done once a tick."""
        self._tell_how_far()
        accounts = [rank.account for rank in self._ranks]
        living = [rank for rank in self._ranks if rank.account.ended_s is None]
        if not living:
            return "ended"
        replaced = any(rank.silent and rank.account.told["exec"] for rank in living)
        if replaced or any(account.told["spawn"] for account in accounts):
            return "spawned"
        now_s = time.monotonic()
        if self._enough_s is None and min(account.told["step"] for account in accounts) > self._steps:
            self._enough_s = now_s
        if self._failed_s is not None and now_s > self._failed_s + _GRACE_S:
            return "failed"
        if now_s > self._looked_s + _TICK_S:
            self._look(living, now_s)
        still_s = now_s - self._moved_s
        if self._enough_s is not None and now_s > self._enough_s + _FINISH_S:
            ends = any(rank.account.told["end"] for rank in living)
            stuck = still_s > 2 * _TICK_S and _all_meet([rank.account for rank in living])
            if not ends and not stuck:
                return "steps"
        if now_s > self._deadline_s:
            if all(rank.account.told["end"] for rank in living):  # all that was left is Python's own end
                return "ended"
            # whoever waits for the others then has waited for nothing
            stuck = still_s > _STUCK_S / 2 and _all_meet([rank.account for rank in living])
            return "hang" if stuck else "time"
        return "hang" if still_s > patience_s([rank.account for rank in living]) else None

    def _tell_how_far(self) -> None:
        accounts = [rank.account for rank in self._ranks]
        taken = min(*(account.told["step"] for account in accounts), self._steps)
        begun = all(account.told for account in accounts)
        told = f"step {taken} of {self._steps}" if begun else f"starting {len(accounts)} workers"
        if self._tell is not None and told != self._told:
            self._tell(told)
        self._told = told

    def _look(self, living: Sequence[Rank], now_s: float) -> None:
        """Whether any rank has told of something since, or computes. What other threads than the main one tell is no
        sign of life: a heartbeat goes on while training hangs."""
        elapsed_s, self._looked_s = now_s - self._looked_s, now_s
        moves = sum(rank.account.moves for rank in self._ranks)
        if moves != self._moves:
            self._moves, self._moved_s = moves, now_s
        spent = _cpu_s([rank.process.pid for rank in living])
        for rank in living:
            number, cpu_s = rank.account.rank, spent[rank.process.pid]
            if cpu_s - self._cpu_s[number] > _BUSY * elapsed_s:
                self._moved_s = now_s
            self._cpu_s[number] = cpu_s


def patience_s(living: Sequence[Account]) -> float:
    """How long nothing may move until it is certain that nothing will. A rank that sleeps a while is waited for."""
    if _all_meet(living):
        return _STUCK_S
    waits = [account.waiting() for account in living]
    naps = [float(wait["seconds"] or 0.0) for wait in waits if wait is not None and wait.kind == "sleep"]
    return _STILL_S + max((nap for nap in naps if nap <= _NAP_S), default=0.0)


def _all_meet(living: Sequence[Account]) -> bool:
    """Whether all that live wait for others."""
    waits = [account.waiting() for account in living]
    return all(wait is not None and wait.kind in MEETINGS for wait in waits)


def _cpu_s(groups: Sequence[int]) -> dict[int, float]:
    """By process group the processor time that its processes have taken."""
    ticks = os.sysconf("SC_CLK_TCK")
    spent = dict.fromkeys(groups, 0.0)
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            group = int(process.name) if int(process.name) in spent else int(fields[2])  # it may have left its own
            if group in spent:
                spent[group] += sum(int(fields[i]) for i in (11, 12, 13, 14)) / ticks
    return spent


def _tell_where(ranks: Sequence[Rank]) -> None:
    """The line at which each rank stands that lives."""
    for rank in ranks:
        begin = rank.account.first("begin")
        if rank.account.ended_s is None and begin is not None:
            one = Dumping(rank=rank.account.rank, pid=rank.process.pid, path=rank.stacks, doing="")
            rank.account.stands = users_line(collect([one], one.rank, None), begin["thread"])
            rank.hear()
