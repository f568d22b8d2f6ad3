"""What a script wants of whoever starts it, besides what torchrun puts into its environment: GPUs, an option for the
rank."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.doctor.lines import parsed, text_of

__all__ = ["names_gpus", "rank_option"]

_OPTIONS = frozenset({"--local_rank", "--local-rank"})
_GPUS = re.compile(r"cuda|nccl|torch\.accelerator")


def names_gpus(script: Path) -> bool:
    """Whether a script, or a file beside it that it imports, asks for GPUs."""
    return any(_GPUS.search(text) for text in _texts_of_script(script))


def rank_option(script: Path, arguments: Sequence[str]) -> str | None:
    """The option by which each rank is to be told its local rank, as ``torch.distributed.launch`` does.

    ``None``: the script declares none, or does without it, or ``arguments`` hold it.
    """
    first, *others = _texts_of_script(script)
    others = [text for text in others if "__main__" not in text]  # that are scripts themselves, with options of theirs
    if any("LOCAL_RANK" in text for text in (first, *others)):  # who asks for it knows torchrun, and needs no option
        return None
    if any(word.partition("=")[0] in _OPTIONS for word in arguments):
        return None
    return next((option for text in (first, *others) for option in _declared(text)), None)


def _texts_of_script(script: Path) -> Iterator[str]:
    """The text of a script and of each file beside it that it imports."""
    pending, seen = [script], set[Path]()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        yield (text := text_of(str(path)))
        for name in re.findall(r"^\s*(?:from|import)\s+([\w.]+)", text, re.M):
            base = script.parent.joinpath(*name.strip(".").split("."))
            pending += [file for file in (base.with_suffix(".py"), *base.glob("*.py")) if file.is_file()]


def _declared(text: str) -> Iterator[str]:
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and arg.value in _OPTIONS)
