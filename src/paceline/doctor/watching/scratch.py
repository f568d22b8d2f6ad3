"""A folder in which a script runs as if it were in its own, so that what it writes is thrown away.

[Note: a folder of links] The script's folder and the working directory are rebuilt: real folders, copies of small files
and links to large ones. Reading needs nothing special, whatever language opens the file; new files land in the scratch
folder; a link is replaced by a copy before it is written to. Where there is too much to be rebuilt, a folder is linked
as it is, and can be read only. That nothing else is written to is seen to by `probe.guarding`.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline import env
from paceline.errors import UsageError

__all__ = ["Scratch", "scratched", "sweep", "with_originals"]

_PREFIX = "paceline-doctor-"
_OWNER = "owner"
"""File of a run's folder that is locked as long as it is in use."""

_SMALL_BYTES = 256 * 1024
_COPIED_BYTES = 64 * 1024 * 1024
_ENTRIES = 10_000
"""So much of a folder and all that it holds is rebuilt: work for a second, and again when it is removed."""
_FLAT = 1_000
"""A folder that holds more than this holds samples. It is linked."""
_AS_THEY_ARE = frozenset(
    {".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", ".tox", ".mypy_cache", ".ruff_cache"}
)
"""Folders that are large, and nothing that a training script writes to; as are those that hold one of `_INSTALLED`."""
_INSTALLED = ("pyvenv.cfg", "conda-meta")
_MACHINE = frozenset({"/proc", "/sys", "/dev", "/run"})

_CACHES = ("huggingface", "matplotlib", "torch")
"""What these libraries keep in the user's cache can be added to in the run; what others keep can be read only."""
_OTHER_CACHES = (
    "HF_DATASETS_CACHE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "MPLCONFIGDIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_HOME",
    "TRITON_CACHE_DIR",
    "WANDB_CACHE_DIR",
    "WANDB_DATA_DIR",
    "WANDB_DIR",
)
"""Variables that name such folders elsewhere."""
_PATH = re.compile(r"([^=/]*=)?(/.*)", re.DOTALL)
"""A word of the command line that is, or ends in, an absolute path: ``/data``, ``--out=/data/out``."""


@contextlib.contextmanager
def scratched(script: Path, *, in_place: bool) -> Iterator[Scratch]:
    """The folders for a run of ``script`` in the working directory. They are gone with the context.

    Args:
        in_place: nothing is rebuilt; the script runs where it is.

    Raises:
        UsageError: there is no room for them, or far too much beside the script.
    """
    with contextlib.ExitStack() as stack:
        try:
            sweep(Path(tempfile.gettempdir()))
            made = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
            scratch = Scratch(Path(stack.enter_context(made)).resolve(), in_place)
            stack.enter_context(_owned(scratch.home))
            scratch.place(Path.cwd(), script.resolve().parent)
            scratch.place_caches(env.for_template())
        except OSError as error:
            raise UsageError(
                "cannot make a scratch folder to run the script in",
                found=str(error),
                needed="room for links to the files beside the script",
                fix="Let TMPDIR name a folder with more room, or use --static",
            ) from None
        yield scratch


@contextlib.contextmanager
def _owned(home: Path) -> Iterator[None]:
    """Within, `sweep` leaves the folder alone: this process holds a lock on a file in it. The kernel takes it away with
    the process, however that ends."""
    new = home / "new-owner"
    with new.open("w") as lock:
        with contextlib.suppress(OSError):  # on disks without locks it is not swept either: that needs one
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(home / _OWNER)  # only now, so that it is never there without the lock
        yield


def sweep(temporary: Path) -> None:
    """Removes what is left of runs that were killed together with their keeper, such as by a machine that went down."""
    for folder in temporary.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with (folder / _OWNER).open("rb+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def with_originals(text: str, moved: Mapping[str, str]) -> str:
    """A text of the script's in which paths are as the user knows them.

    >>> with_originals("no file /tmp/home/folder-0/root/a.txt", {"/tmp/home/folder-0/root": "/"})
    'no file /a.txt'
    """
    for target, root in moved.items():
        text = text.replace(target + os.sep, str(Path(root) / "x")[:-1]).replace(target, root)
    return text


@dataclass
class Scratch:
    """The folders of a run.

    Args:
        home: a folder that is empty, or will be made.
        in_place: nothing is rebuilt; the script runs where it is.

    Attributes:
        moved: by rebuilt folder the one that it stands for.
    """

    home: Path
    in_place: bool
    moved: dict[str, str] = field(default_factory=dict)
    _variables: dict[str, str] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _rebuilt: set[Path] = field(default_factory=set)
    _copied: int = 0

    def place(self, *folders: Path) -> None:
        """Rebuilds ``folders``; one inside of another is rebuilt with it. Files that vanish meanwhile are left out.

        Raises:
            OSError: e.g. a full disk.
            UsageError: too many files.
        """
        if self.in_place:
            return
        for root in sorted({folder.resolve() for folder in folders}, key=lambda folder: len(folder.parts)):
            if not any(root.is_relative_to(done) for done in self.moved.values()):
                target = self._new_place(root)
                self._rebuild(root, target)
                self.moved[str(target)] = str(root)

    def place_caches(self, environ: Mapping[str, str]) -> None:
        """Rebuilds the folders in which libraries keep what they have downloaded or made."""
        if self.in_place:
            return
        home = environ.get("HOME")
        if cache := environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else None):
            self._variables["XDG_CACHE_HOME"] = str(self._place_cache(Path(cache).resolve()))
        for name in _OTHER_CACHES:
            folder = Path(environ.get(name, ""))
            if folder.is_absolute():
                if folder.is_dir():
                    self.place(folder)
                self._variables[name] = self.translated(str(folder))

    def _place_cache(self, cache: Path) -> Path:
        ours = self._new_place(cache)
        ours.mkdir()
        for entry in _entries(cache, _FLAT) or ():
            if entry.name in _CACHES and entry.is_dir():
                self._rebuild(Path(entry.path).resolve(), ours / entry.name)
            else:
                (ours / entry.name).symlink_to(entry.path)
        self.moved[str(ours)] = str(cache)
        return ours

    def within(self, path: Path) -> Path:
        """Where ``path`` is now."""
        path = path.resolve()
        for target, root in self.moved.items():
            if path.is_relative_to(root):
                return Path(target) / path.relative_to(root)
        return path

    def translated(self, word: str) -> str:
        """A word for the script, in which an absolute path is where it is now: one in a rebuilt folder, or one that is
        not there yet, and so can only be meant to be written.

        >>> scratch = Scratch(Path("/tmp/home"), False, moved={"/tmp/home/folder-0/project": "/project"})
        >>> scratch.translated("--epochs=3"), scratch.translated("1/2")
        ('--epochs=3', '1/2')
        """
        match = _PATH.fullmatch(word)
        if self.in_place or match is None:
            return word
        path = Path(os.path.normpath(match[2]))
        now = self._moved_to(path)
        if now is None and not os.path.lexists(path) and self._root_of(path) is None:
            parent = next(parent for parent in path.parents if parent.exists())
            if len(parent.parts) > 1:
                new = parent / path.relative_to(parent).parts[0]
                self.moved[str(self._new_place(new))] = str(new)
                now = self._moved_to(path)
        return word if now is None else (match[1] or "") + str(now) + "/" * match[2].endswith("/")

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What differs in the script's environment."""
        if self.in_place:
            return {}
        own = {"TMPDIR": str(self.temporary), "PWD": str(self.within(Path.cwd())), **self._variables}
        if "PYTHONPATH" in environ:
            folders = environ["PYTHONPATH"].split(os.pathsep)
            own["PYTHONPATH"] = os.pathsep.join(str(self._moved_to(Path(folder)) or folder) for folder in folders)
        return own

    @property
    def originals(self) -> dict[str, str]:
        """By folder of the run the user's that it takes the place of."""
        return {} if self.in_place else {**self.moved, str(self.temporary): tempfile.gettempdir()}

    @property
    def temporary(self) -> Path:
        """For temporary files."""
        folder = self.home / "tmp"
        folder.mkdir(exist_ok=True)
        return folder

    def _root_of(self, path: Path) -> tuple[Path, Path] | None:
        """The rebuilt folder that a path is in, and where that is now; not that which all paths are in."""
        roots = ((Path(root), Path(target)) for target, root in self.moved.items())
        return next((both for both in roots if path.is_relative_to(both[0]) and both[0].name), None)

    def _moved_to(self, path: Path) -> Path | None:
        """Where a path is now if it is in a rebuilt folder, and in none of that which is linked as it is."""
        if (found := self._root_of(path)) is None:
            return None
        root, target = found
        now = target / path.relative_to(root)
        return now if now.parent.resolve().is_relative_to(self.home) else None

    def _new_place(self, root: Path) -> Path:
        parent = self.home / f"folder-{next(self._numbers)}"
        parent.mkdir(parents=True)
        return parent / (root.name or "root")

    def _rebuild(self, root: Path, target: Path) -> None:
        """Level by level, and of each the small folders first: those are more like to be written to."""
        level, left = [(root, target)], _ENTRIES
        while level:
            listed = [(_entries(folder, _ENTRIES if folder == root else _FLAT), folder, copy) for folder, copy in level]
            level = []
            for entries, folder, copy in sorted(listed, key=lambda those: len(those[0] or ())):
                if folder == root and entries is None:
                    raise UsageError(
                        "cannot run the script in a scratch folder",
                        found=f"more than {_ENTRIES:,} files in {root} itself, or that they cannot be listed",
                        needed="a folder of which links can be made",
                        fix="Start it from another folder, use --static, or --in-place to let it write where it is",
                    )
                if entries is None or len(entries) > left:
                    copy.symlink_to(folder)
                    continue
                left -= len(entries)
                level += self._filled(copy, entries, root, target)

    def _filled(
        self, copy: Path, entries: list[os.DirEntry[str]], root: Path, target: Path
    ) -> Iterator[tuple[Path, Path]]:
        """Makes a folder that stands for one with ``entries``. Yields the folders in it that are to be made next."""
        copy.mkdir()
        for entry in entries:
            there = copy / entry.name
            real = Path(os.path.realpath(entry.path) if entry.is_symlink() else entry.path)
            if entry.is_symlink() and real.is_relative_to(root):
                there.symlink_to(target / real.relative_to(root))
            elif self._is_to_be_rebuilt(real, root):
                self._rebuilt.add(real)
                yield Path(entry.path), there
            elif not (self._is_small(real) and _is_copied(real, there)) and os.path.lexists(entry.path):
                there.symlink_to(entry.path)

    def _is_to_be_rebuilt(self, real: Path, root: Path) -> bool:
        """Whether it is a folder that is to be looked into."""
        if not real.is_dir() or real.name in _AS_THEY_ARE or str(real) in _MACHINE:
            return False
        if any((real / name).exists() for name in _INSTALLED):
            return False
        return real != self.home and not root.is_relative_to(real) and real not in self._rebuilt

    def _is_small(self, file: Path) -> bool:
        """Whether a file is to be copied: sources always, so that they are found beside what they write."""
        if not file.is_file() or not os.access(file, os.R_OK):
            return False
        size = file.stat().st_size
        if size > _SMALL_BYTES or (self._copied + size > _COPIED_BYTES and file.suffix != ".py"):
            return False
        self._copied += size
        return True


def _entries(folder: Path, most: int) -> list[os.DirEntry[str]] | None:
    """What a folder holds, by name; ``None``: more than ``most``, or it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            found = list(itertools.islice(entries, most + 1))
    except OSError:
        return None
    return sorted(found, key=lambda entry: entry.name) if len(found) <= most else None


def _is_copied(file: Path, there: Path) -> bool:
    """Copies a file, if it can be read and is still there."""
    try:
        shutil.copy2(file, there)
    except (FileNotFoundError, PermissionError, shutil.SpecialFileError):
        return False
    return True
