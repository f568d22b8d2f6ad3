"""Tensors to and from ``.safetensors`` files, streamed and hashed on the way: no second copy of them in memory.

The format is the safetensors library's: 8 bytes of header length, a JSON header, then the raw little-endian tensors
without gaps. The data begin on a 64-byte boundary and wide elements come first, so every tensor is aligned to its own
element; the format refuses the gaps that would align each of them to 64 bytes. Tensors that are read own fresh storage
instead, which torch's allocator aligns to 64.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.disk import CHUNK, reading
from paceline.checkpoint.manifest import DamageError, FileEntry

__all__ = ["DTYPES", "read_tensors", "tensor_chunks"]

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that the format knows, by its names."""

_NAMED = {name: dtype for dtype, name in DTYPES.items()}


def tensor_chunks(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file that holds ``tensors`` (on the CPU, any strides), piece by piece.

    Only a tensor that is not contiguous is copied, one at a time.
    """
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key in order:
        tensor = tensors[key]
        end = offset + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    yield len(text).to_bytes(8, "little") + text
    for key in order:
        raw = _raw(tensors[key])
        for start in range(0, len(raw), CHUNK):
            yield raw[start : start + CHUNK]


def read_tensors(path: Path, entry: FileEntry) -> dict[str, torch.Tensor]:
    """Reads a file of `tensor_chunks`; each tensor owns fresh storage, aligned to 64 bytes.

    Raises:
        DamageError: the file is not what ``entry`` describes. What was read until then is dropped.
    """
    with reading(path, entry) as fill:
        prefix = bytearray(8)
        fill(memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if 8 + length > entry.size:
            raise DamageError(f"{path.name} has a damaged header")
        text = bytearray(length)
        fill(memoryview(text))
        try:
            layout = _layout(text, entry.size - 8 - length)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise DamageError(f"{path.name} has a damaged header") from error
        tensors = {}
        for key, dtype, shape in layout:
            tensors[key] = torch.empty(shape, dtype=dtype, device="cpu")
            fill(_raw(tensors[key]))
    return tensors


def _layout(header: bytearray, data: int) -> list[tuple[str, torch.dtype, list[int]]]:
    """Each tensor's key, dtype and shape, in the order of the file.

    The header is used before its hash is known, so it is not trusted: its tensors fill ``data`` bytes or it is damaged.
    """
    items = json.loads(header)
    items.pop("__metadata__", None)
    layout, position = [], 0
    for key, item in sorted(items.items(), key=lambda pair: pair[1]["data_offsets"]):
        dtype, shape, (start, end) = _NAMED[item["dtype"]], item["shape"], item["data_offsets"]
        if any(type(n) is not int or n < 0 for n in [start, *shape]):
            raise ValueError(f"no size of {key}")
        if start != position or end != start + math.prod(shape) * dtype.itemsize:
            raise ValueError(f"no place for {key}")
        layout.append((key, dtype, shape))
        position = end
    if position != data:
        raise ValueError("not the whole file")
    return layout


def _raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor: its own where it is contiguous, else those of a contiguous copy."""
    if not tensor.numel():  # its strides may be anything, and `view` minds them
        return memoryview(bytearray())
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
