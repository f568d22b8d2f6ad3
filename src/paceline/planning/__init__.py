"""What a run will need, told before it starts: `paceline plan`."""

from __future__ import annotations

__all__: list[str] = []
