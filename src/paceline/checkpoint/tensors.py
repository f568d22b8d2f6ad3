"""Tensors to and from ``.safetensors`` files, streamed and hashed on the way: no second copy of them in memory.

The format is the safetensors library's: 8 bytes of header length, a JSON header, then the raw little-endian tensors
without gaps. The data begin on a 64-byte boundary and wide elements come first, so every tensor is aligned to its own
element; the format refuses the gaps that would align each of them to 64 bytes. Tensors that are read own fresh storage
instead, which torch's allocator aligns to 64.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash

from paceline.checkpoint.manifest import DamageError, FileEntry

__all__ = ["DTYPES", "read_bytes", "read_tensors", "tensor_chunks", "write_file"]

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
T = TypeVar("T")
_CHUNK = 4 << 20
"""Bytes written or read in one go: small enough to be hashed while in the cache."""


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Writes a new file, hashing on the way, and returns once its bytes are on the disk (fsync)."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size, f"xxh3_128:{digest.hexdigest()}")


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
        raw = _raw(tensors[key].contiguous())
        for start in range(0, len(raw), _CHUNK):
            yield raw[start : start + _CHUNK]


def read_tensors(path: Path, entry: FileEntry) -> dict[str, torch.Tensor]:
    """Reads a safetensors file of ours; each tensor owns fresh storage, aligned to 64 bytes.

    Raises:
        DamageError: the file is not what ``entry`` describes. What was read until then is dropped.
    """

    def parse(fill: Callable[[memoryview], None]) -> dict[str, torch.Tensor]:
        prefix = bytearray(8)
        fill(memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        # The header is used before the hash is known, so nothing in it is trusted, least of all a size.
        if 8 + length > entry.size:
            raise DamageError(f"{path.name} has a damaged header")
        text = bytearray(length)
        fill(memoryview(text))
        tensors = {}
        try:
            header = json.loads(text)
            header.pop("__metadata__", None)
            position = 0
            for key, item in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
                dtype, shape, (start, end) = _NAMED[item["dtype"]], tuple(item["shape"]), item["data_offsets"]
                if (
                    start != position
                    or end - start != math.prod(shape) * dtype.itemsize
                    or 8 + length + end > entry.size
                ):
                    raise ValueError(key)
                tensors[key] = torch.empty(shape, dtype=dtype)
                fill(_raw(tensors[key]))
                position = end
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise DamageError(f"{path.name} has a damaged header") from error
        return tensors

    return _read(path, entry, parse)


def read_bytes(path: Path, entry: FileEntry) -> bytes:
    """Reads a whole file.

    Raises:
        DamageError: the file is not what ``entry`` describes.
    """

    def parse(fill: Callable[[memoryview], None]) -> bytes:
        raw = bytearray(entry.size)
        fill(memoryview(raw))
        return bytes(raw)

    return _read(path, entry, parse)


def _read(path: Path, entry: FileEntry, parse: Callable[[Callable[[memoryview], None]], T]) -> T:
    """What ``parse`` makes of the file through a function that fills a buffer with its next bytes; hashed."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:

        def fill(view: memoryview) -> None:
            while view:
                count = file.readinto(view[:_CHUNK])
                if not count:
                    raise DamageError(f"{path.name} ends early")
                digest.update(view[:count])
                view = view[count:]

        result = parse(fill)
        if file.read(1):
            raise DamageError(f"{path.name} has bytes after its end")
    if f"xxh3_128:{digest.hexdigest()}" != entry.hash:
        raise DamageError(f"{path.name} does not match its hash")
    return result


def _raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared with it."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
