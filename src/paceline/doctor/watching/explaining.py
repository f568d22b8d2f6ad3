"""What a comparison with one worker adds to the findings: proof of one, or evidence for those that are there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from paceline.doctor.findings import Finding
from paceline.doctor.watching.comparison import Comparison

__all__ = ["explained", "proven"]


def proven(comparison: Comparison, findings: Collection[Finding]) -> Iterator[Finding]:
    """What the numbers prove and nobody else has found."""
    for shown in comparison.shown:
        if shown.place is not None and not any(finding.id == shown.ids[0] for finding in findings):
            yield Finding(
                id=shown.ids[0],
                path=shown.place.path,
                line=shown.place.line,
                message=shown.message,
                evidence=shown.evidence,
                severity=shown.severity,
                confidence="certain",
                seen="run",
            )


def explained(findings: Sequence[Finding], comparison: Comparison) -> tuple[list[Finding], Comparison]:
    """Both, with what the numbers say added to what was found: of each explanation the most specific finding."""
    told, why = list(findings), comparison.why
    holds = comparison.explained
    for shown in comparison.shown:
        holds |= shown.place is not None
        number = next((n for id in shown.ids for n, f in enumerate(told) if f.id == id), None)
        if number is not None:
            holds, finding = True, told[number]
            why += f" [{finding.id}]"
            if shown.evidence not in finding.evidence:
                evidence = "; ".join(text for text in (finding.evidence, shown.evidence) if text)
                told[number] = replace(finding, evidence=evidence)
    return told, replace(comparison, why=why, explained=holds)
