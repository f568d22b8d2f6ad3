"""Stacks of all threads of a worker, on demand: of a worker that hangs, whatever it hangs in.

The worker's half is `dump_on_signal`; `collect`, `users_line` and `new_file` are the supervisor's. The dump is written
by a signal handler in C, so that it needs neither the interpreter nor a thread that runs. A stopped process writes it
as soon as it goes on.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["STACKS_SIGNAL", "Dumping", "collect", "dump_on_signal", "new_file", "users_line"]

STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Real-time signals are nobody's by tradition."""

_PATIENCE_S = 2.0
_POLL_S = 0.005
_BIT = 1 << (STACKS_SIGNAL - 1)

_OWN = str(Path(__file__).parent) + os.sep
_LIBRARIES = tuple({sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_INSTALLED = re.compile(r"/(site|dist)-packages/")
_WORKER = "=== worker "
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+) .*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


def dump_on_signal(path: Path) -> None:
    """From now on this process appends the stacks of all its threads to ``path`` whenever `STACKS_SIGNAL` comes."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)  # open to the end
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True, chain=False)


@dataclass(frozen=True, kw_only=True)
class Dumping:
    """A worker that is to tell its stacks.

    Args:
        rank: by which people know it.
        pid: a process that is not reaped yet, so that the number is still its own.
        path: as given to its `dump_on_signal`.
        doing: what it does, in a line for a person.
    """

    rank: int
    pid: int
    path: Path
    doing: str


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
    asked = {member.rank: _ask(member) for member in members}
    deadline_s = time.monotonic() + _PATIENCE_S
    sections = []
    for member in sorted(members, key=lambda member: (member.rank != culprit, member.rank)):
        answer = _answer(member, asked[member.rank], deadline_s)
        sections.append(f"{_WORKER}{member.rank} (process {member.pid}): {member.doing}\n\n{answer}\n")
    text = "\n".join(sections)
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
    return not file.startswith(("<", _OWN, *_LIBRARIES)) and not _INSTALLED.search(file)


@dataclass(frozen=True)
class _Asked:
    """What was there when a process got the signal: bytes in its file, threads that do not take the signal anyway."""

    size: int
    deaf: frozenset[str]


def _ask(member: Dumping) -> _Asked | None:
    """Sends the signal; ``None``: not sent, since it would end a process that does not listen for it."""
    process = Path(f"/proc/{member.pid}")
    if not _listens(process):
        return None
    asked = _Asked(size=member.path.stat().st_size, deaf=_blocking(process))
    os.kill(member.pid, STACKS_SIGNAL)
    if _status(process).get("State", "").startswith("T"):
        os.kill(member.pid, signal.SIGCONT)
    return asked


def _answer(member: Dumping, asked: _Asked | None, deadline_s: float) -> str:
    """What the process has written since it was asked, once that is whole."""
    process = Path(f"/proc/{member.pid}")
    if asked is None:
        return "no stacks: the process has ended, or has not come far enough to tell them"
    while not (whole := _has_answered(member, process, asked)):
        if not _listens(process):
            return "no stacks: the process has ended meanwhile"
        if time.monotonic() > deadline_s:
            break
        time.sleep(_POLL_S)
    dump = member.path.read_bytes()[asked.size :].decode(errors="replace").strip()
    return dump if whole else f"{dump}\nno more stacks: the process has not answered in {_PATIENCE_S:g} s".lstrip()


def _has_answered(member: Dumping, process: Path, asked: _Asked) -> bool:
    """Something is written, and the signal neither waits nor is being handled, for which time a thread blocks it."""
    waits = int(_status(process).get("ShdPnd", "0"), 16) & _BIT
    return not waits and member.path.stat().st_size > asked.size and _blocking(process) <= asked.deaf


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
