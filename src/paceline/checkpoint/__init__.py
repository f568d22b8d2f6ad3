"""Training state on disk: committed whole, checked when read, refused under another identity, no pickle anywhere.

`Snapshot.take` copies a run's state in memory, `Store.save` (or a `Writer` in the background) commits it, and
`Store.load` finds the newest one that is whole.
"""

from __future__ import annotations

from paceline.checkpoint.manifest import compare_keys
from paceline.checkpoint.pack import Snapshot, pack
from paceline.checkpoint.store import Loaded, Store
from paceline.checkpoint.writer import Saved, Writer

__all__ = ["Loaded", "Saved", "Snapshot", "Store", "Writer", "compare_keys", "pack"]
