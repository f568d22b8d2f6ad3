"""Both passes over one script, and what they found together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.doctor.causes import unexplained
from paceline.doctor.findings import Finding, ignored_lines, merged
from paceline.doctor.reading import read
from paceline.doctor.rules import rule
from paceline.doctor.watching import Tell, watch

__all__ = ["Examination", "Limits", "examine"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much of a script is run.

    Args:
        workers: ranks to start.
        steps: of the optimizer, on each rank; then the run is ended.
        timeout_s: seconds for all of it.
        in_place: the script runs in the working directory as it is, not in a scratch copy of what it writes.
    """

    workers: int = 2
    steps: int = 20
    timeout_s: float = 120.0
    in_place: bool = False


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was found.

    Args:
        notes: what could not be looked at, and why.
        looked: whether anything could be.
        printed: the last that each rank has printed, where it was run.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    looked: bool
    printed: tuple[str, ...] = ()

    @property
    def sick(self) -> bool:
        """Whether there is more than advice."""
        return any(finding.level != "advice" for finding in self.findings)


def examine(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    limits: Limits | None = None,
    select: Collection[str] = (),
    ignore: Collection[str] = (),
    tell: Tell | None = None,
) -> Examination:
    """Reads ``script``, and runs it under a few ranks unless ``limits`` is ``None``. Not collective.

    Args:
        arguments: of the script.
        select: ids of rules; empty: all. ``ignore``: ids to leave out.
        tell: is told how far the run is, whenever that changes.

    Raises:
        UsageError: a script that cannot be opened, or an unknown rule.
    """
    for name in (*select, *ignore):
        rule(name)
    was_read = read(script)
    findings, cleared, notes, looked = list(was_read.findings), set[str](), list(was_read.notes), was_read.looked
    printed: tuple[str, ...] = ()
    if limits is not None and was_read.looked:
        watched = watch(
            script,
            arguments,
            workers=limits.workers,
            steps=limits.steps,
            timeout_s=limits.timeout_s,
            in_place=limits.in_place,
            tell=tell,
        )
        findings += watched.findings
        cleared |= watched.cleared
        notes += watched.notes
        printed = watched.printed
    silenced = {path: ignored_lines(Path(path)) for path in {finding.path for finding in findings}}
    kept = [
        finding
        for finding in unexplained(merged(findings, cleared))
        if (not select or finding.id in select)
        and finding.id not in ignore
        and finding.id not in silenced[finding.path].get(finding.line, ())
    ]
    return Examination(findings=tuple(kept), notes=tuple(notes), looked=looked, printed=printed)
