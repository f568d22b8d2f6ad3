"""Both passes over one script, and what they found together."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.doctor.causes import unexplained
from paceline.doctor.findings import Finding, Obeyed, merged, twins
from paceline.doctor.lines import comments, statement_at
from paceline.doctor.reading import read
from paceline.doctor.rules import RULES, rule
from paceline.doctor.watching import Limits, Watched, watch
from paceline.doctor.watching.comparing import compare
from paceline.doctor.watching.comparison import Comparison
from paceline.doctor.watching.explaining import explained, proven
from paceline.errors import UsageError

__all__ = ["Examination", "Limits", "examine", "settled"]


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was found.

    Args:
        notes: what could not be looked at, and why.
        cannot: why a pass that was asked for could not look at anything; ``None``: it could.
        printed: the last that each rank has printed, where it was run.
        comparison: with one worker, where that was asked for and the script could be run.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    cannot: str | None = None
    printed: tuple[str, ...] = ()
    comparison: Comparison | None = None

    @property
    def looked(self) -> bool:
        return self.cannot is None

    @property
    def sick(self) -> bool:
        """Whether there is more than advice, or the ranks do not compute what one worker does and nothing says why."""
        broken = self.comparison is not None and self.comparison.broken
        return broken or any(finding.level != "advice" for finding in self.findings)


def examine(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    limits: Limits | None = None,
    select: Collection[str] = (),
    ignore: Collection[str] = (),
    with_one: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Examination:
    """Reads ``script``, and runs it under a few ranks unless ``limits`` is ``None``. Not collective.

    Args:
        arguments: of the script.
        select: ids of rules; empty: all. ``ignore``: ids to leave out.
        with_one: also compares the ranks with one worker, in runs of their own.
        tell: is told how far the run is, whenever that changes.

    Raises:
        UsageError: a script that cannot be opened, an unknown rule; or it cannot be run here and reading found nothing.
    """
    for name in (*select, *ignore):
        rule(name)
    was_read = read(script)
    if not was_read.looked:
        return Examination(findings=(), notes=was_read.notes, cannot="; ".join(was_read.notes))
    try:
        watched = (
            watch(script, arguments, limits, circumstances=was_read.circumstances, tell=tell)
            if limits is not None
            else Watched()
        )
    except UsageError as error:
        if not was_read.findings:
            raise
        watched = Watched(notes=(str(error),), cannot=str(error))
    found = (*was_read.findings, *watched.findings)
    files = dict.fromkeys([str(script), *(finding.path for finding in found)])
    findings = settled(found, obeyed=watched.obeyed, select=select, ignore=ignore)
    comparison = None
    if with_one and limits is not None and watched.cannot is None:
        comparison = compare(script, arguments, limits, tell=tell)
        findings = settled([*findings, *proven(comparison, findings)], select=select, ignore=ignore)
        findings, comparison = explained(findings, comparison)
    return Examination(
        findings=tuple(findings),
        notes=(*was_read.notes, *watched.notes, *_mistaken(files)),
        cannot=watched.cannot,
        printed=watched.printed,
        comparison=comparison,
    )


def settled(
    findings: Iterable[Finding],
    *,
    obeyed: Collection[Obeyed] = (),
    select: Collection[str] = (),
    ignore: Collection[str] = (),
) -> list[Finding]:
    """What is told of all that both passes have found, the worst first.

    In this order: what nobody asked for goes, so that it explains nothing; then what was read and the run has refuted;
    then what follows from the rest; and each mistake is told once.
    """
    wanted = (set(select) or set(RULES)) - set(ignore)
    asked = _audible([finding for finding in findings if finding.id in wanted])
    held = [f for f in asked if f.seen == "run" or not any(rule.holds_for(f) for rule in obeyed)]
    return merged(unexplained(held))


def _audible(findings: Sequence[Finding]) -> list[Finding]:
    """Without the mistakes that a comment says are meant, at whichever of the lines at which they may be told."""
    quiet = [finding for finding in findings if _silenced(finding)]
    quiet += [one for both in twins(findings) for one in both if any(finding in quiet for finding in both)]
    return [finding for finding in findings if finding not in quiet]


def _silenced(finding: Finding) -> bool:
    """Whether a comment in its statement, on whichever line, says that it is meant."""
    return any(
        line in statement_at(path, own) and finding.id in names
        for path, own in finding.lines
        for line, names in comments(path)
    )


def _mistaken(files: Iterable[str]) -> Iterator[str]:
    """Comments that silence nothing, since there is no such rule."""
    for path in files:
        for line, names in comments(path):
            if not names:
                yield f"{path}:{line}: this comment names no rule to ignore: write `# paceline: ignore[ID]`"
            for name in names:
                if name not in RULES:
                    near = difflib.get_close_matches(name, RULES, n=1)
                    asked = f"did you mean {near[0]!r}?" if near else "`paceline doctor --explain all` lists them"
                    yield f"{path}:{line}: there is no rule {name!r} to ignore; {asked}"
