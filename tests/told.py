"""Accounts of ranks, written by hand: what the doctor's run pass concludes from them is pure.

`Ranks` where two ranks tell the same things, or of some of them something else, and one check is asked; `Told`, one for
each rank, where they go ways of their own, and all checks are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.doctor.causes import unexplained
from paceline.doctor.circumstances import Circumstances
from paceline.doctor.findings import Finding
from paceline.doctor.reading import read
from paceline.doctor.watching.judging import judge
from paceline.doctor.watching.records import KINDS, Account, Place, Record, Run, Stopped

__all__ = ["Ranks", "Told", "ids", "run_of", "seen", "two"]

Check = Callable[[Run], Iterator[Finding]]


class Told:
    """Records of one rank, in order."""

    def __init__(self, rank: int, path: Path) -> None:
        self.account, self.path = Account(rank=rank), path

    def tell(self, kind: str, line: int = 1, *, over: bool = True, syncs: int = 0, **facts: Any) -> Told:
        at_s = float(len(self.account.records))
        ended_s = at_s + 0.5 if over else None
        _write(self.account, kind, self.path, [line], facts, at_s=at_s, ended_s=ended_s, syncs=syncs)
        return self

    def meets(self, op: str, line: int, *, over: bool = True) -> Told:
        return self.tell("collective", line, over=over, op=op, ranks=[0, 1], shape=[1], dtype="float32")

    def goes(self, line: int, *, over: bool = True, synced: str = "synced") -> Told:
        """Forward and backward."""
        self.tell("forward", line, grad=True, communicates=False, ddp=0, training=True, batch=4)
        told: dict[str, Any] = {"reached": [[0, synced]]} if over else {}
        return self.tell("backward", line, over=over, roots=[], **told)


def two(path: Path) -> tuple[Told, Told]:
    return Told(0, path).tell("init"), Told(1, path).tell("init")


def run_of(*told: Told, stopped: Stopped = "hang") -> Run:
    """Of their script, which is read too if it is there."""
    paths = {one.path for one in told if one.path.is_file()}
    known = [read(path).circumstances for path in paths]
    return Run(
        accounts=[one.account for one in told], stopped=stopped, circumstances=next(iter(known), Circumstances())
    )


def seen(*told: Told, stopped: Stopped = "hang") -> list[Finding]:
    """What a run alone comes to."""
    return unexplained(judge(run_of(*told, stopped=stopped)).findings)


def ids(findings: Iterable[Finding]) -> list[str]:
    return [finding.id for finding in findings]


class Ranks:
    """Two ranks that tell of the same or of different things."""

    def __init__(self, path: Path) -> None:
        self.path, self.accounts, self._at_s = path, [Account(rank=0), Account(rank=1)], 0.0

    @classmethod
    def beside(cls, folder: Path) -> Ranks:
        """Of a script of six lines in a folder."""
        path = folder / "train.py"
        path.write_text("one\ntwo\nthree\nfour\nfive\nsix\n")
        return cls(path)

    def tell(
        self,
        kind: str,
        *sides: dict[str, Any] | None,
        lines: Sequence[int] = (1,),
        child: int | None = None,
        syncs: int = 0,
        **facts: Any,
    ) -> Ranks:
        """Both ranks tell it: with the same facts, or each with its side's besides. ``None`` tells nothing."""
        self._at_s += 1.0
        for account, own in zip(self.accounts, sides or ({}, {}), strict=True):
            if own is not None:
                at_s, ended_s = self._at_s + account.rank / 4, self._at_s + 0.5
                told = facts | own
                _write(account, kind, self.path, lines, told, at_s=at_s, ended_s=ended_s, child=child, syncs=syncs)
        return self

    def goes(
        self, *, loader: int | None = None, lines: Sequence[int] = (5,), onto: bool = False, **facts: Any
    ) -> Ranks:
        """A batch of a loader, forward and backward."""
        if loader is not None:
            self.tell("batch", loader=loader, number=0, indices=[], rows=["a"])
        self.tell("forward", lines=lines, grad=True, ddp=0, training=True, input=facts.pop("input", None), batch=4)
        facts = {"roots": [[["MeanBackward0", 4.0]]], "reached": [[0, "synced"]], **facts}
        return self.tell("backward", lines=lines, onto=onto, **facts)

    def steps(self, *sides: dict[str, Any] | None, **facts: Any) -> Ranks:
        whole: dict[str, Any] = {
            "optimizer": 0,
            "plain": True,
            "values": ["a"],
            "grads": ["g"],
            "sample": [[1.0]],
            "grad_sample": [[0.0]],
        }
        return self.tell("step", *sides, lines=(6,), **(whole | {"touched": False, "names": ["weight"]} | facts))

    def loads(self, *numbers: int) -> Ranks:
        """Loaders of these numbers are made and gone over."""
        for number in numbers:
            self.tell("loader", loader=number, workers=0).tell("pass", loader=number, number=0)
        return self

    def found(self, check: Check) -> list[Finding]:
        known = read(self.path).circumstances
        return list(check(Run(accounts=self.accounts, stopped="ended", circumstances=known)))


def _write(
    account: Account,
    kind: str,
    path: Path,
    lines: Sequence[int],
    facts: dict[str, Any],
    *,
    at_s: float,
    ended_s: float | None,
    child: int | None = None,
    syncs: int = 0,
) -> None:
    """A record of something at these lines, innermost first."""
    assert kind in KINDS
    account.records.append(
        Record(
            kind=kind,
            rank=account.rank,
            number=len(account.records),
            at_s=at_s,
            places=tuple(Place(str(path), line) for line in lines),
            child=child,
            syncs=syncs,
            facts=facts,
            ended_s=ended_s,
        )
    )
