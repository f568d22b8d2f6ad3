"""Keeps what the script writes inside of its scratch folder: what would change a file of the user's is refused.

[Note: two guards] The kernel refuses (`probe.landlock`), whoever writes. Python's audit events are looked at besides:
an event comes before its deed, and with a path, so that a link to an original can be made a file of the run's own, and
what is refused can be told. Where there is no Landlock they are the only guard, which C code and other programs pass.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.doctor.watching.probe.landlock import confine
from paceline.doctor.watching.probe.recorder import Recorder, RefusedError

__all__ = ["Guard", "here"]

_SAYS = "paceline doctor lets a script write into its scratch folder only (--in-place: anywhere)"
_SHARED = Path("/dev/shm")
"""Tensors go from loader workers to their rank through it."""
_MACHINE = (Path("/dev"), Path("/proc"), Path("/sys"))
"""Nobody's files: the kernel decides."""
_TOLD = 20
"""So many different paths are told."""
_WRITING = os.O_WRONLY | os.O_RDWR
_DATABASE_BYTES = 64 * 1024 * 1024
"""A larger database is one of samples, which is read; SQLite does so if it may not write."""

_Name = str | bytes | os.PathLike[Any] | int
"""As audit events give it; a number is an open file's."""


class Guard:
    """What a rank may write to: its scratch folder.

    Args:
        recorder: is told what is refused.
        scratch: where links stand for originals.
    """

    def __init__(self, recorder: Recorder, scratch: Path) -> None:
        self._recorder, self._scratch = recorder, scratch.resolve()
        self._told = set[Path]()
        self._by_kernel = False

    def hold(self) -> None:
        """Asks the kernel to refuse, from now on. To be called before there are threads."""
        self._by_kernel = confine([self._scratch, _SHARED], existing=[Path("/dev")])
        self._recorder.tell("guard", by="landlock" if self._by_kernel else "python", places=())

    @property
    def events(self) -> Mapping[str, Callable[..., None]]:
        """By audit event what is to be called with its arguments, and may raise `RefusedError`."""
        return {
            "open": self._opened,
            "sqlite3.connect": self._connected,
            "os.chmod": lambda path, _mode, at: self._changed(path, at),
            "os.chown": lambda path, _user, _group, at: self._changed(path, at),
            "os.removexattr": lambda path, _name: self._changed(path),
            "os.setxattr": lambda path, *_: self._changed(path),
            "os.truncate": lambda path, _length: self._changed(path),
            "os.utime": lambda path, _times, _ns, at: self._changed(path, at),
            "os.link": self._linked,
            "os.mkdir": lambda path, _mode, at: self._added(path, at),
            "os.symlink": lambda _source, path, at: self._added(path, at),
            "os.remove": self._taken,
            "os.rmdir": self._taken,
            "os.rename": self._renamed,
        }

    def about_to_write(self, path: Path, *, keep: bool) -> None:
        """What a file holds will be changed: a link to an original becomes a file of the run's own.

        Args:
            keep: with the original's content.

        Raises:
            RefusedError: it is the user's, and there is no link to replace, or no room for a copy.
        """
        if path.is_dir() or not path.parent.is_dir():
            return  # which fails anyway
        original = _real(path)
        if self._inside(original) or any(original.is_relative_to(folder) for folder in _MACHINE):
            return
        if not self._inside(_place(path)):
            self._refuse(path)
        with self._one_at_a_time():
            if path.is_symlink():  # else another rank has made it a file meanwhile
                copy = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
                try:
                    _copy(original, copy, keep=keep)
                    copy.replace(path)
                except OSError:
                    copy.unlink(missing_ok=True)
                    self._refuse(path)

    def _opened(self, path: _Name, _mode: object, flags: int) -> None:
        if isinstance(path, int) or not flags & (_WRITING | os.O_CREAT | os.O_TRUNC):
            return
        name = _absolute(path)
        if not _is_there(name):
            writes = bool(flags & os.O_CREAT)
        else:
            writes = bool(flags & (_WRITING | os.O_TRUNC)) and not (flags & os.O_CREAT and flags & os.O_EXCL)
        if writes:
            self.about_to_write(name, keep=not flags & os.O_TRUNC)

    def _connected(self, database: _Name) -> None:
        if isinstance(database, int):
            return
        path, _, options = os.fsdecode(database).removeprefix("file:").partition("?")
        if path in ("", ":memory:") or "mode=" in options or "immutable=1" in options:
            return
        name = _absolute(path)
        small_link = name.is_symlink() and name.exists() and name.stat().st_size <= _DATABASE_BYTES
        if small_link or not self._by_kernel:
            self.about_to_write(name, keep=True)

    def _changed(self, path: _Name, at: int = -1) -> None:
        if not isinstance(path, int):
            name = _absolute(path, at)
            if name.is_dir() and not self._inside(_real(name)):
                self._refuse(name)
            elif name.exists():
                self.about_to_write(name, keep=True)

    def _linked(self, source: _Name, path: _Name, source_at: int, at: int) -> None:
        self._changed(source, source_at)  # another name of an original is the original
        self._added(path, at)

    def _renamed(self, source: _Name, path: _Name, source_at: int, at: int) -> None:
        self._taken(source, source_at)
        if _is_there(_absolute(source, source_at)):
            self._name_changed(_absolute(path, at))

    def _added(self, path: _Name, at: int) -> None:
        if not _is_there(name := _absolute(path, at)):
            self._name_changed(name)

    def _taken(self, path: _Name, at: int) -> None:
        if _is_there(name := _absolute(path, at)):
            self._name_changed(name)

    def _name_changed(self, name: Path) -> None:
        if name.parent.is_dir() and not self._inside(_place(name)):
            self._refuse(name)

    def _inside(self, real: Path) -> bool:
        return real.is_relative_to(self._scratch) or real.is_relative_to(_SHARED)

    def _refuse(self, path: Path) -> None:
        path = Path(self._recorder.original(str(_place(path))))
        if "__pycache__" not in path.parts and path not in self._told and len(self._told) < _TOLD:
            self._told.add(path)
            self._recorder.tell("refused", path=str(path), own=self._recorder.called_by_user())
        raise RefusedError(errno.EACCES, _SAYS, str(path))

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Of all threads of all ranks."""
        with (self._scratch / "copying").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _copy(original: Path, copy: Path, *, keep: bool) -> None:
    if not keep:
        copy.touch()
    elif original.stat().st_size > shutil.disk_usage(copy.parent).free / 2:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(copy))
    else:
        shutil.copyfile(original, copy)
    shutil.copymode(original, copy)


def _absolute(path: _Name, at: int = -1) -> Path:
    """A path that may be relative to an open folder."""
    assert not isinstance(path, int)
    return (Path(f"/proc/self/fd/{at}").readlink() if at >= 0 else here()) / os.fsdecode(path)


def here() -> Path:
    """The working directory; where it was removed, a path at which there is nothing."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/proc/self/cwd/removed")


def _is_there(path: Path) -> bool:
    """Be it a link that leads nowhere."""
    return os.path.lexists(path)


def _place(path: Path) -> Path:
    """Without links, but for one that it is itself."""
    return _real(path.parent) / path.name if path.name not in ("", os.pardir) else _real(path)


def _real(path: Path) -> Path:
    """Without links; of those that lead round in a circle, as far as it goes."""
    return Path(os.path.realpath(path))
