"""From a unit of documents to token bytes, in this process or in helpers; the results come in the order of the units.

Helpers are plain ``python -c`` processes fed through pipes. They never import the user's main script (as
`multiprocessing` would), need no torch, and end by themselves when their parent dies, since their input ends.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import pickle
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np

from paceline.data.documents import PIECE_BYTES, InputFile, Split, SplitRule, Unit
from paceline.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from paceline.errors import DataError, did_you_mean

__all__ = ["Encoded", "Encoder", "Part", "encode_units", "serve"]

Errors = Literal["fail", "replace", "skip"]


@dataclass(kw_only=True)
class Part:
    """Tokens of one split with what they came from."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    data: bytes = b""


@dataclass(kw_only=True)
class Encoded:
    """The result of a unit.

    Attributes:
        lines: of a ``lines`` unit; errors and ``skipped`` count lines from its start, from 1.
        skipped: path and line of documents left out.
        replaced: documents with bytes replaced by U+FFFD.
        fault: what stops the preparation, to be raised by `Encoder.error`.
    """

    parts: dict[Split, Part] = field(default_factory=dict)
    lines: int = 0
    skipped: list[tuple[str, int | None]] = field(default_factory=list)
    replaced: int = 0
    fault: Fault | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The beats of an error whose line number is not known yet where it is met."""

    path: str
    found: str
    needed: str
    fix: str
    line: int | None = None

    def error(self, lines_before: int) -> DataError:
        where = self.path if self.line is None else f"{self.path} line {lines_before + self.line}"
        return DataError(f"cannot read {where}", found=self.found, needed=self.needed, fix=self.fix)


class _SkipError(Exception):
    """This document is left out."""


class _FaultError(Exception):
    """This unit cannot be encoded."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault


_Texts = dict[Split, list[bytes]]
"""The texts of a unit by split, in order."""


class Encoder:
    """Turns units into token bytes. Everything that the result depends on is an argument.

    Args:
        tokenizer: as JSON text of a ``tokenizer.json``, or None for bytes.
        rule: which documents are held out.
        name: of the field of a ``.jsonl`` line that holds the text.
        errors: what to do with bytes that are not UTF-8; ``skip`` also leaves out lines that are not JSON.
    """

    def __init__(self, tokenizer: str | None, rule: SplitRule, name: str, errors: Errors) -> None:
        self.settings = (tokenizer, rule, name, errors)
        self.tokenizer: Tokenizer = ByteTokenizer() if tokenizer is None else FileTokenizer(tokenizer)
        self.rule, self.name, self.errors = rule, name, errors
        self.dtype = np.dtype("<u2" if self.tokenizer.vocabulary <= 2**16 else "<u4")

    def encode(self, unit: Unit) -> Encoded:
        """Never raises for bad input: see `Encoded.fault`."""
        done = Encoded()
        texts: _Texts = {"train": [], "valid": []}
        try:
            if unit.kind == "lines":
                self._lines(unit, done, texts)
            else:
                self._files(unit, done, texts)
        except _FaultError as stop:
            done.fault = stop.fault
        for split, several in texts.items():
            if several:
                data = self._tokens(several, unit.ends)
                done.parts[split] = Part(
                    documents=len(several) if unit.ends else 0,
                    text_bytes=sum(map(len, several)),
                    tokens=len(data) // self.dtype.itemsize,
                    data=data,
                )
        return done

    def _files(self, unit: Unit, done: Encoded, texts: _Texts) -> None:
        """Whole files, or a piece of one."""
        for file in unit.files:
            start, stop = (unit.start, unit.stop) if unit.kind == "piece" else (0, file.size)
            data = self._read(file, start, stop)
            try:
                text = self._text(data, file, done, offset=start)
            except _SkipError:
                done.skipped.append((str(file.path), None))
                continue
            if unit.kind == "piece":
                texts[unit.split].append(text)
            else:
                self._split(text, data, texts)

    def _lines(self, unit: Unit, done: Encoded, texts: _Texts) -> None:
        file = unit.files[0]
        lines = self._read(file, unit.start, unit.stop).split(b"\n")
        done.lines = len(lines) - 1
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    text = self._field(line, file, number, done)
                except _SkipError:
                    done.skipped.append((str(file.path), number))
                else:
                    self._split(text, text, texts)

    def _read(self, file: InputFile, start: int, stop: int) -> bytes:
        try:
            with file.path.open("rb") as reader:
                reader.seek(start)
                data = reader.read(stop - start)
            problem = None if len(data) == stop - start else "a file that shrank while it was read"
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            raise _FaultError(
                Fault(path=str(file.path), found=problem, needed="a readable file", fix="Check it and prepare again")
            )
        return data

    def _text(self, data: bytes, file: InputFile, done: Encoded, offset: int = 0, line: int | None = None) -> bytes:
        """``data``, which is UTF-8 or becomes it by the user's choice."""
        try:
            data.decode()
        except UnicodeDecodeError as error:
            return self._undecodable(
                f"byte 0x{data[error.start]:02x} at offset {offset + error.start}", data, file, done, line
            )
        return data

    def _line(self, line: bytes, file: InputFile, number: int, done: Encoded) -> str:
        try:
            return line.decode()  # once, since most lines are as they should be
        except UnicodeDecodeError:
            return self._text(line, file, done, line=number).decode()

    def _undecodable(self, found: str, data: bytes, file: InputFile, done: Encoded, line: int | None) -> bytes:
        if self.errors == "skip" or file.lenient:
            raise _SkipError
        if self.errors == "fail":
            fix = "Mend the file, or use --errors replace or --errors skip"
            raise _FaultError(Fault(path=str(file.path), found=found, needed="UTF-8 text", fix=fix, line=line))
        done.replaced += 1
        return data.decode(errors="replace").encode()

    def _field(self, line: bytes, file: InputFile, number: int, done: Encoded) -> bytes:
        """The text of a ``.jsonl`` line."""

        def stop(found: str, needed: str, fix: str) -> _FaultError:
            return _FaultError(Fault(path=str(file.path), found=found, needed=needed, fix=fix, line=number))

        try:
            record: Any = json.loads(self._line(line.removeprefix(codecs.BOM_UTF8), file, number, done))
        except (ValueError, RecursionError) as error:
            if self.errors == "skip":
                raise _SkipError from error
            raise stop(f"no JSON: {error}", "one JSON object a line", "Mend the line, or use --errors skip") from error
        if not isinstance(record, dict):
            raise stop(f"{type(record).__name__} {line[:40]!r}", "a JSON object", "Write one object a line")
        if self.name not in record:
            fix = f"Name the field that holds the text with --field. {did_you_mean(self.name, record)}"
            raise stop(f"no field {self.name!r}", "the text in that field", fix)
        text = record[self.name]
        if not isinstance(text, str):
            raise stop(
                f"{type(text).__name__} in field {self.name!r}",
                "a string",
                "Name the field that holds the text: --field",
            )
        try:
            return text.encode()
        except UnicodeEncodeError as error:  # half of an escaped surrogate pair, such as "\ud83d"
            whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
            return self._undecodable(f"a lone surrogate U+{ord(text[error.start]):X}", whole, file, done, number)

    def _split(self, text: bytes, content: bytes, texts: _Texts) -> None:
        """Deals a whole document: ``text`` to encode, ``content`` as it was met, which the split is a function of."""
        if self.rule.kind != "tail":
            if text:
                texts[self.rule.split(content)].append(text)
            return
        target = self.rule.cut_target(len(text))
        cut = self.rule.cut(target, len(text), text[target : target + PIECE_BYTES])
        parts: list[tuple[Split, bytes]] = [("train", text[:cut]), ("valid", text[cut:])]
        for split, part in parts:
            if part:
                texts[split].append(part)

    def _tokens(self, texts: list[bytes], ends: bool) -> bytes:
        """The ids of ``texts`` as bytes, an end of text behind each if it ``ends``."""
        end = self.tokenizer.end_of_text
        if not isinstance(self.tokenizer, ByteTokenizer):
            encoded = [self.tokenizer.encode(text.decode()) + [end] * ends for text in texts]
            return np.concatenate([np.array(ids, self.dtype) for ids in encoded]).tobytes()
        if not ends:
            return np.frombuffer(b"".join(texts), np.uint8).astype(self.dtype).tobytes()
        ids = np.frombuffer(b"\0".join([*texts, b""]), np.uint8).astype(self.dtype)
        ids[np.cumsum([len(text) + 1 for text in texts]) - 1] = end
        return ids.tobytes()


def encode_units(units: Iterable[Unit], encoder: Encoder, processes: int) -> Generator[tuple[Unit, Encoded]]:
    """Every unit with its result, in order; at most ``2 * processes`` of them are held at once."""
    if processes == 1:
        yield from ((unit, encoder.encode(unit)) for unit in units)
        return
    with _Helpers(encoder, processes) as helpers:
        pending: deque[tuple[Unit, Future[Encoded]]] = deque()
        for unit in units:
            pending.append((unit, helpers.submit(unit)))
            if len(pending) >= 2 * processes:
                first, result = pending.popleft()
                yield first, result.result()
        for first, result in pending:
            yield first, result.result()


PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from paceline.data.encoding import serve; serve()"
"""What a helper runs: our own import path, in case it is not the environment's."""

_LEAVE_S = 10.0
"""A helper whose input has ended leaves at once; one that does not (it was stopped) is killed after this time."""


class _Helpers:
    """Processes that encode. A thread of ours talks to each."""

    def __init__(self, encoder: Encoder, processes: int) -> None:
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="paceline-encode")
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        command = [sys.executable, "-P", "-c", PROGRAM, *sys.path]
        self._all = [
            # a process group of its own: Ctrl-C is ours to handle, they follow when their input ends
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
            for _ in range(processes)
        ]
        for helper in self._all:
            with contextlib.suppress(BrokenPipeError):  # one that died at once is met, and told, by `_ask`
                _send(helper.stdin, encoder.settings)
            self._idle.put(helper)

    def submit(self, unit: Unit) -> Future[Encoded]:
        return self._threads.submit(self._ask, unit)

    def _ask(self, unit: Unit) -> Encoded:
        helper = self._idle.get()
        try:
            _send(helper.stdin, unit)
            answer: Encoded | str = pickle.load(helper.stdout)  # type: ignore[arg-type]  # it has a pipe
        except (BrokenPipeError, EOFError, pickle.UnpicklingError) as error:
            raise DataError(
                "cannot go on preparing data",
                found=f"a helper process that ended (exit code {helper.wait()})",
                fix="Is the machine out of memory? Try --processes 1",
            ) from error
        finally:
            self._idle.put(helper)
        if isinstance(answer, str):
            raise RuntimeError(f"a helper process failed:\n{answer}")
        return answer

    def __enter__(self) -> _Helpers:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for helper in self._all:
            with contextlib.suppress(BrokenPipeError):
                helper.stdin.close()  # type: ignore[union-attr]
            helper.stdout.close()  # type: ignore[union-attr]
            try:
                helper.wait(timeout=_LEAVE_S)
            except subprocess.TimeoutExpired:
                helper.kill()
                helper.wait()


def serve() -> None:
    """A helper's whole life: settings, then units from stdin, results to stdout, until stdin ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # a stray print must not end up among the answers
    encoder = Encoder(*pickle.load(source))
    while True:
        try:
            unit = pickle.load(source)
        except EOFError:
            return
        try:
            answer: Encoded | str = encoder.encode(unit)
        except Exception:
            answer = traceback.format_exc()
        try:
            _send(sink, answer)
        except BrokenPipeError:
            return


def _send(pipe: Any, message: object) -> None:
    pickle.dump(message, pipe, protocol=5)
    pipe.flush()
