"""Data: sample order as a function, token files, their preparation, the loader.

Modules are imported by name (``from paceline.data.order import Plan``): only `tokens` and `loader` need torch,
and the helper processes of `prepare` must start without it.
"""

from __future__ import annotations

__all__: list[str] = []
