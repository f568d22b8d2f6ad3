"""Under which conditions a script comes to its lines: what reading has understood, and the run pass asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.doctor.lines import Line, head_of

__all__ = ["Asked", "Circumstances"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A condition that holds where a line is reached.

    Args:
        line: from 1, where it is asked.
        text: what holds, as the script says it; ``not (...)`` on the other arm.
        of_rank: whether the answer depends on which rank it is, and not on what the rank sees.
    """

    path: str
    line: int
    text: str
    of_rank: bool


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What was understood of the lines that reading has reached.

    Args:
        ways: by line each way to it, from there outwards through the calls, with its conditions, innermost first:
            those inside of which it stands, and those of the rank that have made others leave before.
        averages_weights: whether, once it trains, ranks may make their weights the same again by themselves, so that
            these may come apart in between, as in local SGD.
    """

    ways: Mapping[Line, Mapping[tuple[Line, ...], tuple[Asked, ...]]] = field(default_factory=dict)
    averages_weights: bool = False

    def around(self, way: Sequence[Line]) -> tuple[Asked, ...] | None:
        """The conditions on this way, as far outwards as it is known; ``None``: reading has not come this way."""
        known = self.ways.get(head_of(*way[0]), {}) if way else {}
        lines = [head_of(*line) for line in way] if known else []
        alike = (asked for own, asked in known.items() if all(a == b for a, b in zip(own, lines, strict=False)))
        return next(alike, None)
