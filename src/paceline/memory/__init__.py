"""What training holds in memory: measured, planned, and made to fit by recomputing blocks."""

from __future__ import annotations

from paceline.memory.blocks import find_blocks
from paceline.memory.meter import SavedBytes, saved_bytes
from paceline.memory.recompute import recompute

__all__ = ["SavedBytes", "find_blocks", "recompute", "saved_bytes"]
