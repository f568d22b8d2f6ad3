"""What training holds in memory, measured."""

from __future__ import annotations

from paceline.memory.meter import SavedBytes, saved_bytes

__all__ = ["SavedBytes", "saved_bytes"]
