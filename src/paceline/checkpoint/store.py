"""A directory of checkpoints: each is whole or not there at all, whatever moment the power fails.

`Store.save` writes into ``step-00000200.tmp-<attempt>``, files first and the manifest last, all of it forced to the
disk, and then renames the directory: a name without ``.tmp`` was complete once. What happens to it later (a bad sector,
a careless copy) is caught by the hashes when it is loaded, and the one before is used.

Nothing here is collective: one worker saves, and any worker may load.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import math
import os
import platform
import re
import secrets
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.disk import fsync_directory, locked, read_bytes, write_file
from paceline.checkpoint.manifest import MANIFEST, DamageError, FileEntry, Manifest, Name, parse, verify
from paceline.checkpoint.pack import Packed, Snapshot, pack, pack_json, unpack
from paceline.checkpoint.tensors import read_tensors, tensor_chunks
from paceline.config import Identity
from paceline.errors import CheckpointError

__all__ = ["Loaded", "Store"]

_STATE = "state.json"
_STATE_NAME = re.compile(r"\w[\w.-]*")
_TEMPORARY = re.compile(r"step-\d{8,}(?:-\d+)?\.tmp-.+")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint that was read and found whole.

    Args:
        step: finished steps.
        states: by tracked name, ready for ``load_state_dict``. CPU tensors, each in 64-byte-aligned storage of its own.
        position: as it was saved.
        metrics: as they were saved.
        path: its directory.
        passed_over: one line for each newer checkpoint that could not be used: which, and why.
    """

    step: int
    states: Mapping[str, Any]
    position: Mapping[str, Any]
    metrics: Mapping[str, float]
    path: Path
    passed_over: list[str]


class Store:
    """The checkpoints of one run.

    Args:
        directory: where they live; made on the first save.
        keep: the newest so many stay after a save. One more is there while it is written.
        keep_best: the one with the lowest value of this metric stays as well (the newest of equals).

    >>> import tempfile
    >>> store = Store(Path(tempfile.mkdtemp()) / "checkpoints")
    >>> identity = Identity.of({"recipe": {"seed": 0}})
    >>> state = {"model": {"weight": torch.ones(2)}}
    >>> store.save(Snapshot.take(step=200, states=state, position={"epoch": 1}), identity).name
    'step-00000200'
    >>> loaded = store.load(identity)
    >>> loaded.step, loaded.states, loaded.position
    (200, {'model': {'weight': tensor([1., 1.])}}, {'epoch': 1})
    """

    def __init__(self, directory: Path, *, keep: int = 3, keep_best: str | None = None) -> None:
        self.directory = directory
        self.keep = keep
        self.keep_best = keep_best
        self._good: set[Name] = set()
        self._damaged: set[Name] = set()

    def save(self, snapshot: Snapshot, identity: Identity) -> Path:
        """Writes a checkpoint, commits it, and only then removes old ones. Returns its directory.

        The name is new even when the step was saved before. On any failure no trace of the attempt is left, and all
        other checkpoints are as they were.

        Raises:
            CheckpointError: the disk is full, not writable, or a value cannot be saved.
        """
        states = {_checked(name): pack(name, state) for name, state in snapshot.states.items()}
        position = pack_json("position", dict(snapshot.position))
        tensors = [tensor for packed in states.values() for tensor in packed.tensors.values()]
        try:
            self._make_directory()
            self._remove_stale()
            with self._attempt(snapshot.step) as attempt:
                files = _write_states(attempt, states, position)
                manifest = Manifest(
                    step=snapshot.step,
                    identity=identity,
                    files=files,
                    metrics={name: float(value) for name, value in snapshot.metrics.items()},
                    versions=_versions(),
                )
                write_file(attempt / MANIFEST, [manifest.render()])
                fsync_directory(attempt)
                name = self._commit(attempt, snapshot.step)
            fsync_directory(self.directory)
        except OSError as error:
            raise CheckpointError(
                f"cannot save the checkpoint of step {snapshot.step}",
                found=f"{error.strerror or error} in {self.directory}",
                needed=f"{_size(sum(tensor.nbytes for tensor in tensors))} that can be written there",
                fix="Free space or permit writing there, then resume: the checkpoints before this one are untouched",
            ) from error
        self._good.add(name)
        self._prune(name)
        return self.directory / str(name)

    def load(self, identity: Identity | None, *, only: Collection[str] | None = None) -> Loaded | None:
        """Reads the newest checkpoint that is whole; None when there is no checkpoint at all.

        Args:
            identity: what it must match; None takes any.
            only: names of the states to read (and check); all of them by default.

        Raises:
            CheckpointError: there are checkpoints but none is whole; or the newest whole one belongs to another run.
        """
        while True:
            names = self._names()
            passed_over: list[str] = []
            for name in reversed(names):
                try:
                    loaded = self._read(name, identity, only, passed_over)
                except (DamageError, OSError) as error:
                    passed_over.append(f"{name}: {_reason(error)}")
                    self._damaged.add(name)
                else:
                    self._good.add(name)
                    return loaded
            # A run that is still writing may have pruned what was listed here: then there is something newer.
            if all((self.directory / str(name)).exists() for name in names):
                break
        if not names:
            return None
        raise CheckpointError(
            f"cannot load a checkpoint from {self.directory}",
            found=f"{len(names)} and none of them whole ({'; '.join(passed_over)})",
            needed="one whose files match its manifest",
            fix="Restore one from a copy, or start afresh in another run directory",
        )

    def has(self, step: int) -> bool:
        """Whether a checkpoint of that many finished steps is committed."""
        return any(name.step == step for name in self._names())

    def _names(self) -> list[Name]:
        """Committed checkpoints, oldest first."""
        try:
            with os.scandir(self.directory) as entries:
                names = [Name.parse(entry.name) for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"cannot look for checkpoints in {self.directory}",
                found=str(error.strerror),
                needed="a directory that can be read",
                fix="Check the path and its permissions",
            ) from error
        return sorted(name for name in names if name)

    def _read(
        self, name: Name, identity: Identity | None, only: Collection[str] | None, passed_over: list[str]
    ) -> Loaded:
        path = self.directory / str(name)
        manifest = _read_manifest(path)
        with os.scandir(path) as entries:
            verify(manifest, name.step, {entry.name: entry.stat().st_size for entry in entries if entry.is_file()})
        if identity is not None:
            _check_identity(path, manifest.identity, identity)
        tree = json.loads(read_bytes(path / _STATE, manifest.files[_STATE]))
        states = {}
        for state_name, skeleton in tree["states"].items():
            if only is None or state_name in only:
                entry = manifest.files.get(file := f"{state_name}.safetensors")
                states[state_name] = unpack(skeleton, read_tensors(path / file, entry) if entry else {})
        return Loaded(
            step=manifest.step,
            states=states,
            position=unpack(tree["position"], {}),
            metrics=manifest.metrics,
            path=path,
            passed_over=passed_over,
        )

    def _make_directory(self) -> None:
        if not self.directory.is_dir():
            self.directory.mkdir(parents=True, exist_ok=True)
            fsync_directory(self.directory.parent)

    @contextlib.contextmanager
    def _attempt(self, step: int) -> Iterator[Path]:
        """A new temporary directory, locked for as long as its writer lives; gone if the block fails."""
        while True:
            path = self.directory / f"{Name(step, 1)}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
            path.mkdir()
            with locked(path, without_locks=True) as mine:
                if not mine:  # another process took it for a dead one's between the two calls, and removes it
                    continue
                try:
                    yield path
                except BaseException:
                    shutil.rmtree(path, ignore_errors=True)
                    raise
                return

    def _commit(self, attempt: Path, step: int) -> Name:
        while True:
            name = Name.free(step, [path.name for path in self.directory.iterdir()])
            try:
                attempt.rename(self.directory / str(name))
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # taken since it was listed
                    raise
            else:
                return name

    def _remove_stale(self) -> None:
        """Removes what writers left that died while writing or removing: whoever lives holds a lock."""
        for path in self.directory.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                with contextlib.suppress(OSError), locked(path, without_locks=False) as mine:
                    if mine:
                        shutil.rmtree(path, ignore_errors=True)

    def _prune(self, newest: Name) -> None:
        """Removes what is older than the checkpoints to keep. ``newest`` was just committed, so it is known to be good.

        Damaged ones do not count among the kept. Those that are newer than any good one are left for people to look
        at, and go when the run has passed them.
        """
        names = self._names()
        usable = [name for name in names if name not in self._damaged]
        kept = {newest, *usable[-self.keep :]}
        best = self._best(usable)
        if best is not None:
            kept.add(best)
        for name in names:
            if name not in kept and name < max(self._good):
                self._remove(name)

    def _best(self, names: list[Name]) -> Name | None:
        """The newest of those with the lowest finite value of the metric to keep by."""
        best: tuple[float, Name] | None = None
        for name in names if self.keep_best is not None else []:
            with contextlib.suppress(DamageError, OSError):
                value = _read_manifest(self.directory / str(name)).metrics.get(self.keep_best or "", math.nan)
                if math.isfinite(value) and (best is None or value <= best[0]):
                    best = (value, name)
        return best and best[1]

    def _remove(self, name: Name) -> None:
        """Takes the name away first: what a crash leaves half removed is not mistaken for a checkpoint."""
        doomed = self.directory / f"{name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            (self.directory / str(name)).rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            # The save itself has succeeded, and a run is not stopped for a leftover.
            warnings.warn(f"cannot remove old checkpoint {self.directory / str(name)}: {error.strerror}", stacklevel=2)


def _write_states(directory: Path, states: Mapping[str, Packed], position: Any) -> dict[str, FileEntry]:
    files = {}
    for name, packed in states.items():
        if packed.tensors:
            file = f"{name}.safetensors"
            files[file] = write_file(directory / file, tensor_chunks(packed.tensors))
    tree = {"states": {name: packed.skeleton for name, packed in states.items()}, "position": position}
    files[_STATE] = write_file(directory / _STATE, [json.dumps(tree, allow_nan=False).encode()])
    return files


def _read_manifest(path: Path) -> Manifest:
    try:
        return parse((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise DamageError(f"{MANIFEST} is missing") from None


def _reason(error: DamageError | OSError) -> str:
    if isinstance(error, OSError):
        return f"cannot read {Path(error.filename or MANIFEST).name}: {error.strerror}"
    return str(error)


def _check_identity(path: Path, there: Identity, here: Identity) -> None:
    differences = there.differences(here)
    if differences:
        more = f"; and {len(differences) - 8} more" if len(differences) > 8 else ""
        raise CheckpointError(
            f"cannot resume from {path}",
            found=f"another run's state ({'; '.join(differences[:8])}{more})",
            needed="the recipe, task and data that it was written with",
            fix="Set these fields back, or begin a new run in another run directory "
            "(recipe.init_from begins it from these weights)",
            cause="usage",
        )


def _checked(name: str) -> str:
    if not _STATE_NAME.fullmatch(name):
        raise CheckpointError(
            f"cannot save the state of {name!r}",
            found="a name that cannot be a file's",
            needed="letters, digits, _ - and . only",
            fix="Track it under another name",
            cause="usage",
        )
    return name


def _versions() -> dict[str, str]:
    return {
        "paceline": importlib.metadata.version("paceline"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count} bytes"
