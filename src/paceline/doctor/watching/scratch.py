"""A folder in which a script runs as if it were in its own, so that what it writes is thrown away.

[Note: a folder of links] The script's folder and the working directory are rebuilt: real folders, copies of small files
and links to large ones. New files land in the scratch folder; a link is replaced by a copy before it is written to (see
`probe.files`). Reading needs nothing special, whatever language opens the file.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import UsageError

__all__ = ["Scratch"]

_SMALL_BYTES = 256 * 1024
_COPIED_BYTES = 64 * 1024 * 1024
_ENTRIES = 200_000
"""The most that are rebuilt. No folder is ever linked in their place: what is written there would be the original."""
_WHOLE = frozenset(
    {".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", ".tox", ".mypy_cache", ".ruff_cache"}
)
"""Linked as they are: large, and nothing that a training script writes to."""


@dataclass
class Scratch:
    """The folders of a run.

    Args:
        home: an empty folder.
        in_place: nothing is rebuilt; the script runs where it is.

    Attributes:
        moved: by rebuilt folder the one that it stands for.
    """

    home: Path
    in_place: bool
    moved: dict[str, str] = field(default_factory=dict)
    _entries: int = 0
    _copied: int = 0

    def place(self, *folders: Path) -> None:
        """Rebuilds ``folders``; one inside of another is rebuilt with it.

        Raises:
            UsageError: too many files.
        """
        if self.in_place:
            return
        roots = sorted({folder.resolve() for folder in folders}, key=lambda folder: len(folder.parts))
        for root in roots:
            if not any(root.is_relative_to(done) for done in self.moved.values()):
                target = self.home / f"folder-{len(self.moved)}" / root.name
                target.parent.mkdir(parents=True)
                self._rebuild(root, target)
                self.moved[str(target)] = str(root)

    def within(self, path: Path) -> Path:
        """Where ``path`` is now."""
        path = path.resolve()
        for target, root in self.moved.items():
            if path.is_relative_to(root):
                return Path(target) / path.relative_to(root)
        return path

    @property
    def temporary(self) -> Path:
        """For temporary files."""
        folder = self.home / "tmp"
        folder.mkdir(exist_ok=True)
        return folder

    def _rebuild(self, root: Path, target: Path) -> None:
        target.mkdir()
        pending = [(root, target)]
        while pending:
            folder, there = pending.pop(0)
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError:
                continue
            for entry in entries:
                copy = there / entry.name
                self._entries += 1
                if self._entries > _ENTRIES:
                    raise UsageError(
                        "cannot run the script in a scratch folder",
                        found=f"more than {_ENTRIES:,} files beside it, in {root}",
                        needed="a folder that can be rebuilt",
                        fix="Use --static, or --in-place to let it write where it is",
                    )
                if entry.is_dir(follow_symlinks=False) and entry.name not in _WHOLE:
                    copy.mkdir()
                    pending.append((Path(entry.path), copy))
                elif self._is_small(entry):
                    shutil.copy2(entry.path, copy)
                else:
                    copy.symlink_to(entry.path)

    def _is_small(self, entry: os.DirEntry[str]) -> bool:
        """Whether a file is to be copied."""
        if not entry.is_file() or not os.access(entry.path, os.R_OK):
            return False
        size = entry.stat().st_size
        if size > _SMALL_BYTES or self._copied + size > _COPIED_BYTES:
            return False
        self._copied += size
        return True
