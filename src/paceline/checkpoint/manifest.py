"""What a checkpoint says about itself, and the names of its directories. Pure: no disk, no torch.

``manifest.json`` is written last, so a directory without one was never finished. Its first line holds the hash of all
its other bytes, so one flipped byte anywhere in it is noticed; the rest holds the hash of every other file.

>>> text = Manifest(step=200, identity=Identity.of({"seed": 0}), files={}, metrics={"loss": 1.5}, versions={}).render()
>>> parse(text).metrics
{'loss': 1.5}
>>> parse(text.replace(b"200", b"201"))
Traceback (most recent call last):
    ...
paceline.checkpoint.manifest.DamageError: manifest.json does not match its own hash
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from paceline.config import Identity
from paceline.errors import CheckpointError, did_you_mean

__all__ = ["MANIFEST", "SCHEMA", "DamageError", "FileEntry", "Manifest", "Name", "compare_keys", "parse", "verify"]

MANIFEST = "manifest.json"
SCHEMA = 1
"""Raised whenever an older reader would misread a checkpoint."""

_NAME = re.compile(r"step-(\d{8,})(?:-([1-9]\d*))?")
_FIRST_LINE = re.compile(rb'\{"hash": "(xxh3_128:[0-9a-f]{32})",')


class DamageError(Exception):
    """Why a checkpoint cannot be used, in a few words: another one is tried, so this is not yet the user's error."""


class Name(NamedTuple):
    """The directory of a checkpoint; tuples order as checkpoints do: by step, then by attempt at that step.

    >>> str(Name(200, 1)), str(Name(200, 2)), Name.parse("step-00000200-2")
    ('step-00000200', 'step-00000200-2', Name(step=200, attempt=2))
    >>> Name.parse("step-00000200.tmp-17-5f0c") is None
    True
    """

    step: int
    attempt: int

    def __str__(self) -> str:
        return f"step-{self.step:08d}" + (f"-{self.attempt}" if self.attempt > 1 else "")

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """The name that prints as ``text``, or None."""
        match = _NAME.fullmatch(text)
        name = match and cls(int(match[1]), int(match[2] or 1))
        return name if name and str(name) == text else None

    @classmethod
    def free(cls, step: int, taken: Collection[str]) -> Name:
        """The first unused name that is newer than every name of this step: a name is never used twice.

        >>> str(Name.free(200, ["step-00000200", "step-00000100"]))
        'step-00000200-2'
        """
        used = [name.attempt for name in map(cls.parse, taken) if name and name.step == step]
        return cls(step, max(used, default=0) + 1)


@dataclass(frozen=True)
class FileEntry:
    """A file as it was written: its size in bytes and ``xxh3_128:`` with 32 hexadecimal digits."""

    size: int
    hash: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of ``manifest.json``.

    Args:
        step: finished steps.
        identity: whose state this is.
        files: every other file of the checkpoint.
        metrics: held-out metrics known at this step.
        versions: of paceline, torch and python, for people; never compared.
    """

    step: int
    identity: Identity
    files: Mapping[str, FileEntry]
    metrics: Mapping[str, float]
    versions: Mapping[str, str]

    def render(self) -> bytes:
        """The bytes of the file: JSON whose first line holds the hash of the others."""
        body = {
            "schema": SCHEMA,
            "step": self.step,
            "identity": {"digest": self.identity.digest, "fields": dict(self.identity.fields)},
            "files": {name: {"size": entry.size, "hash": entry.hash} for name, entry in sorted(self.files.items())},
            # JSON has no NaN or infinity; a diverged loss must not make the checkpoint unreadable for other tools.
            "metrics": {name: value if math.isfinite(value) else str(value) for name, value in self.metrics.items()},
            "versions": dict(self.versions),
        }
        rest = json.dumps(body, indent=2)[1:].encode() + b"\n"
        return b'{"hash": "' + _hash(rest).encode() + b'",' + rest


def parse(raw: bytes) -> Manifest:
    """Reads what `Manifest.render` wrote.

    Raises:
        DamageError: a byte differs from what was written, or a newer paceline wrote it.
    """
    if not raw:
        raise DamageError(f"{MANIFEST} is empty")
    first = _FIRST_LINE.match(raw)
    if not first:
        raise DamageError(f"{MANIFEST} does not begin with its hash")
    if _hash(raw[first.end() :]).encode() != first[1]:
        raise DamageError(f"{MANIFEST} does not match its own hash")
    tree = json.loads(raw)
    if tree["schema"] != SCHEMA:
        raise DamageError(f"{MANIFEST} has schema {tree['schema']}, this version of paceline reads {SCHEMA}")
    return Manifest(
        step=tree["step"],
        identity=Identity(tree["identity"]["fields"]),
        files={name: FileEntry(entry["size"], entry["hash"]) for name, entry in tree["files"].items()},
        metrics={name: float(value) for name, value in tree["metrics"].items()},
        versions=tree["versions"],
    )


def verify(manifest: Manifest, step: int, listing: Mapping[str, int]) -> None:
    """Checks a directory named for ``step`` with ``listing`` (file name to size in bytes) against its manifest.

    Files that the manifest does not name are no damage: notes and editor files may lie beside.

    Raises:
        DamageError: everything that is missing or has another size.
    """
    reasons = [] if manifest.step == step else [f"{MANIFEST} is of step {manifest.step}"]
    for name, entry in manifest.files.items():
        if name not in listing:
            reasons.append(f"{name} is missing")
        elif listing[name] != entry.size:
            reasons.append(f"{name} has {listing[name]} bytes instead of {entry.size}")
    if reasons:
        raise DamageError("; ".join(reasons))


def compare_keys(name: str, saved: Iterable[str], current: Iterable[str]) -> None:
    """Checks, both ways, that a checkpoint holds exactly what the run tracks as ``name``.

    >>> compare_keys("model", ["a", "b"], ["b", "a"])
    >>> compare_keys("model", ["wight"], ["weight"])
    Traceback (most recent call last):
        ...
    paceline.errors.CheckpointError: cannot restore model: found wight only in the checkpoint; weight only in this \
run, need the same names in both. Did you mean 'weight'? Track what was tracked when the checkpoint was written.

    Raises:
        CheckpointError: a usage error that names every difference.
    """
    there, here = set(saved), set(current)
    lost, new = sorted(there - here), sorted(here - there)
    if not lost and not new:
        return
    parts = [f"{_some(lost)} only in the checkpoint"] if lost else []
    parts += [f"{_some(new)} only in this run"] if new else []
    near = [hint for hint in (did_you_mean(key, new) for key in lost[:3]) if hint.startswith("Did you mean")]
    raise CheckpointError(
        f"cannot restore {name}",
        found="; ".join(parts),
        needed="the same names in both",
        fix=" ".join([*near, "Track what was tracked when the checkpoint was written"]),
        cause="usage",
    )


def _some(names: list[str], most: int = 5) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _hash(raw: bytes) -> str:
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(raw)}"
