"""From what the ranks have told to what is wrong with the script."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from paceline.doctor.causes import BROKEN, unexplained
from paceline.doctor.findings import Finding
from paceline.doctor.watching import (
    checks_collectives,
    checks_data,
    checks_errors,
    checks_files,
    checks_gradients,
    checks_launch,
    checks_models,
)
from paceline.doctor.watching.records import Account, Run
from paceline.doctor.watching.sources import line_of

__all__ = ["cleared", "judge", "notes", "wants_gpus"]

_FAMILIES = (
    checks_launch,
    checks_data,
    checks_models,
    checks_gradients,
    checks_files,
    checks_errors,
    checks_collectives,
)
_CHECKS: tuple[Callable[[Run], Iterator[Finding]], ...] = tuple(
    check for family in _FAMILIES for check in family.CHECKS
)


def judge(run: Run) -> list[Finding]:
    """All that the run shows, each mistake by its most specific name."""
    return unexplained(list(_once(finding for check in _CHECKS for finding in check(run))))


def cleared(run: Run) -> frozenset[str]:
    """Rules of which the run has shown that the script obeys them: only such as no other data could break."""
    account = run.accounts[0]
    shown = set()
    epochs = [
        [one.indices for one in those if one.trains and one.indices]
        for those in checks_data.by_loader(account)
        if those[0].loader["sampler"] is not None
    ]
    if epochs and all(len(orders) > 1 and orders[0] != orders[1] for orders in epochs):
        shown.add("missing-set-epoch")
    if run.world < 2:
        return frozenset(shown)
    for rule, kind, fact in _ALIKE:
        sides = [[record[fact] for record in own.of(kind)] for own in run.accounts]
        if sides[0] and all(side == sides[0] for side in sides):
            shown.add(rule)
    firsts = [own.first("step") for own in run.accounts]
    values = [first["values"] for first in firsts if first is not None and first["plain"]]
    if len(values) == run.world and all(own == values[0] for own in values):
        shown.add("replicas-start-different")
    return frozenset(shown)


_ALIKE = (
    ("sampler-seed-differs", "sampler", "seed"),
    ("random-split-differs", "subset", "digest"),
    ("model-differs-across-ranks", "wrap", "shapes"),
)
"""Rules that are obeyed when all ranks tell the same fact of all records of a kind."""


def notes(run: Run) -> Iterator[str]:
    """What the run could not show, and why."""
    taken = min(sum(1 for _ in account.of("step")) for account in run.accounts)
    failure = checks_errors.first_failure(run)
    if (fault := next(run.all("fault"), None)) is not None:
        yield f"a part of the doctor itself failed in rank {fault.rank}, and looked no further: {fault['text']}"
    if run.stopped == "steps":
        yield f"the run was ended after {taken} optimizer steps on each rank (--steps)"
    elif run.stopped == "time":
        yield f"the run was ended when time was up, after {taken} optimizer steps (--timeout)"
    elif run.stopped == "spawned":
        yield "the script starts processes of its own, into which the run pass does not look"
    elif failure is not None:
        account, error = failure
        if error is not None and checks_errors.is_echo(error):
            yield f"rank {account.rank} lost its connection to a rank that had ended, or was elsewhere"
            return
        what = f"{error['type']}: {error['text'].strip()[:300]}" if error is not None else _ending(account)
        where = f" at {error.place.path}:{error.place.line}" if error is not None and error.place is not None else ""
        yield f"rank {account.rank} failed first{where}: {what}"


def wants_gpus(run: Run) -> bool:
    """Whether it gave up before its first step because there is no GPU."""
    failure = checks_errors.first_failure(run)
    if failure is None or any(True for _ in run.all("step")):
        return False
    account, error = failure
    said = f"{error['text']} {line_of(error.place) if error.place else ''}" if error is not None else account.tail
    return re.search(r"cuda|gpu|nccl", said, re.I) is not None


def _ending(account: Account) -> str:
    code = account.code or 0
    last = account.tail.strip().rpartition("\n")[2][:200]
    how = f"killed by signal {-code}" if code < 0 else f"it left with exit code {code}"
    return f"{how}; its last line: {last}" if last else how


def _once(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Of each rule and line the first; of one that an exception and a record tell, the record."""
    seen: set[str] = set()
    places: set[tuple[str, str, int]] = set()
    for finding in findings:
        key = (finding.id, finding.path, finding.line)
        said = finding.id in seen and finding.id in BROKEN
        if key not in places and not said:
            places.add(key)
            seen.add(finding.id)
            yield finding
