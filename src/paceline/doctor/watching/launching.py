"""What a script wants to be told by whoever starts it, besides what torchrun puts into its environment."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.doctor.lines import parsed
from paceline.doctor.watching.sources import texts_with

__all__ = ["rank_option"]

_OPTIONS = frozenset({"--local_rank", "--local-rank"})
_ASKS_ENVIRONMENT = re.compile(r"LOCAL_RANK")
"""Who does so knows torchrun, and needs no option."""


def rank_option(script: Path, arguments: Sequence[str]) -> str | None:
    """The option by which each rank is to be told its local rank, as ``torch.distributed.launch`` does.

    ``None``: the script declares none, or does without it, or ``arguments`` hold it.
    """
    first, *others = texts_with(script)
    others = [text for text in others if "__main__" not in text]  # that are scripts themselves, with options of theirs
    if any(_ASKS_ENVIRONMENT.search(text) for text in (first, *others)):
        return None
    if any(word.partition("=")[0] in _OPTIONS for word in arguments):
        return None
    return next((option for text in (first, *others) for option in _declared(text)), None)


def _declared(text: str) -> Iterator[str]:
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and arg.value in _OPTIONS)
