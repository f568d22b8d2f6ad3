"""What the source says around a line: conditions it stands under, loops it is in. Reads files, runs nothing.

Loops are a matter of syntax. What is asked for the rank is not: there the reader answers, which has followed the script
to a line, and only of lines that it never came to the text is looked at.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.doctor.circumstances import Asked
from paceline.doctor.lines import parsed, text_at, text_of
from paceline.doctor.watching.records import Place, Run

__all__ = ["Loop", "conditions", "line_of", "loops_around"]

_RANK = re.compile(
    r"(?:(?<![A-Za-z])(?:my)?rank|(?<=[a-z])Rank|RANK)(?!ing|ed)|"  # not `ranking`, not `frank`
    r"(?i:is_main|is_master|is_primary|is_leader|is_chief|main_process|master_process|process_index)"
)


@dataclass(frozen=True)
class Loop:
    """A loop, and how it may be left before its end.

    Args:
        line: of its head.
        exits: the lines of its ``break``, ``return`` and ``raise`` under a condition, with that condition; last, of a
            ``while``, its head.
        skips: the same of its ``continue``.
    """

    path: str
    line: int
    last: int
    exits: tuple[tuple[int, str], ...]
    skips: tuple[tuple[int, str], ...]

    def holds(self, place: Place) -> bool:
        return place.path == self.path and self.line <= place.line <= self.last


def conditions(run: Run, places: Sequence[Place]) -> list[Asked]:
    """The conditions under which the lines of a call stand, innermost first, each with its own line.

    An ``if`` that decides whether the script is the main one is none.
    """
    known = run.circumstances.around([(place.path, place.line) for place in places])
    return list(known) if known is not None else list(_written_around(places))


def _written_around(places: Sequence[Place]) -> Iterator[Asked]:
    for place in places:
        for node in _around(place):
            if isinstance(node, ast.If) and node.test.lineno <= place.line:
                text = ast.unparse(node.test)
                if "__main__" not in text and not node.test.lineno <= place.line <= (node.test.end_lineno or 0):
                    of_rank = _RANK.search(text) is not None
                    yield Asked(path=place.path, line=node.lineno, text=text, of_rank=of_rank)


def loops_around(places: Sequence[Place], apart_from: Sequence[Place] = ()) -> list[Loop]:
    """The loops around the lines of a call that are not around all of those of another one, innermost first."""
    found: list[Loop] = []
    for place in places:
        for node in _around(place):
            if isinstance(node, ast.For | ast.While | ast.AsyncFor):
                exits, skips = _leaving(node)
                loop = Loop(place.path, node.lineno, node.end_lineno or node.lineno, tuple(exits), tuple(skips))
                if not any(loop.holds(other) for other in apart_from):
                    found.append(loop)
    return found


def line_of(place: Place | None) -> str:
    """Its text; of no place none."""
    return (text_at(place.path, place.line) or "") if place is not None else ""


def _around(place: Place) -> list[ast.AST]:
    """The statements around a line, in its own function, innermost first."""
    found: list[ast.AST] = []
    body: Sequence[ast.AST] = [_tree(place.path)]
    while body:
        node = next((n for n in body if _first(n) <= place.line <= getattr(n, "end_lineno", place.line)), None)
        if node is None:
            break
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.clear()
        found.append(node)
        body = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler)]
    return found[::-1]


def _first(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def _leaving(loop: ast.For | ast.While | ast.AsyncFor) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    exits: list[tuple[int, str]] = []
    skips: list[tuple[int, str]] = []

    def look(body: Sequence[ast.stmt], condition: str | None, nested: bool) -> None:
        for statement in body:
            if condition is not None and isinstance(statement, ast.Break | ast.Return | ast.Raise):
                if not (nested and isinstance(statement, ast.Break)):
                    exits.append((statement.lineno, condition))
            elif condition is not None and isinstance(statement, ast.Continue) and not nested:
                skips.append((statement.lineno, condition))
            elif isinstance(statement, ast.If):
                look(statement.body, ast.unparse(statement.test), nested)
                look(statement.orelse, f"not ({ast.unparse(statement.test)})", nested)
            elif isinstance(statement, ast.For | ast.While | ast.AsyncFor):
                look(statement.body, condition, True)
            elif isinstance(statement, ast.With | ast.AsyncWith | ast.Try):
                look(statement.body, condition, nested)
                for handler in getattr(statement, "handlers", ()):
                    look(handler.body, "an exception", nested)

    look(loop.body, None, False)
    if isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant):
        exits.append((loop.lineno, f"not ({ast.unparse(loop.test)})"))
    return exits, skips


def _tree(path: str) -> ast.Module:
    return parsed(text_of(path))
