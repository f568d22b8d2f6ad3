"""What training holds in memory, measured.

The names below load torch when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.memory.meter import Saved, saved_bytes

__all__ = ["Saved", "saved_bytes"]

_HOMES = {"Saved": "meter", "saved_bytes": "meter"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline.memory' has no attribute {name!r}")
    return getattr(importlib.import_module(f"paceline.memory.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
