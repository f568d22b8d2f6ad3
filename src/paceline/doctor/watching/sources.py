"""What the source says around a line: conditions it stands under, loops it is in. Reads files, runs nothing."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.doctor.lines import parsed, text_at, text_of
from paceline.doctor.watching.records import Place

__all__ = ["Loop", "conditions", "is_of_rank", "line_of", "loops_around", "names_gpus"]

_RANK = re.compile(
    r"(?:(?<![A-Za-z])(?:my)?rank|(?<=[a-z])Rank|RANK)(?!ing|ed)|"  # not `ranking`, not `frank`
    r"(?i:is_main|is_master|is_primary|is_leader|is_chief|main_process|master_process|process_index)"
)

_GPUS = re.compile(r"cuda|nccl|torch\.accelerator")
"""What says so."""

_ANSWER = re.compile(rf"({_RANK.pattern}).*[=<>]|not .*({_RANK.pattern})")


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


def conditions(places: Sequence[Place]) -> list[tuple[Place, str]]:
    """The conditions under which the lines of a call stand, innermost first, each with its own line.

    An ``if`` that decides whether the script is the main one is none.
    """
    found = []
    for place in places:
        for node in _around(place):
            if isinstance(node, ast.If) and node.test.lineno <= place.line:
                text = ast.unparse(node.test)
                if "__main__" not in text and not node.test.lineno <= place.line <= (node.test.end_lineno or 0):
                    found.append((Place(place.path, node.lineno), text))
    return found


def is_of_rank(condition: str, path: str) -> bool:
    """Whether a condition asks for the rank, by itself or through a name that was given its answer."""
    if _RANK.search(condition):
        return True
    names = set(re.findall(r"[A-Za-z_]\w*", condition))
    return bool(names & _rank_names(path))


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


def line_of(place: Place) -> str:
    """Its text."""
    return text_at(place.path, place.line) or ""


def names_gpus(script: Path) -> bool:
    """Whether a script, or a file beside it that it imports, asks for GPUs."""
    pending, seen = [script], set[Path]()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        if _GPUS.search(text_of(str(path))):
            return True
        for name in re.findall(r"^\s*(?:from|import)\s+([\w.]+)", text_of(str(path)), re.M):
            base = script.parent.joinpath(*name.strip(".").split("."))
            pending += [file for file in (base.with_suffix(".py"), *base.glob("*.py")) if file.is_file()]
    return False


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


def _rank_names(path: str) -> frozenset[str]:
    """Names that are given the answer to a question for the rank."""
    return _rank_names_in(text_of(path))


@functools.lru_cache(maxsize=64)
def _rank_names_in(text: str) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Assign) and _ANSWER.search(ast.unparse(node.value)):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            found |= {target.attr for target in node.targets if isinstance(target, ast.Attribute)}
    return frozenset(found)


def _tree(path: str) -> ast.Module:
    return parsed(text_of(path))
