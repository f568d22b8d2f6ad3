"""Digests of tensors and of random generators, by their bytes. Nothing is copied to speak of, nothing is drawn."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import xxhash

__all__ = ["generators", "of", "of_numbers", "rows", "sampled", "tensors_in"]

_ROWS = 512
_LEAVES = 16


def of(tensor: Any) -> str:
    """Of one tensor's bytes and shape."""
    return xxhash.xxh3_64_hexdigest(_bytes(tensor), seed=tensor.numel() & 0xFFFF)


def sampled(tensor: Any, count: int) -> list[float]:
    """Up to ``count`` of its values, at fixed places."""
    flat = tensor.detach().reshape(-1)
    stride = max(1, flat.numel() // count)
    return [float(value) for value in flat[::stride][:count].double().tolist()]


def tensors_in(value: Any, depth: int = 4) -> Iterator[Any]:
    """The tensors in lists, tuples, dicts and plain objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value[:_LEAVES]:
            yield from tensors_in(item, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module):
        for item in list(vars(value).values())[:_LEAVES]:
            yield from tensors_in(item, depth - 1)


def rows(batch: Any) -> list[str]:
    """A digest of each sample of a batch, over all its tensors and lists of strings of the same length."""
    columns = [column for column in _columns(batch) if len(column)]
    if not columns:
        return []
    alike = [column for column in columns if len(column) == len(columns[0])]
    return [
        xxhash.xxh3_64_hexdigest(b"".join(_bytes_of(column[i]) for column in alike))
        for i in range(min(len(columns[0]), _ROWS))
    ]


def _columns(batch: Any) -> list[Any]:
    """What has a value for each sample: tensors, and lists of strings."""
    if isinstance(batch, list | tuple) and batch and all(isinstance(item, str) for item in batch):
        return [batch]
    if isinstance(batch, list | tuple):
        return [column for item in batch[:_LEAVES] for column in _columns(item)]
    return [
        tensor.detach().contiguous()
        for tensor in tensors_in(batch)
        if tensor.dim() > 0 and tensor.device.type == "cpu" and not tensor.is_sparse
    ]


def _bytes_of(value: Any) -> bytes | memoryview:
    return value.encode() if isinstance(value, str) else _bytes(value)


def generators() -> dict[str, str]:
    """The states of the random generators that are in use."""
    numpy = sys.modules.get("numpy")
    states = {
        "torch": xxhash.xxh3_64_hexdigest(_bytes(torch.get_rng_state())),
        "random": xxhash.xxh3_64_hexdigest(repr(random.getstate()).encode()),
    }
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = xxhash.xxh3_64_hexdigest(keys.tobytes() + repr((kind, rest)).encode())
    return states


def _bytes(tensor: Any) -> bytes | memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def of_numbers(numbers: Sequence[int]) -> str:
    """Of a sequence of integers, in order."""
    return xxhash.xxh3_64_hexdigest(",".join(map(str, numbers)).encode())
