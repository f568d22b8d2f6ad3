"""What comes of running a script with some ranks and with one worker, and how it is told. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.doctor.rules import Severity
from paceline.doctor.watching.records import Place

__all__ = ["Comparison", "Shown"]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the numbers say about a mistake.

    Args:
        ids: the rules that it may be, most specific first; evidence for the first one that was found.
        evidence: in a sentence.
        place: where it is, if the numbers prove that it is the first of ``ids``; ``None``: they only agree with it.
        message: what is wrong there; ``severity``: where that is less bad than the rule.
    """

    ids: tuple[str, ...]
    evidence: str
    place: Place | None = None
    message: str = ""
    severity: Severity | None = None


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
