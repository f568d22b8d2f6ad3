"""What the doctor tells: findings, and how they are shown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from paceline.doctor.lines import head_of, statement_at, text_at
from paceline.doctor.rules import RULES, Severity

if TYPE_CHECKING:
    from paceline.doctor.watching.comparison import Comparison

__all__ = ["Confidence", "Finding", "Obeyed", "as_json", "as_text", "merged", "twins"]

Confidence = Literal["certain", "likely", "possible"]
"""``certain``: seen in this run, or true of the source however it is run; ``likely``: unless the source does something
that cannot be read from it; ``possible``: for some ways to use it."""

_BY_WEIGHT: Final[tuple[Severity, ...]] = ("error", "warning", "advice")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One mistake at one place.

    Args:
        id: the rule's.
        path: of the file, as the user would write it; ``line``: from 1.
        message: what is wrong here, in one sentence, with the names that the script uses.
        evidence: what was seen: numbers of this very run, or the piece of source that says so.
        fix: what to write instead, here; ``None``: the rule's own.
        severity: where this case is less bad than the rule's others; ``None``: it is as bad.
        also: other lines, by path, at which this very mistake may be named: a loader is made at one, and looped over at
            another.
        stands_in: the run does not see the line of the mistake, and names one near it: where DDP, the optimizer or the
            loader is made. Reading, if it has found it too, knows better.
        seen: whether it was read in the source or watched in a run.
        span: of what was watched: when that began and was over (infinity: never), by the run's clock; ``None``: it is
            not known.
        broke_s: from when on the ranks could not meet any more because of it; ``None``: it broke nothing.
    """

    id: str
    path: str
    line: int
    message: str
    evidence: str = ""
    fix: str | None = None
    severity: Severity | None = None
    confidence: Confidence = "likely"
    also: tuple[tuple[str, int], ...] = ()
    stands_in: bool = False
    seen: Literal["source", "run"] = "source"
    span: tuple[float, float] | None = None
    broke_s: float | None = None

    @property
    def level(self) -> Severity:
        """How bad it is: never worse than its rule, so that `rules` alone decides what makes a script sick."""
        own = RULES[self.id].severity
        return own if self.severity is None else max(own, self.severity, key=_BY_WEIGHT.index)

    @property
    def lines(self) -> tuple[tuple[str, int], ...]:
        """All at which it may be named, its own first."""
        return (self.path, self.line), *self.also

    @property
    def advised(self) -> str:
        return self.fix or RULES[self.id].fix


@dataclass(frozen=True, kw_only=True)
class Obeyed:
    """A rule that a run has exercised and seen obeyed.

    Args:
        path: the file, and ``line`` the line at which it was; ``None``: wherever the rule could be broken.
    """

    id: str
    path: str | None = None
    line: int | None = None

    def holds_for(self, finding: Finding) -> bool:
        """Whether what was read there is refuted. What is certain, or possible in some other run, is not by one run."""
        if self.id != finding.id or finding.confidence != "likely":
            return False
        if self.path is None or self.line is None:
            return True
        return self.path == finding.path and self.line in statement_at(finding.path, finding.line)


_Place = tuple[str, str, int]


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Each mistake once, the worst first.

    What was read is left out where the same was watched, in the same statement or one of those `also` named: that has
    numbers. How bad it is the worse of both says, so that a run only ever adds to what was read, unless it has refuted
    it. What was read and watched at two lines is one mistake if there is no other of its rule (`twins`).
    """
    kept: dict[_Place, Finding] = {}
    same: dict[_Place, _Place] = {}
    for finding in sorted(_joined(findings), key=lambda finding: finding.seen != "run"):
        place = _place(finding)
        if place not in kept and finding.seen == "source":
            place = same.get(place, place)
        told = kept.setdefault(place, finding)
        kept[place] = _as_bad(told, finding)
        same |= dict.fromkeys(_places(finding), place)
    return sorted(kept.values(), key=lambda f: (_BY_WEIGHT.index(f.level), f.path, f.line, f.id))


def twins(findings: Iterable[Finding]) -> Iterator[tuple[Finding, Finding]]:
    """What was read and what was watched of one mistake, at two lines: the two of its rule, and no other in that file.
    Of several nobody can say which are the same; and where one line stands in for another, any file will do."""
    told = list(findings)
    for watched in [finding for finding in told if finding.seen == "run"]:
        alike = [f for f in told if f.id == watched.id and (watched.stands_in or f.path == watched.path)]
        read = [finding for finding in alike if finding.seen == "source"]
        if len(alike) == 2 and len(read) == 1 and _place(read[0]) not in _places(watched):
            yield read[0], watched


def _joined(findings: Iterable[Finding]) -> list[Finding]:
    """With one finding for each two that are twins."""
    told = list(findings)
    for read, watched in twins(told):
        told = [finding for finding in told if finding not in (read, watched)]
        told.append(_as_one(read, watched))
    return told


def _as_one(read: Finding, watched: Finding) -> Finding:
    """What was read at one line and watched at another one: at the one that is known better, with what both say."""
    if watched.stands_in:
        evidence = (read.evidence, watched.evidence)
        kept = replace(watched, path=read.path, line=read.line, message=read.message, fix=read.fix or watched.fix)
    else:
        evidence, kept = (watched.evidence, f"read at line {read.line}: {read.message}"), watched
    return _as_bad(replace(kept, evidence="; ".join(text for text in evidence if text)), read)


def _as_bad(told: Finding, other: Finding) -> Finding:
    """At least as bad as another one."""
    worse = _BY_WEIGHT.index(other.level) < _BY_WEIGHT.index(told.level)
    return replace(told, severity=other.level) if worse else told


def _place(finding: Finding) -> _Place:
    """The statement in which the rule is broken."""
    return finding.id, *head_of(finding.path, finding.line)


def _places(finding: Finding) -> list[_Place]:
    """All that it may be named at."""
    return [(finding.id, *head_of(path, line)) for path, line in finding.lines]


def as_json(findings: Sequence[Finding], notes: Sequence[str], comparison: Comparison | None = None) -> str:
    """An object with ``findings``, ``notes``: what could not be looked at, and why, and where there is one the
    ``comparison`` with one worker."""
    told: list[dict[str, Any]] = [
        {
            "id": finding.id,
            "severity": finding.level,
            "confidence": finding.confidence,
            "path": finding.path,
            "line": finding.line,
            "message": finding.message,
            "evidence": finding.evidence,
            "fix": finding.advised,
            "seen": finding.seen,
        }
        for finding in findings
    ]
    compared = {"comparison": comparison.as_dict()} if comparison is not None else {}
    return json.dumps({"findings": told, "notes": list(notes), **compared}, indent=2)


def as_text(findings: Sequence[Finding], notes: Sequence[str], comparison: Comparison | None = None) -> str:
    """For people: each finding with its line of source, what a comparison has come to, then a count."""
    parts: list[str] = []
    for finding in findings:
        lines = [f"{finding.path}:{finding.line}: {finding.level}: {finding.message} [{finding.id}]"]
        if source := text_at(finding.path, finding.line):
            lines.append(f"    {source}")
        if finding.evidence:
            lines.append(f"  seen: {finding.evidence}")
        lines.append(f"  fix:  {finding.advised}")
        parts.append("\n".join(lines))
    parts += [f"note: {note}" for note in notes]
    if comparison is not None:
        parts.append(comparison.as_text())
    unexplained = comparison is not None and comparison.broken and not findings
    parts.append("Nothing found that explains it." if unexplained else _count(findings))
    return "\n\n".join(parts)


def _count(findings: Sequence[Finding]) -> str:
    if not findings:
        return "Nothing found."
    counts = {level: sum(finding.level == level for finding in findings) for level in _BY_WEIGHT}
    plural = {"error": "errors", "warning": "warnings", "advice": "advice"}
    told = ", ".join(f"{n} {level if n == 1 else plural[level]}" for level, n in counts.items() if n)
    return f"{told}. `paceline doctor --explain ID` tells more about one."
