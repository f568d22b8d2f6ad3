"""What comes of running a script with some ranks and with one worker, and how it is told. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.doctor.findings import Finding
from paceline.doctor.watching.records import Place

__all__ = ["Comparison", "Shown", "explained", "proven"]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the numbers say about a mistake.

    Args:
        ids: the rules that it may be, most specific first; evidence for the first one that was found.
        evidence: in a sentence.
        place: where it is, if the numbers prove that it is the first of ``ids``; ``None``: they only agree with it.
        message: what is wrong there.
    """

    ids: tuple[str, ...]
    evidence: str
    place: Place | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run of some ranks beside one of a single worker with the same samples.

    Args:
        equal: whether both compute the same; ``None``: it cannot be said.
        steps: so many were compared.
        loss: before each of them, that of the ranks (the mean over them) and that of one worker.
        gradient: where it differs most: ``step``, ``difference`` (relative), ``ratio``, ``parameter``.
        why: what was seen, or why nothing can be said; a sentence.
        shown: what explains a difference.
        explained: whether something does that was found, or is proven.
    """

    equal: bool | None
    steps: int = 0
    loss: tuple[tuple[float, float], ...] = ()
    gradient: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    shown: tuple[Shown, ...] = ()
    explained: bool = False

    @property
    def broken(self) -> bool:
        """Whether there is a difference that nothing else which is told accounts for."""
        return self.equal is False and not self.explained

    def as_dict(self) -> dict[str, Any]:
        """As it is written to JSON."""
        loss, gradient = [list(pair) for pair in self.loss], dict(self.gradient)
        return {"equal": self.equal, "steps": self.steps, "loss": loss, "gradient": gradient, "why": self.why}

    def as_text(self) -> str:
        """For people: two or three lines."""
        verdict = {True: "the same", False: "NOT the same", None: "not known"}[self.equal]
        lines = [f"compared with one worker: {verdict}: {self.why}"]
        if self.loss:
            pairs = ", ".join(f"{several:.6g} | {one:.6g}" for several, one in self.loss)
            lines.append(f"  loss of the ranks | of one worker, before each step: {pairs}")
        return "\n".join(lines)


def proven(comparison: Comparison | None, findings: Collection[Finding]) -> Iterator[Finding]:
    """What the numbers prove and nobody else has found."""
    for shown in comparison.shown if comparison is not None else ():
        if shown.place is not None and not any(finding.id == shown.ids[0] for finding in findings):
            yield Finding(
                id=shown.ids[0],
                path=shown.place.path,
                line=shown.place.line,
                message=shown.message,
                evidence=shown.evidence,
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
