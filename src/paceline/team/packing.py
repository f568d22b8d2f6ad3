"""Values as bytes between the workers of one team, which run the same program: nothing else is ever unpickled."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["packed", "packed_apart", "unpacked", "unpacked_apart"]


def packed(value: Any) -> bytes:
    """``value`` with the bytes of its tensors."""
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def unpacked(data: bytes) -> Any:
    """What was `packed`."""
    return pickle.loads(data)


def packed_apart(value: Any) -> tuple[bytes, list[Tensor]]:
    """``value``, and beside it the tensors in it: large ones need not be copied to be sent.

    >>> data, tensors = packed_apart({"a": torch.ones(2), "b": 3})
    >>> unpacked_apart(data, [2 * tensor for tensor in tensors])
    {'a': tensor([2., 2.]), 'b': 3}
    """
    stream = io.BytesIO()
    tensors: list[Tensor] = []

    class Apart(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            if isinstance(value, Tensor):
                tensors.append(value.detach())
                return len(tensors) - 1
            return None

    Apart(stream).dump(value)
    return stream.getvalue(), tensors


def unpacked_apart(data: bytes, tensors: Sequence[Tensor]) -> Any:
    """What was `packed_apart`, with ``tensors`` in their places."""

    class Together(pickle.Unpickler):
        def persistent_load(self, number: int) -> Tensor:
            return tensors[number]

    return Together(io.BytesIO(data)).load()


class _Pickler(pickle.Pickler):
    """Pickles tensors by their bytes: a tenth of the time that torch's own way takes for small ones."""

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided
        if not plain or value.requires_grad or value.is_quantized:
            return NotImplemented
        flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
        return _tensor, (flat.view(torch.uint8).numpy().tobytes(), value.dtype, value.shape)


def _tensor(data: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
