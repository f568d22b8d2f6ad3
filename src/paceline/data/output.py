"""The output of `prepare` as it is written: token files, their folder, and the lock that makes one writer of many."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import Any

import xxhash

from paceline.data.documents import Split, Unit
from paceline.data.encoding import Encoded, Part
from paceline.errors import DataError

__all__ = ["SplitFile", "Written", "save", "sole_writer", "sync", "temporary"]

_SPLITS: tuple[Split, Split] = ("train", "valid")
_SKIPPED_NAMES = 20


@dataclass(kw_only=True)
class SplitFile:
    """A token file being written: counts and a running hash beside the bytes."""

    path: Path
    total: Part = field(default_factory=Part)
    content: Any = field(default_factory=xxhash.xxh3_128)

    def __post_init__(self) -> None:
        self._file = self.path.open("wb")

    def append(self, part: Part) -> None:
        self._file.write(part.data)
        self.content.update(part.data)
        self.total.documents += part.documents
        self.total.text_bytes += part.text_bytes
        self.total.tokens += part.tokens

    def mark(self) -> Callable[[], None]:
        """What takes back all that is appended from now on."""
        position, content = self._file.tell(), self.content.copy()
        counts = (self.total.documents, self.total.text_bytes, self.total.tokens)

        def take_back() -> None:
            self._file.seek(position)
            self._file.truncate()
            self.content = content.copy()
            self.total.documents, self.total.text_bytes, self.total.tokens = counts

        return take_back

    def close(self) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    @property
    def entry(self) -> dict[str, Any]:
        """Its place in ``index.json``."""
        return {
            "file": self.path.name,
            "documents": self.total.documents,
            "tokens": self.total.tokens,
            "bytes": self.total.text_bytes,
            "xxh3_128": self.content.hexdigest(),
        }


class Written:
    """Both token files under one split rule, and what was left out on the way."""

    def __init__(self, folder: Path) -> None:
        self.files = {split: SplitFile(path=folder / f"{split}.bin") for split in _SPLITS}
        self.skipped: list[str] = []
        self.skipped_documents = self.replaced_documents = 0
        self._lines_of: tuple[Path | None, int] = (None, 0)
        self._document: int | None = None
        self._take_back: list[Callable[[], None]] = []
        self._dropped: int | None = None
        self._replaced: int | None = None

    @property
    def entries(self) -> dict[str, Any]:
        """``splits`` of ``index.json``."""
        return {split: file.entry for split, file in self.files.items()}

    def close(self) -> None:
        """All of it on disk."""
        with contextlib.ExitStack() as stack:  # one that cannot be written must not keep the other open
            for file in self.files.values():
                stack.callback(file.close)

    def take(self, unit: Unit, result: Encoded) -> None:
        """Appends ``result``, whose turn it is."""
        path, document = unit.files[0].path, unit.document
        before = self._lines_of[1] if self._lines_of[0] == path else 0
        self._lines_of = (path, before + result.lines)
        if document is not None and document == self._dropped:
            return
        if document is not None and document != self._document:
            self._document, self._take_back = document, [file.mark() for file in self.files.values()]
        if result.fault:
            raise result.fault.error(before)
        self.skipped_documents += len(result.skipped)
        for name, line in result.skipped[: _SKIPPED_NAMES - len(self.skipped)]:
            self.skipped.append(name if line is None else f"{name} line {before + line}")
        if result.skipped and document is not None:
            for take_back in self._take_back:
                take_back()
            self._dropped = document
        if document is None:
            self.replaced_documents += result.replaced
        elif result.replaced and document != self._replaced:
            self._replaced = document
            self.replaced_documents += 1
        for split, part in result.parts.items():
            self.files[split].append(part)

    def fair(self, valid: float) -> bool:
        """Whether the held-out share came out within a factor of 4 of ``valid``, and the rest of its own."""
        train, held_out = (self.files[split].total.text_bytes for split in _SPLITS)
        share = held_out / max(train + held_out, 1)
        return valid / 4 <= share <= 4 * valid and (1 - valid) / 4 <= 1 - share

    def check(self) -> None:
        if not self.files["train"].total.tokens:
            raise DataError(
                "cannot prepare data",
                found=f"no text: {self.skipped_documents} documents skipped",
                needed="at least one document with text",
                fix="Check the sources, or use --errors replace",
            )


@contextlib.contextmanager
def sole_writer(out: Path, wait_s: float) -> Iterator[None]:
    """Holds the lock file beside ``out``; the kernel frees it when its holder dies. Removes what dead writers left."""
    path = out.with_name(f"{out.name}.lock")
    deadline = time.monotonic() + wait_s
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        while (lock := _try_lock(path)) is None:
            if time.monotonic() >= deadline:
                raise DataError(
                    f"cannot write {out}",
                    found="another process that is preparing it",
                    needed="one at a time",
                    fix="Wait for it to end, or use another --out",
                )
            time.sleep(0.05)
    except OSError as error:
        raise DataError(
            f"cannot write {out}", found=error.strerror, needed="a writable folder", fix="Use another --out"
        ) from error
    try:
        for left_behind in out.parent.glob(f"{escape(out.name)}.tmp-*"):
            shutil.rmtree(left_behind, ignore_errors=True)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _try_lock(path: Path) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(lock).st_ino:  # not one that its last holder has just removed
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


@contextlib.contextmanager
def temporary(out: Path) -> Iterator[Path]:
    """A new folder beside ``out``, gone afterwards unless it was renamed."""
    folder = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save(path: Path, text: str) -> None:
    # A file name need not be UTF-8; what of it cannot be encoded is escaped as JSON escapes it, and so reads back.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
