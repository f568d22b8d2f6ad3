"""Reads a script without importing or running it, and finds what can be told from its source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.doctor.findings import Finding
from paceline.errors import UsageError

__all__ = ["Read", "read"]


@dataclass(frozen=True, kw_only=True)
class Read:
    """What was read.

    Args:
        notes: what could not be read, and why.
        looked: whether the script itself could be read.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    looked: bool


def read(script: Path) -> Read:
    """Reads ``script`` and the local files that it imports.

    Raises:
        UsageError: there is no such file.
    """
    if not script.is_file():
        raise UsageError(
            "cannot read the script", found=str(script), needed="a Python file", fix="give the path of a script"
        )
    return Read(findings=(), notes=(), looked=True)
