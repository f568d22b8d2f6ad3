"""The directory of a run: who may use it, and how its small files are written."""

from __future__ import annotations

import tempfile
from pathlib import Path

from paceline.config import Resume
from paceline.errors import ConfigError

__all__ = ["prepare_run_dir", "replace_text"]

_LEFT_BY_A_FAILED_START = {"workers.json", "tensorboard"}


def prepare_run_dir(path: Path, resume: Resume) -> None:
    """Makes the run directory, or refuses it. Changes nothing in one that is there.

    Raises:
        ConfigError: a run is there already and ``resume`` is ``never``; there is none and it is ``must``; or nothing
            can be written there.
    """
    if resume == "must" and not any((path / "checkpoints").glob("step-*")):
        raise ConfigError(
            "cannot resume",
            found=f"no checkpoint in {path}",
            needed="one, for --resume must",
            fix="Use --resume auto (in a script: resume='auto') to start afresh where there is none",
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        there = sorted(entry.name for entry in path.iterdir() if _counts(entry))
    except OSError as error:
        raise ConfigError(
            f"cannot use the run directory {path}",
            found=error.strerror,
            needed="a directory that can be written",
            fix="Choose another with --run-dir (in a script: Execution(run_dir=...))",
        ) from None
    if resume == "never" and there:
        raise ConfigError(
            f"cannot start a run in {path}",
            found=f"{', '.join(there[:3])}{', ...' if len(there) > 3 else ''} there",
            needed="an empty directory",
            fix="Go on with that run by --resume, or choose another directory with --run-dir (in a script: "
            "resume='auto', Execution(run_dir=...))",
        )


def replace_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all: a reader sees the old text or the new."""
    part = path.with_name(f"{path.name}.tmp")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _counts(entry: Path) -> bool:
    """Whether it shows that a run is there."""
    return entry.name not in _LEFT_BY_A_FAILED_START and (entry.is_dir() or entry.stat().st_size > 0)
