"""Under which conditions the script comes to a line, as the reader has understood it: for whoever has seen a line run
and asks what kept the others away."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from paceline.doctor.circumstances import Circumstances
from paceline.doctor.lines import Asked, Line, head_of
from paceline.doctor.reading.evidence import local
from paceline.doctor.reading.trace import Condition, Trace

__all__ = ["circumstances"]


def circumstances(trace: Trace) -> Circumstances:
    """Of all lines at which the script does something that matters to training."""
    statement = functools.cache(lambda path, line: head_of(str(Path(path).resolve()), line))
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
