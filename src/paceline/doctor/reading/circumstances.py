"""Under which conditions the script comes to a line, as the reader has understood it: for whoever has seen a line run
and asks what kept the others away."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from paceline.doctor.circumstances import Asked, Circumstances
from paceline.doctor.lines import Line, head_of
from paceline.doctor.reading.evidence import is_weights, local
from paceline.doctor.reading.trace import Condition, Trace
from paceline.doctor.reading.values import words

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
    return Circumstances(ways=ways, averages_weights=_averages_weights(trace))


_AVERAGING = words("parameters_to_vector model_averaging post_localSGD_hook PostLocalSGDOptimizer")
"""In names of torch's that lead to weights being averaged, whoever sends them then."""


def _averages_weights(trace: Trace) -> bool:
    if any(word in name for name in trace.names for word in _AVERAGING):
        return True
    first = next(trace.of("step"), None)
    averaged = [
        e for e in trace.of("collective") if "broadcast" not in e.name and any(map(is_weights, e.arguments.values()))
    ]
    return first is not None and any(e.number > first.number or set(e.loops) & set(first.loops) for e in averaged)


def _chooses(condition: Condition) -> bool:
    """Not of a loop, which may be left, nor of an exception, nor for being the main script."""
    return isinstance(condition.node, ast.If | ast.IfExp | ast.BoolOp) and "__main__" not in condition.text


def _holds(condition: Condition, path: str, line: int) -> bool:
    """Whether a line stands inside of what is asked; else it is behind it, and the other arm has left."""
    return path == condition.path and condition.line <= line <= (getattr(condition.node, "end_lineno", None) or 0)


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)
