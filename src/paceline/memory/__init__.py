"""What training holds in memory: measured, planned, and made to fit by recomputing blocks."""

from __future__ import annotations

from paceline.memory.blocks import find_blocks
from paceline.memory.fit import Fit, fit
from paceline.memory.meter import SavedBytes, saved_bytes
from paceline.memory.peak import Peak, resident_bytes
from paceline.memory.recompute import recompute

__all__ = ["Fit", "Peak", "SavedBytes", "find_blocks", "fit", "recompute", "resident_bytes", "saved_bytes"]
