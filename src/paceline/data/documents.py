"""From what the user named to units of work: files, documents and how they are split. Pure but for reading sizes.

A *document* is a text file or one line of a ``.jsonl`` file. A *unit* is about one MiB of them, the most that is in
memory at once: several small files, whole lines of a ``.jsonl``, or a piece of a long file. Units are a function of
the files alone, so the bytes written cannot depend on who encodes them.
"""

from __future__ import annotations

import math
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from paceline.errors import DataError

__all__ = ["PYTHON_STDLIB", "InputFile", "Split", "SplitRule", "Unit", "find_files", "plan_units", "planned_bytes"]

Split = Literal["train", "valid"]

PYTHON_STDLIB = "python-stdlib"
"""The source that needs no download: every ``.py`` of the running interpreter's standard library, its tests included,
``site-packages`` not. About 30 MB; a distribution that ships no tests has 12. Files that are not UTF-8 (the library
tests its own decoding with them) are skipped and counted."""

PIECE_BYTES = 2**20
_BREAK_BYTES = 2**16
_FILES_OF_A_UNIT = 512
_HASH_SEED = 0x7061_6365


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file to read. ``lenient``: one that is not UTF-8 is skipped whatever the user's choice is."""

    path: Path
    size: int
    lines: bool
    lenient: bool = False


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """Which part of a document is held out: a function of its content, never of where or when it was met.

    * ``document``: all of it, when the hash of its first MiB is below the fraction;
    * ``tail``: the last fraction of every document, for so few of them that hashes cannot give the fraction;
    * ``none``: nothing.
    """

    kind: Literal["document", "tail", "none"]
    valid: float

    @property
    def sentence(self) -> str:
        """What ``index.json`` says about it."""
        return {
            "document": f"a document is valid where xxh3_64(its first {PIECE_BYTES} bytes, seed {_HASH_SEED})"
            f" < {self.valid} * 2**64",
            "tail": f"the last {self.valid} of every document's bytes is valid, from the next newline on:"
            " too few documents to split by their hashes",
            "none": "nothing is valid",
        }[self.kind]

    def split(self, start: bytes) -> Split:
        """Of a document that begins with ``start``, its first MiB or all of it (not for ``tail``)."""
        if self.kind == "none":
            return "train"
        return "valid" if xxhash.xxh3_64_intdigest(start[:PIECE_BYTES], _HASH_SEED) < self.valid * 2**64 else "train"

    def cut_target(self, size: int) -> int:
        """Where the held-out tail of ``size`` bytes should begin; `cut` finds a good place at or behind it."""
        return math.ceil((1 - self.valid) * size)

    def cut(self, target: int, size: int, behind: bytes) -> int:
        """Where it does begin, given up to a MiB of what lies ``behind`` the target.

        >>> SplitRule(kind="tail", valid=0.5).cut(4, 8, b"d\\nef")
        6
        """
        newline = behind[:PIECE_BYTES].find(b"\n")
        if newline >= 0 and target + newline + 1 < size:
            return target + newline + 1
        return target + _continuation(behind)


def _continuation(data: bytes) -> int:
    """How many bytes at the start of ``data`` continue a UTF-8 character begun before: 0 to 3."""
    return next((i for i, byte in enumerate(data[:3]) if byte & 0xC0 != 0x80), min(3, len(data)))


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is encoded in one go.

    ``files``: whole small files. ``lines``: whole lines of one ``.jsonl``. ``piece``: a part of one long text file,
    whose ``split`` is already known; ``document`` counts the long files and ``ends`` says whether this closes its text.
    """

    kind: Literal["files", "lines", "piece"]
    files: tuple[InputFile, ...]
    start: int = 0
    stop: int = 0
    split: Split = "train"
    document: int | None = None
    ends: bool = True

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files) if self.kind == "files" else self.stop - self.start


def find_files(sources: Sequence[str | Path], glob: str | None = None) -> list[InputFile]:
    """The files behind ``sources``, in the order given; those of a folder by relative path.

    Args:
        sources: files, folders (searched to any depth) and the word ``python-stdlib``.
        glob: which files of a folder; default ``*.txt`` and ``*.jsonl``.

    Raises:
        DataError: a source is missing, or a folder has no such file.
    """
    found: list[InputFile] = []
    for source in sources:
        path = Path(source)
        if str(source) == PYTHON_STDLIB:
            found += _stdlib()
        elif path.is_dir():
            found += _folder(path, glob)
        elif path.is_file():
            found.append(_input(path))
        else:
            raise DataError(
                "cannot read a source",
                found=f"{str(source)!r}, which {'is neither' if path.exists() else 'does not exist'}",
                needed=f"a file, a folder or the word {PYTHON_STDLIB}",
                fix="Check the path",
            )
    if not any(file.size for file in found):
        raise DataError(
            "cannot prepare data",
            found=f"{len(found)} files without a byte" if found else "no sources",
            needed="text",
            fix="Name files, folders or python-stdlib",
        )
    return [file for file in found if file.size]


def _input(path: Path, *, lenient: bool = False) -> InputFile:
    if not os.access(path, os.R_OK):
        raise DataError(f"cannot read {path}", found="no permission", needed="a readable file", fix="Check its mode")
    return InputFile(path=path, size=path.stat().st_size, lines=path.suffix in (".jsonl", ".ndjson"), lenient=lenient)


def _stdlib() -> list[InputFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in ("site-packages", "dist-packages", "__pycache__")]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return [_input(path, lenient=True) for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix())]


def _folder(folder: Path, glob: str | None) -> list[InputFile]:
    patterns = [glob] if glob else ["*.txt", "*.jsonl"]
    try:
        paths = {path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()}
    except (NotImplementedError, ValueError) as error:
        raise DataError(
            f"cannot use the glob {glob!r}",
            found=str(error),
            needed="a pattern of names below the folder",
            fix="Use --glob '*.txt'",
        ) from error
    if not paths:
        kinds = Counter(path.suffix or path.name for path in folder.rglob("*") if path.is_file())
        there = ", ".join(f"{count} {suffix}" for suffix, count in kinds.most_common(3))
        suggestion = next(iter(kinds.most_common(1)), (".txt", 0))[0]
        raise DataError(
            f"cannot find text in {folder}",
            found=f"no {' or '.join(patterns)}, but {there}" if there else "an empty folder",
            needed="at least one file",
            fix=f"Name the files with a glob, such as --glob '*{suggestion}'" if there else "Check the path",
        )
    return [_input(path) for path in sorted(paths, key=lambda path: path.relative_to(folder).as_posix())]


def planned_bytes(files: Sequence[InputFile], limit_bytes: int | None = None) -> int:
    """How much `plan_units` will cover, for progress: with a limit, up to the rest of one line too little."""
    total = 0
    for file in files:
        if limit_bytes is not None and total >= limit_bytes:
            break
        total += file.size if limit_bytes is None or not file.lines else min(file.size, limit_bytes - total)
    return total


def plan_units(files: Sequence[InputFile], rule: SplitRule, limit_bytes: int | None = None) -> Iterator[Unit]:
    """The units of ``files`` in order, read no further than needed to find boundaries.

    Args:
        limit_bytes: stop after the document with which this many bytes of source are reached.
    """
    left = limit_bytes if limit_bytes is not None else sum(file.size for file in files)
    small: list[InputFile] = []
    documents = 0
    for file in files:
        if left <= 0:
            break
        fits = not file.lines and file.size <= PIECE_BYTES
        full = len(small) >= _FILES_OF_A_UNIT or sum(each.size for each in small) + file.size > PIECE_BYTES
        if small and (full or not fits):
            yield Unit(kind="files", files=tuple(small))
            small = []
        if fits:
            small.append(file)
        elif file.lines:
            yield from _lines(file, left)
        else:
            yield from _pieces(file, rule, documents)
            documents += 1
        left -= file.size
    if small:
        yield Unit(kind="files", files=tuple(small))


def _lines(file: InputFile, limit: int) -> Iterator[Unit]:
    """Whole lines of ``file``, about a MiB a unit, up to the line in which ``limit`` bytes are reached."""
    start, end = 0, min(limit, file.size)
    with file.path.open("rb") as reader:
        while start < end:
            reader.seek(min(start + PIECE_BYTES, end) - 1)
            reader.readline()
            stop = reader.tell()
            yield Unit(kind="lines", files=(file,), start=start, stop=stop)
            start = stop


def _pieces(file: InputFile, rule: SplitRule, document: int) -> Iterator[Unit]:
    """A long text in pieces of a MiB, cut behind the last newline of their last 64 KiB, or else between characters."""
    with file.path.open("rb") as reader:
        texts: list[tuple[Split, int, int]]
        if rule.kind == "tail":
            target = rule.cut_target(file.size)
            reader.seek(target)
            cut = rule.cut(target, file.size, reader.read(PIECE_BYTES))
            texts = [("train", 0, cut), ("valid", cut, file.size)]
        else:
            texts = [(rule.split(reader.read(PIECE_BYTES)), 0, file.size)]
        for split, start, end in texts:
            while start < end:
                stop = start + PIECE_BYTES
                if stop < end:
                    reader.seek(stop - _BREAK_BYTES)
                    newline = reader.read(_BREAK_BYTES).rfind(b"\n") + 1
                    if newline:
                        stop += newline - _BREAK_BYTES
                    else:
                        reader.seek(stop)
                        stop = min(stop + _continuation(reader.read(3)), end)
                else:
                    stop = end
                yield Unit(
                    kind="piece",
                    files=(file,),
                    start=start,
                    stop=stop,
                    split=split,
                    document=document,
                    ends=stop == end,
                )
                start = stop
