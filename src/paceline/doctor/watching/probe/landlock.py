"""Landlock: the kernel itself refuses this process, and all that it starts, to write anywhere but in some folders.

Whatever does the writing: Python, a library in C or Rust, another program. No privileges are needed (Linux 5.13 and
later, unless it was built without, or a container's filter does not let it through). Nothing lifts it again.

[Note: what it leaves open] Modes, owners and times of files may be changed anywhere, and in kernels before 6.2 a file
be cut by its name. What Python code does of that is refused by `probe.guarding`. Before 5.19 a file cannot be moved to
another folder by its name, not even between those that may be written to (``EXDEV``, on which `shutil.move` copies).

https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["confine"]

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls, by the numbers that all architectures have."""
_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION
_BENEATH = 1  # LANDLOCK_RULE_PATH_BENEATH
_NO_NEW_PRIVILEGES = 38  # PR_SET_NO_NEW_PRIVS

_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
"""Folders and files to be removed; devices, folders, files, sockets, pipes, links to be made."""
_SINCE = {1: _WRITE_FILE | _REMOVE_AND_MAKE, 2: _REFER, 3: _TRUNCATE}
"""What can be refused, by the version of Landlock that brought it."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled", ctypes.c_uint64),)


class _Rule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def confine(folders: Iterable[Path], *, existing: Iterable[Path] = ()) -> bool:
    """From now on this thread, and what it starts, writes below ``folders`` only. To be called before there are others.

    Args:
        existing: below these, what is there may be written to, such as devices, but nothing made or removed.

    Returns:
        Whether it holds. If not, nothing has changed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, 0, _VERSION)
    if version < 1:
        return False
    handled = sum(rights for since, rights in _SINCE.items() if since <= version)
    asked = _Ruleset(handled)
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(asked), ctypes.sizeof(asked), 0)
    if ruleset < 0:
        return False
    try:
        for rights, those in ((handled, folders), (handled & (_WRITE_FILE | _TRUNCATE), existing)):
            for folder in those:
                with _opened(folder) as descriptor:
                    rule = _Rule(rights, descriptor)
                    if libc.syscall(_ADD_RULE, ruleset, _BENEATH, ctypes.byref(rule), 0) != 0:
                        return False
        if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
            return False
        return bool(libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
