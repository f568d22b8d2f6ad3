"""What a source file says at a line: the statement there, the comments that silence rules, its text. Runs
nothing."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "Line",
    "comments",
    "head_of",
    "named",
    "parsed",
    "shown",
    "statement_at",
    "text_at",
    "text_of",
]

Line = tuple[str, int]
"""A file, by its absolute path, and the first line of a statement in it."""


_IGNORE = re.compile(r"#\s*paceline:\s*ignore\b(?:\[([^\]]*)\])?")


def shown(path: str, script: Path) -> str:
    """An absolute path as the user would write it, and as reading has it: like the script itself."""
    file, folder = Path(path), script.parent.resolve()
    if file == script.resolve():
        return str(script)
    if file.is_relative_to(folder):
        return str(script.parent / file.relative_to(folder))
    if not script.is_absolute() and file.is_relative_to(Path.cwd()):
        return str(file.relative_to(Path.cwd()))
    return path


def named(note: str, script: Path) -> str:
    """A sentence in which files with a line, ``/home/me/train.py:3``, are named as the user would write them."""
    return re.sub(r"/\S+?(?=:\d)", lambda path: shown(path[0], script), note)


def text_of(path: str) -> str:
    """A file in the encoding that it declares; as far as it can be read."""
    try:
        with tokenize.open(path) as source:
            return source.read()
    except (SyntaxError, UnicodeDecodeError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def text_at(path: str, line: int) -> str | None:
    """A line of it, from 1; ``None``: there is none."""
    lines = text_of(path).split("\n")
    return lines[line - 1].strip() if 0 < line <= len(lines) else None


def statement_at(path: str, line: int) -> range:
    """The lines of the innermost statement that a line belongs to; of one with a body, those of its head.

    A line that is in no statement stands for itself.
    """
    return next((lines for lines in _statements(text_of(path)) if line in lines), range(line, line + 1))


def head_of(path: str, line: int) -> Line:
    """The statement that a line belongs to."""
    return path, statement_at(path, line).start


def comments(path: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """By line the rules that a comment ``# paceline: ignore[id, id]`` there names; none, if it names none."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(text_of(path)).readline):
            if token.type == tokenize.COMMENT and (match := _IGNORE.search(token.string)):
                yield token.start[0], tuple(name for part in (match[1] or "").split(",") if (name := part.strip()))
    except (tokenize.TokenError, SyntaxError):
        return  # as far as it is Python


@functools.lru_cache(maxsize=64)
def parsed(text: str) -> ast.Module:
    """The syntax tree of a source; an empty one, if it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the script: invalid escapes and the like
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


@functools.lru_cache(maxsize=64)
def _statements(text: str) -> list[range]:
    """The lines of each statement, shortest first: what is inside of another one comes before it."""
    found = []
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.stmt):
            body = [held for held in ast.iter_child_nodes(node) if isinstance(held, _BODIES)]
            head = max((_end(held) for held in ast.iter_child_nodes(node) if not isinstance(held, _BODIES)), default=0)
            end = max(head, node.lineno) if body else node.end_lineno or node.lineno
            found.append(range(node.lineno, end + 1))
    return sorted(found, key=len)


_BODIES = (ast.stmt, ast.excepthandler, ast.match_case)


def _end(node: ast.AST) -> int:
    """The last line of an expression, or of those that it is made of."""
    own = getattr(node, "end_lineno", None)
    return own if own is not None else max(map(_end, ast.iter_child_nodes(node)), default=0)
