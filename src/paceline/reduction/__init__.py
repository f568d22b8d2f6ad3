"""Sums over lanes in one fixed shape, whoever adds: the tree, buckets of gradients, their exchange, module buffers."""

from __future__ import annotations

__all__: list[str] = []
