"""Under which conditions the script comes to a line, as the reader has understood it: for whoever has seen a line run
and asks what kept the others away. Plain data, without the reader's values."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.doctor.lines import Asked, statement_at
from paceline.doctor.reading.evidence import local
from paceline.doctor.reading.trace import Condition, Trace

__all__ = ["Circumstances", "circumstances"]

Line = tuple[str, int]
"""A file, by its absolute path, and the first line of a statement in it."""


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What was understood of the lines that reading has reached.

    Args:
        ways: by line each way to it, from there outwards through the calls, with its conditions, innermost first:
            those inside of which it stands, and those of the rank that have made others leave before.
    """

    ways: Mapping[Line, Mapping[tuple[Line, ...], tuple[Asked, ...]]] = field(default_factory=dict)

    def around(self, way: Sequence[Line]) -> tuple[Asked, ...] | None:
        """The conditions on the way that has most in common with this one; ``None``: reading never came here."""
        known = self.ways.get(_statement(*way[0]), {}) if way else {}
        lines = [_statement(*line) for line in way] if known else []
        return max(known.items(), key=lambda one: _common(one[0], lines), default=((), None))[1]


def circumstances(trace: Trace) -> Circumstances:
    """Of all lines at which the script does something that matters to training."""
    statement = functools.cache(lambda path, line: _statement(str(Path(path).resolve()), line))
    ways: dict[Line, dict[tuple[Line, ...], tuple[Asked, ...]]] = {}
    for event in trace.events:
        lines = [(event.path, event.line), *((call.path, _line(call.node)) for call in reversed(event.calls))]
        way = tuple(statement(*line) for line in lines)
        if way in ways.setdefault(way[0], {}):
            continue
        asked: list[Asked] = []
        for condition in reversed(event.under):
            of_rank = "rank" in condition.value.labels and not local(condition)
            if _chooses(condition) and (of_rank or any(_holds(condition, *line) for line in lines)):
                text = condition.text if condition.holds else f"not ({condition.text})"
                path, _ = statement(condition.path, condition.line)
                asked.append(Asked(path=path, line=condition.line, text=text, of_rank=of_rank))
        ways[way[0]][way] = tuple(asked)
    return Circumstances(ways=ways)


def _chooses(condition: Condition) -> bool:
    """Not of a loop, which may be left, nor of an exception, nor for being the main script."""
    return isinstance(condition.node, ast.If | ast.IfExp | ast.BoolOp) and "__main__" not in condition.text


def _holds(condition: Condition, path: str, line: int) -> bool:
    """Whether a line stands inside of what is asked; else it is behind it, and the other arm has left."""
    return path == condition.path and condition.line <= line <= (getattr(condition.node, "end_lineno", None) or 0)


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def _common(way: Sequence[Line], other: Sequence[Line]) -> int:
    """How many lines both have in common, from the innermost on."""
    return next((n for n, (a, b) in enumerate(zip(way, other, strict=False)) if a != b), min(len(way), len(other)))


def _statement(path: str, line: int) -> Line:
    return path, statement_at(path, line).start
