"""What the doctor tells: findings, their comments in the source that silence them, and how they are shown."""

from __future__ import annotations

import json
import re
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.doctor.rules import RULES, Severity

__all__ = ["Confidence", "Finding", "as_json", "as_text", "ignored_lines", "merged"]

Confidence = Literal["certain", "likely", "possible"]
"""``certain``: seen in this run, or true of the source however it is run; ``likely``: unless the source does something
that cannot be read from it; ``possible``: for some ways to use it."""

_ORDER: dict[str, int] = {"error": 0, "warning": 1, "advice": 2, "certain": 0, "likely": 1, "possible": 2}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One mistake at one place.

    Args:
        id: the rule's.
        path: of the file, as the user would write it; ``line``: from 1.
        message: what is wrong here, in one sentence, with the names that the script uses.
        evidence: what was seen: numbers of this very run, or the piece of source that says so.
        fix: what to write instead, here; ``None``: the rule's own.
        severity: ``None``: the rule's own.
        seen: whether it was read in the source or watched in a run.
    """

    id: str
    path: str
    line: int
    message: str
    evidence: str = ""
    fix: str | None = None
    severity: Severity | None = None
    confidence: Confidence = "likely"
    seen: Literal["source", "run"] = "source"

    @property
    def level(self) -> Severity:
        return self.severity or RULES[self.id].severity

    @property
    def advised(self) -> str:
        return self.fix or RULES[self.id].fix


def merged(findings: Iterable[Finding], cleared: Iterable[str] = ()) -> list[Finding]:
    """Each mistake once: of one that was both read and watched, what was watched, at the line that was read if the run
    could not tell it; ordered by severity, file and line.

    Args:
        cleared: rules of which the run has shown that the script does not break them; what was only read of these is
            dropped, unless it is certain.
    """
    by_rule: dict[str, list[Finding]] = {}
    for finding in findings:
        by_rule.setdefault(finding.id, []).append(finding)
    gone = set(cleared)
    kept: list[Finding] = []
    for rule, those in by_rule.items():
        watched = [finding for finding in those if finding.seen == "run"]
        read = [f for f in those if f.seen == "source" and (rule not in gone or f.confidence == "certain")]
        places = {(finding.path, finding.line) for finding in watched}
        kept += watched
        kept += [finding for finding in read if (finding.path, finding.line) not in places and not watched]
    unique = {(finding.id, finding.path, finding.line): finding for finding in reversed(kept)}
    return sorted(unique.values(), key=lambda f: (_ORDER[f.level], f.path, f.line, f.id))


_IGNORE = re.compile(r"#\s*paceline:\s*ignore\[([\w\s,-]+)\]")


def ignored_lines(path: Path) -> dict[int, set[str]]:
    """By line of a file the rules that a comment ``# paceline: ignore[id, id]`` there silences."""
    found: dict[int, set[str]] = {}
    try:
        with tokenize.open(path) as source:  # in the encoding that it declares
            for token in tokenize.generate_tokens(source.readline):
                if token.type == tokenize.COMMENT and (match := _IGNORE.search(token.string)):
                    found[token.start[0]] = {name.strip() for name in match[1].split(",")}
    except (tokenize.TokenError, SyntaxError, UnicodeDecodeError, OSError):
        pass  # as far as it can be read
    return found


def as_json(findings: Sequence[Finding], notes: Sequence[str]) -> str:
    """An object with ``findings`` and ``notes``: what could not be looked at, and why."""
    told = [
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
    return json.dumps({"findings": told, "notes": list(notes)}, indent=2)


def as_text(findings: Sequence[Finding], notes: Sequence[str]) -> str:
    """For people: each finding with its line of source, then a count."""
    parts: list[str] = []
    for finding in findings:
        lines = [f"{finding.path}:{finding.line}: {finding.level}: {finding.message} [{finding.id}]"]
        if (source := _line_of(finding)) is not None:
            lines.append(f"    {source}")
        if finding.evidence:
            lines.append(f"  seen: {finding.evidence}")
        lines.append(f"  fix:  {finding.advised}")
        parts.append("\n".join(lines))
    parts += [f"note: {note}" for note in notes]
    parts.append(_count(findings))
    return "\n\n".join(parts)


def _line_of(finding: Finding) -> str | None:
    try:
        with tokenize.open(finding.path) as source:
            return source.read().splitlines()[finding.line - 1].strip()
    except (OSError, SyntaxError, UnicodeDecodeError, IndexError):
        return None


def _count(findings: Sequence[Finding]) -> str:
    if not findings:
        return "Nothing found."
    counts = {level: sum(finding.level == level for finding in findings) for level in ("error", "warning", "advice")}
    plural = {"error": "errors", "warning": "warnings", "advice": "advice"}
    told = ", ".join(f"{n} {level if n == 1 else plural[level]}" for level, n in counts.items() if n)
    return f"{told}. `paceline doctor --explain ID` tells more about one."
