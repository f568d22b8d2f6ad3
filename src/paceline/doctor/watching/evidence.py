"""What the checks have in common: how to say what was found, and to look at the ranks side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.doctor.findings import Confidence, Finding
from paceline.doctor.rules import Severity
from paceline.doctor.watching.records import LASTING, Account, Place, Record, Run

__all__ = ["Interval", "at", "beside", "count", "found", "gap", "intervals", "ranks", "train_together"]


def found(
    rule: str,
    place: Place | None,
    message: str,
    evidence: str = "",
    *,
    severity: Severity | None = None,
    confidence: Confidence = "certain",
    fix: str | None = None,
    also: Iterable[Place | None] = (),
    stands_in: bool = False,
) -> Iterator[Finding]:
    """A finding at a line that was seen; none when no line of the user's led to it.

    Args:
        also: other lines at which reading may name this very mistake.
        stands_in: the line is none of those, but near: the mistake's own cannot be seen.
    """
    if place is not None:
        record = place.record
        yield Finding(
            id=rule,
            path=place.path,
            line=place.line,
            message=message,
            evidence=evidence,
            severity=severity,
            confidence=confidence,
            fix=fix,
            also=tuple((other.path, other.line) for other in also if other is not None),
            stands_in=stands_in,
            seen="run",
            span=_span(record) if record is not None else None,
        )


def _span(record: Record) -> tuple[float, float]:
    moment = record.kind not in LASTING
    return record.at_s, record.at_s if moment else record.ended_s or float("inf")


def at(place: Place | None) -> str:
    """As it is told in a sentence: ``train.py:12``."""
    return f"{Path(place.path).name}:{place.line}" if place is not None else "a line that is not known"


def ranks(numbers: Iterable[int]) -> str:
    """``rank 1``, or ``ranks 0 and 2``.

    >>> ranks([2, 0])
    'ranks 0 and 2'
    """
    those = [str(number) for number in sorted(numbers)]
    if len(those) == 1:
        return f"rank {those[0]}"
    return f"ranks {', '.join(those[:-1])} and {those[-1]}"


def count(number: int, thing: str) -> str:
    """``1 batch``, ``3 batches``.

    >>> count(1, "batch"), count(3, "batch"), count(2, "sample")
    ('1 batch', '3 batches', '2 samples')
    """
    plural = f"{thing}es" if thing.endswith(("ch", "s", "x")) else f"{thing}s"
    return f"{number} {thing if number == 1 else plural}"


def beside(run: Run, *kinds: str) -> Iterator[list[Record]]:
    """The first records of these kinds of all ranks, then the second ones, and so on, as far as every rank has some."""
    yield from (list(those) for those in zip(*(account.of(*kinds) for account in run.accounts), strict=False))


def train_together(run: Run) -> bool:
    """Whether the ranks train one model. Else each may have folds, seeds or players of its own, and data for them."""
    reduces = any(record["grads"] for record in run.all("collective"))
    return run.world > 1 and (reduces or any(True for _ in run.all("wrap")))


@dataclass(kw_only=True)
class Interval:
    """What a rank did from one step of an optimizer to the next.

    Args:
        step: the record of the step that ends it.
        number: from 0, of all optimizers together.
    """

    number: int
    step: Record
    records: list[Record] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Record]:
        return [record for record in self.records if record.kind in kinds]


def intervals(account: Account) -> list[Interval]:
    """All that ended with a step."""
    done: list[Interval] = []
    since: list[Record] = []
    for record in account.records:
        if record.child is not None:
            continue
        if record.kind == "step":
            done.append(Interval(number=len(done), step=record, records=since))
            since = []
        else:
            since.append(record)
    return done


def gap(samples: Sequence[Sequence[Sequence[float]]]) -> float:
    """The largest difference between ranks in values that each has told of.

    >>> gap([[[1.0, 2.0]], [[1.0, 2.5]]])
    0.5
    """
    values = [[value for tensor in own for value in tensor] for own in samples]
    return max((max(column) - min(column) for column in zip(*values, strict=False)), default=0.0)
