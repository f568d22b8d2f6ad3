"""`prepare`: text to token files. Memory is flat in the input's size; what is written depends on the documents alone.

A directory is written beside its final name and renamed when everything in it is on disk: whoever finds it, finds
it whole. See `documents` for units and the split, `encoding` for the work.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.documents import (
    PYTHON_STDLIB,
    InputFile,
    SplitRule,
    Unit,
    find_files,
    plan_units,
    planned_bytes,
)
from paceline.data.encoding import Encoder, Errors, encode_units
from paceline.data.index import SCHEMA, read_index
from paceline.data.output import Written, save, sole_writer, sync, temporary
from paceline.data.tokenizer import TOKENIZER_FILE, FileTokenizer, bpe_size, read_tokenizer, train_bpe
from paceline.errors import DataError

__all__ = ["prepare", "prepare_once"]

Progress = Callable[[int, int], None]

_TRAIN_BPE_BYTES = 256 * 2**20
"""A tokenizer learns from at most about this much text, evenly spaced over the source."""
_HELPERS_FROM_BYTES = 8 * 2**20
"""Below this, starting helper processes takes longer than the work."""
_MOST_HELPERS = 16
_MOST_PROCESSES = 256
_PROGRESS_EVERY_S = 0.1


def prepare(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str = "bytes",
    glob: str | None = None,
    field: str = "text",
    errors: Errors = "fail",
    valid: float = 0.05,
    limit_bytes: int | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Writes ``out`` with ``train.bin``, ``valid.bin`` and ``index.json``; returns the index.

    The same sources give the same bytes whatever ``processes`` is, and ``out`` appears whole or not at all.

    Args:
        sources: files and folders of text or ``.jsonl``, and the word ``python-stdlib``.
        out: directory to write; must not exist.
        tokenizer: ``bytes``, ``bpe:N`` (trained on the sources) or the path of a ``tokenizer.json``.
        glob: which files of a folder; default ``*.txt`` and ``*.jsonl``.
        field: of a ``.jsonl`` line that holds its text.
        errors: for bytes that are not UTF-8: ``fail``, ``replace`` them by U+FFFD, or ``skip`` the document.
            ``skip`` also leaves out lines that are not JSON.
        valid: fraction held out, by document; see `SplitRule`.
        limit_bytes: stop after the document with which this many bytes of source were read.
        processes: that encode; default one per CPU core, up to 16.
        progress: called from this process with bytes done and bytes in all, about ten times a second. The total
            counts what is read more than once: to train a tokenizer, or to split again by tails.

    Raises:
        DataError: bad input (the file and line are named), an existing ``out`` or one that cannot be written.
    """
    out = Path(out)
    work = _Work(
        sources=[str(source) for source in sources],
        tokenizer=tokenizer,
        glob=glob,
        field=field,
        errors=errors,
        valid=valid,
        limit_bytes=limit_bytes,
        processes=processes,
        progress=progress,
    )
    _refuse_existing(out)
    preparation = _Preparation.of(work)
    with sole_writer(out, wait_s=0.0):
        _refuse_existing(out)  # which another process may have written meanwhile
        return _write(preparation, out)


def prepare_once(out: str | Path, *, wait_s: float = 3600.0, **how: Any) -> dict[str, Any]:
    """`prepare` unless ``out`` is already there; returns its index. Several processes may call this at once.

    Args:
        wait_s: seconds to wait for another process that is preparing the same ``out``.
        how: ``sources`` and all else that `prepare` takes.

    Raises:
        DataError: as `prepare`, or ``out`` was prepared in another way.
    """
    out = Path(out)
    work = _Work(**{**how, "sources": [str(source) for source in how["sources"]]})
    if not out.exists():
        preparation = _Preparation.of(work)
        with sole_writer(out, wait_s):
            if not out.exists():
                return _write(preparation, out)
    index = read_index(out)
    there = index.get("asked", {})
    if differing := [name for name, value in work.asked.items() if there.get(name) != value]:
        raise DataError(
            f"cannot take {out} as the data to prepare",
            found=", ".join(f"{name}={there.get(name)!r}" for name in differing),
            needed=", ".join(f"{name}={work.asked[name]!r}" for name in differing),
            fix=f"Name another directory, delete this one (rm -r {out}), or leave out `prepare` to take it as it is",
        )
    return index


@dataclass(frozen=True, kw_only=True)
class _Work:
    """The arguments of `prepare`, checked."""

    sources: list[str]
    tokenizer: str = "bytes"
    glob: str | None = None
    field: str = "text"
    errors: Errors = "fail"
    valid: float = 0.05
    limit_bytes: int | None = None
    processes: int | None = None
    progress: Progress | None = None

    @property
    def asked(self) -> dict[str, Any]:
        """The arguments that decide what is written."""
        return {name: value for name, value in vars(self).items() if name not in ("processes", "progress")}

    def __post_init__(self) -> None:
        checks = [
            (0 <= self.valid < 1, f"valid={self.valid}", "0 <= valid < 1", "Use --valid 0.05"),
            (self.errors in ("fail", "replace", "skip"), f"errors={self.errors!r}", "fail, replace or skip", None),
            (
                self.limit_bytes is None or self.limit_bytes > 0,
                f"limit_bytes={self.limit_bytes}",
                "bytes > 0",
                "Use --limit 20MB",
            ),
            (
                self.processes is None or 0 < self.processes <= _MOST_PROCESSES,
                f"processes={self.processes}",
                f"1 <= processes <= {_MOST_PROCESSES}",
                "Leave --processes out for one per CPU core",
            ),
        ]
        for ok, found, needed, fix in checks:
            if not ok:
                raise DataError("cannot prepare data", found=found, needed=needed, fix=fix)


@dataclass(frozen=True, kw_only=True)
class _Preparation:
    """What is to be done, found out before anything is written."""

    work: _Work
    files: list[InputFile]
    size: int
    bpe_size: int | None
    tokenizer: FileTokenizer | None

    @classmethod
    def of(cls, work: _Work) -> _Preparation:
        to_train = bpe_size(work.tokenizer)
        given = None if to_train or work.tokenizer == "bytes" else read_tokenizer(Path(work.tokenizer))
        files = find_files(work.sources, work.glob)
        size = planned_bytes(files, work.limit_bytes)
        return cls(work=work, files=files, size=size, bpe_size=to_train, tokenizer=given)

    @property
    def rules(self) -> list[SplitRule]:
        """Split rules to try in turn, until one gives a fair share."""
        if self.work.valid == 0:
            return [SplitRule(kind="none", valid=0)]
        rules = [SplitRule(kind="document", valid=self.work.valid), SplitRule(kind="tail", valid=self.work.valid)]
        alone = len(self.files) == 1 and not self.files[0].lines  # one document: by its hash it is all or nothing
        return rules[1:] if alone else rules

    @property
    def processes(self) -> int:
        if self.work.processes is not None:
            return self.work.processes
        return min(len(os.sched_getaffinity(0)), _MOST_HELPERS) if self.size >= _HELPERS_FROM_BYTES else 1

    def units(self, rule: SplitRule) -> Iterator[Unit]:
        return plan_units(self.files, rule, self.work.limit_bytes)

    def encoder(self, rule: SplitRule, tokenizer: FileTokenizer | None) -> Encoder:
        return Encoder(tokenizer.json_text if tokenizer else None, rule, self.work.field, self.work.errors)


def _write(preparation: _Preparation, out: Path) -> dict[str, Any]:
    """The whole preparation; the caller holds the lock of ``out``."""
    meter = _Meter(preparation.work.progress, preparation.size)
    try:
        with temporary(out) as folder:
            tokenizer = preparation.tokenizer
            if preparation.bpe_size is not None:
                meter.total += preparation.size
                tokenizer = train_bpe(_sample(preparation, meter), preparation.bpe_size)
            for rule in preparation.rules:
                encoder = preparation.encoder(rule, tokenizer)
                written = _encode(preparation, encoder, folder, meter)
                if rule == preparation.rules[-1] or written.fair(rule.valid):
                    break
                meter.total += preparation.size
            written.check()
            index = _index(preparation.work, encoder, written)
            if tokenizer is not None:
                save(folder / TOKENIZER_FILE, tokenizer.json_text)
            save(folder / "index.json", json.dumps(index, indent=2, ensure_ascii=False) + "\n")
            sync(folder)
            folder.rename(out)
            sync(out.parent)
    except OSError as error:
        raise DataError(
            f"cannot write {out}",
            found=error.strerror or str(error),
            needed="a writable folder with room for 2 bytes a token",
            fix="Use another --out. Nothing was left behind",
        ) from error
    meter.done()
    return index


def _encode(preparation: _Preparation, encoder: Encoder, folder: Path, meter: _Meter) -> Written:
    """All documents into ``folder``, in order; replaces what an earlier rule wrote there."""
    units = preparation.units(encoder.rule)
    with (
        contextlib.closing(Written(folder)) as written,
        contextlib.closing(encode_units(units, encoder, preparation.processes)) as results,
    ):
        for unit, result in results:
            written.take(unit, result)
            meter.add(unit.size)
    return written


def _sample(preparation: _Preparation, meter: _Meter) -> Iterator[str]:
    """Text to train a tokenizer on: every unit, or evenly spaced ones of a large source.

    Documents that cannot be read are passed over here: encoding meets them again, and knows their line.
    """
    reader = preparation.encoder(SplitRule(kind="none", valid=0), None)
    stride = max(1, -(-preparation.size // _TRAIN_BPE_BYTES))
    for i, unit in enumerate(preparation.units(reader.rule)):
        if i % stride == 0 and (part := reader.encode(unit).parts.get("train")):
            ids = np.frombuffer(part.data, reader.dtype)
            ends = np.flatnonzero(ids == reader.tokenizer.end_of_text)
            for document in np.split(ids, ends):
                text = document[document < 256].astype(np.uint8).tobytes().decode()
                if text:
                    yield text
        meter.add(unit.size)


def _index(work: _Work, encoder: Encoder, written: Written) -> dict[str, Any]:
    rule = encoder.rule
    return {
        "schema": SCHEMA,
        "dtype": {2: "uint16", 4: "uint32"}[encoder.dtype.itemsize],
        "vocabulary": encoder.tokenizer.vocabulary,
        "end_of_text": encoder.tokenizer.end_of_text,
        "tokenizer": encoder.tokenizer.spec,
        "split": {"rule": rule.kind, "valid": rule.valid, "means": rule.sentence},
        "splits": written.entries,
        "sources": [
            f"{name} of Python {platform.python_version()}" if name == PYTHON_STDLIB else name for name in work.sources
        ],
        "asked": work.asked,
        "skipped": {"documents": written.skipped_documents, "first": written.skipped},
        "replaced": {"documents": written.replaced_documents},
    }


class _Meter:
    """Bytes done, told at a bearable rate."""

    def __init__(self, tell: Progress | None, total: int) -> None:
        self._tell, self.total, self._bytes, self._next = tell, total, 0, 0.0

    def add(self, size: int) -> None:
        self._bytes += size
        if self._tell and time.monotonic() >= self._next:
            self._next = time.monotonic() + _PROGRESS_EVERY_S
            self._tell(min(self._bytes, self.total), self.total)

    def done(self) -> None:
        if self._tell:
            self._tell(self.total, self.total)


def _refuse_existing(out: Path) -> None:
    if out.exists() or out.is_symlink():
        prepared = (out / "index.json").is_file()  # nobody is told to delete anything else
        raise DataError(
            f"cannot write {out}",
            found="an existing file or folder of that name",
            needed="a name that is free",
            fix=f"Use another --out{f', or delete it first: rm -r {out}' if prepared else ''}",
        )
