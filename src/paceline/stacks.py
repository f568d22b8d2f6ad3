"""Stacks of all threads of a worker, on demand: of a worker that hangs, whatever it hangs in.

The worker's half is `dump_on_signal`; `collect`, `users_line` and `new_file` are the supervisor's.

[Note: two ways to ask] The signal's handler is in C and needs neither the interpreter nor a thread that runs. But it
reads the stacks of the other threads as they are, and when one of those runs Python code meanwhile, the process may
crash: one in some hundred dumps did, with several busy threads. So a thread of the process is asked to write, which
holds the GIL for it. The signal is for a process whose threads do not run: it is stopped, and shall tell where, before
it goes on; or none of them answers, since a call into C code keeps the GIL.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.callsite import in_libraries

__all__ = ["STACKS_SIGNAL", "Dumping", "collect", "dump_on_signal", "new_file", "users_line"]

STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Real-time signals are nobody's by tradition."""

_PATIENCE_S = 2.0
_POLL_S = 0.005
_BIT = 1 << (STACKS_SIGNAL - 1)
_END = b"(these were all)\n"

_INSTALLED = re.compile(r"/(site|dist)-packages/")
_WORKER = "=== worker "
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+) .*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


def dump_on_signal(path: Path) -> Callable[[], None]:
    """From now on this process appends the stacks of all its threads to ``path`` whenever `STACKS_SIGNAL` comes.

    Returns:
        What does so at once, to be called by a thread that runs when the supervisor asks for it.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)  # open to the end
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True, chain=False)

    def dump() -> None:
        faulthandler.dump_traceback(file=descriptor, all_threads=True)
        os.write(descriptor, _END)

    return dump


@dataclass(frozen=True, kw_only=True)
class Dumping:
    """A worker that is to tell its stacks.

    Args:
        rank: by which people know it.
        pid: a process that is not reaped yet, so that the number is still its own.
        path: as given to its `dump_on_signal`.
        doing: what it does, in a line for a person.
        ask: has a thread of it call what `dump_on_signal` returned, if one runs; ``None``: the signal at once.
    """

    rank: int
    pid: int
    path: Path
    doing: str
    ask: Callable[[], None] | None = None


def collect(members: Sequence[Dumping], culprit: int, into: Path | None) -> str:
    """The stacks of all ``members``, as a text for a person: the culprit first, a heading for each.

    A stopped process is made to go on for it, and does go on. Of one that ends meanwhile, or does not answer within two
    seconds, that is told instead.

    Args:
        members: whom to ask, all at once.
        culprit: rank of the one that comes first.
        into: a file to write the text to, in a folder that is made when missing; ``None``: only return it.

    Raises:
        OSError: the text cannot be written there.
    """
    ordered = sorted(members, key=lambda member: (member.rank != culprit, member.rank))
    questions = [_Question(member) for member in ordered]
    deadline_s = time.monotonic() + _PATIENCE_S
    answers = [question.answer(deadline_s) for question in questions]
    text = "\n".join(
        f"{_WORKER}{member.rank} (process {member.pid}): {member.doing}\n\n{answer}\n"
        for member, answer in zip(ordered, answers, strict=True)
    )
    if into is not None:
        into.parent.mkdir(parents=True, exist_ok=True)
        into.write_text(text, encoding="utf-8")
    return text


def new_file(folder: Path, step: int | None, rank: int) -> Path:
    """A file for the stacks of a hang that is not there yet: ``step-00000012-worker-1.txt``, or with ``-2`` behind it.

    Args:
        folder: of all hangs of a run.
        step: from 1; ``None``: before the first.
        rank: of the worker that hangs.
    """
    name = f"step-{step or 0:08d}-worker-{rank}"
    path, number = folder / f"{name}.txt", 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}.txt"
    return path


def users_line(text: str, main_thread: int) -> str | None:
    """Where in the user's code the first worker of ``text`` is: ``train.py:31``; ``None``: it has not answered.

    That is the innermost frame outside of Paceline and what it runs on. When there is none, such as in a built-in task
    or still at the imports, it is the innermost frame of all.

    >>> users_line('''=== worker 1 (process 71): computing
    ...
    ... Current thread 0x00007f8a900a6b80 (most recent call first):
    ...   File "/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 2000 in linear
    ...   File "/home/me/train.py", line 31 in train_step
    ...   File "/home/me/train.py", line 50 in <module>
    ... ''', 0x7f8a900a6b80)
    'train.py:31'

    Args:
        text: from `collect`.
        main_thread: identifier of the worker's main thread, as its pulse tells it.
    """
    frames: list[tuple[str, str]] = []
    within = False
    for number, line in enumerate(text.splitlines()):
        if number and line.startswith(_WORKER):  # workers are forked from one process: their main threads are namesakes
            break
        if thread := _THREAD.match(line):
            within = int(thread[1], 16) == main_thread
        elif within and (frame := _FRAME.match(line)):
            frames.append((_ESCAPED.sub(lambda code: chr(int(code[1] or code[2] or code[3], 16)), frame[1]), frame[2]))
    users = [frame for frame in frames if _is_users(frame[0])]
    if not frames:
        return None
    file, line = (users or frames)[0]
    return f"{Path(file).name}:{line}"


def _is_users(file: str) -> bool:
    return not in_libraries(file) and not _INSTALLED.search(file)


class _Question:
    """Asks a process for its stacks, and takes what it has written since. One that does not listen is not asked: the
    signal would end it."""

    def __init__(self, member: Dumping) -> None:
        self._member, self._process = member, Path(f"/proc/{member.pid}")
        self._deaf: frozenset[str] | None = None
        self._asked = _listens(self._process)
        if self._asked:
            self._size = member.path.stat().st_size
            if _status(self._process).get("State", "").startswith("T"):
                self._signal()
                os.kill(member.pid, signal.SIGCONT)  # the handler comes first then
            elif member.ask is None:
                self._signal()
            else:
                member.ask()

    def answer(self, deadline_s: float) -> str:
        """Once it is whole, or it is `deadline_s` by `time.monotonic`."""
        if not self._asked:
            return "no stacks: the process has ended, or has not come far enough to tell them"
        why = None
        while not self._is_whole() and why is None:
            now_s = time.monotonic()
            if not _listens(self._process):
                why = "no more stacks: the process has ended meanwhile"
            elif now_s > deadline_s:
                why = f"no more stacks: the process has not answered in {_PATIENCE_S:g} s"
            elif self._deaf is None and now_s > deadline_s - _PATIENCE_S / 2:
                self._signal()  # no thread of it runs
            else:
                time.sleep(_POLL_S)
        dump = self._dump().removesuffix(_END).decode(errors="replace").strip()
        return "\n\n".join(part for part in (dump, why) if part)

    def _signal(self) -> None:
        """To the main thread, so that it is told where that one is, and not where it is going meanwhile."""
        self._deaf = _blocking(self._process)  # threads that do not take the signal anyway
        ctypes.CDLL(None).tgkill(self._member.pid, self._member.pid, int(STACKS_SIGNAL))

    def _dump(self) -> bytes:
        return self._member.path.read_bytes()[self._size :]

    def _is_whole(self) -> bool:
        """It ends as a thread ends it; or something is there, and the signal neither waits nor is being handled, for
        which time a thread blocks it."""
        dump = self._dump()
        if self._deaf is None or not dump:
            return dump.endswith(_END)
        waits = int(_status(self._process).get("SigPnd", "0"), 16) & _BIT
        return not waits and _blocking(self._process) <= self._deaf


def _listens(process: Path) -> bool:
    """Whether it handles the signal, and can: one that has ended keeps its handlers until it is reaped."""
    status = _status(process)
    return status.get("State", "Z")[0] not in "ZX" and bool(int(status.get("SigCgt", "0"), 16) & _BIT)


def _blocking(process: Path) -> frozenset[str]:
    """The threads of a process that have the signal blocked."""
    try:
        tasks = list((process / "task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return frozenset()
    return frozenset(task.name for task in tasks if int(_status(task).get("SigBlk", "0"), 16) & _BIT)


def _status(process: Path) -> dict[str, str]:
    """What the kernel tells of a process or thread; nothing when it is gone."""
    try:
        lines = (process / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
