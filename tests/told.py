"""Accounts of ranks, written by hand: what the doctor's run pass concludes from them is pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.doctor.causes import unexplained
from paceline.doctor.findings import Finding
from paceline.doctor.watching.judging import judge
from paceline.doctor.watching.records import KINDS, Account, Place, Record, Run, Stopped

__all__ = ["Told", "ids", "run_of", "seen", "two"]


class Told:
    """Records of one rank, in order."""

    def __init__(self, rank: int, path: Path) -> None:
        self.account, self._path = Account(rank=rank), path

    def tell(self, kind: str, line: int = 1, *, over: bool = True, syncs: int = 0, **facts: Any) -> Told:
        assert kind in KINDS
        number = len(self.account.records)
        self.account.records.append(
            Record(
                kind=kind,
                rank=self.account.rank,
                number=number,
                at_s=float(number),
                places=(Place(str(self._path), line),),
                syncs=syncs,
                facts=facts,
                ended_s=number + 0.5 if over else None,
            )
        )
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
    return Run(accounts=[one.account for one in told], stopped=stopped)


def seen(*told: Told, stopped: Stopped = "hang") -> list[Finding]:
    """What a run alone comes to."""
    return unexplained(judge(run_of(*told, stopped=stopped)).findings)


def ids(*told: Told, stopped: Stopped = "hang") -> list[str]:
    return [finding.id for finding in seen(*told, stopped=stopped)]
