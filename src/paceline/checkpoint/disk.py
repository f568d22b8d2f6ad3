"""Files that are surely on the disk, are hashed on the way, and directories that the dead do not keep."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash

from paceline.checkpoint.manifest import DamageError, FileEntry

__all__ = ["CHUNK", "fsync_directory", "locked", "read_bytes", "reading", "write_file"]

CHUNK = 4 << 20
"""Bytes read or written in one go: hashed while they are still in the cache."""


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Writes a new file and returns once its bytes are on the disk."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size, f"xxh3_128:{digest.hexdigest()}")


@contextlib.contextmanager
def reading(path: Path, entry: FileEntry) -> Iterator[Callable[[memoryview], None]]:
    """Yields a function that fills a buffer with the file's next bytes. The block must read to the end.

    Raises:
        DamageError: at the end of the block, unless the file was what ``entry`` describes: until then trust nothing.
    """
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:

        def fill(view: memoryview) -> None:
            while view:
                count = file.readinto(view[:CHUNK])
                if not count:
                    raise DamageError(f"{path.name} ends early")
                digest.update(view[:count])
                view = view[count:]

        yield fill
        if file.read(1):
            raise DamageError(f"{path.name} has bytes after its end")
    if f"xxh3_128:{digest.hexdigest()}" != entry.hash:
        raise DamageError(f"{path.name} does not match its hash")


def read_bytes(path: Path, entry: FileEntry) -> bytes:
    """Reads a whole file.

    Raises:
        DamageError: it is not what ``entry`` describes.
    """
    raw = bytearray(entry.size)
    with reading(path, entry) as fill:
        fill(memoryview(raw))
    return bytes(raw)


@contextlib.contextmanager
def locked(path: Path, *, without_locks: bool) -> Iterator[bool]:
    """Whether this directory is there and now locked by us; ``without_locks``: the answer where there are no locks.

    A lock tells the living from the dead where a process id cannot: in a container every start has the same ids.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = True
        except BlockingIOError:
            mine = False
        except OSError:
            mine = without_locks
        yield mine and path.exists()
    finally:
        # Closing alone would leave it locked by a child that was forked meanwhile, a loader worker for one.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Returns once the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
