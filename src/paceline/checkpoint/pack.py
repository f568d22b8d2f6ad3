"""A run's state as tensors and JSON, and back, exactly: `pack`, `unpack`, and the copy in memory, `Snapshot`.

A state is what ``state_dict()`` returns: dicts (str or int keys), lists and tuples of tensors and scalars. Its tensors
are named by their path, ``state/0/exp_avg``; a module's state is one level of names, so there the path is the bare name
and the file loads into the bare model. The rest becomes a JSON skeleton in which every object has one key, its kind:

>>> packed = pack("optimizer", {"betas": (0.9, float("inf")), "state": {0: {"step": torch.tensor(1.0)}}})
>>> packed.tensors
{'state/0/step': tensor(1.)}
>>> packed.skeleton["dict"][0]
['betas', {'tuple': [0.9, {'float': '7ff0000000000000'}]}]
>>> unpack(packed.skeleton, packed.tensors)
{'betas': (0.9, inf), 'state': {0: {'step': tensor(1.)}}}
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from paceline.checkpoint.tensors import DTYPES
from paceline.errors import CheckpointError

__all__ = ["Packed", "Snapshot", "pack", "pack_json", "unpack"]

_NUMPY_KINDS = {np.bool_, *(np.dtype(code).type for code in "bhilBHILefd")}
"""Scalars such as a learning rate computed with numpy; of their own kind, so that they come back as such."""
_MAX_DEPTH = 64
"""Deeper than any state_dict, far less than Python's stack; also what ends a list that contains itself."""


@dataclass(frozen=True)
class Packed:
    """One state in two parts.

    Args:
        tensors: by path; they are the caller's own tensors, not copies.
        skeleton: JSON that says where each of them belongs, and all the rest.
    """

    tensors: dict[str, torch.Tensor]
    skeleton: Any


def pack(name: str, state: Any) -> Packed:
    """Takes a state apart. ``name`` is used in errors only.

    Raises:
        CheckpointError: a value that no pickle-free file can hold, named by its path.
    """
    tensors: dict[str, torch.Tensor] = {}
    return Packed(tensors, _encode(state, [name], tensors))


def pack_json(name: str, value: Any) -> Any:
    """The skeleton of a value without tensors.

    Raises:
        CheckpointError: as `pack`, and for a tensor.
    """
    packed = pack(name, value)
    for key in packed.tensors:
        raise _refusal([name, key], "a tensor", "Track what holds it, or turn it into a number")
    return packed.skeleton


def unpack(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `pack`. Tensors are handed on, not copied."""
    if isinstance(skeleton, list):
        return [unpack(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, value),) = skeleton.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "tuple":
        return tuple(unpack(item, tensors) for item in value)
    if kind == "dict":
        return {key: unpack(item, tensors) for key, item in value}
    if kind == "counter":
        return Counter({key: unpack(item, tensors) for key, item in value})
    if kind == "numpy":
        return np.frombuffer(bytes.fromhex(value[1]), dtype=value[0])[0]
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(value))[0]
    return int(value, 16)


def _encode(value: Any, path: list[str], tensors: dict[str, torch.Tensor]) -> Any:
    # Exact types: a subclass (np.float64, an enum, a namedtuple) would come back as something else.
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < 2**63 else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if isinstance(value, np.generic) and kind in _NUMPY_KINDS:
        return {"numpy": [value.dtype.str, value.tobytes().hex()]}
    if isinstance(value, torch.Tensor):
        key = _free_key(path[1:], tensors)
        tensors[key] = _storable(value, path)
        return {"tensor": key}
    if len(path) > _MAX_DEPTH:
        raise _refusal(path, f"more than {_MAX_DEPTH} levels", "Keep the state flatter; it must not contain itself")
    if kind in (list, tuple):
        items = [_encode(item, [*path, str(i)], tensors) for i, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind in (dict, OrderedDict, Counter):
        for key in value:
            if type(key) not in (str, int):
                raise _refusal([*path, repr(key)], f"a key of type {type(key).__name__}", "Use str or int keys")
        pairs = [[key, _encode(item, [*path, str(key)], tensors)] for key, item in value.items()]
        return {"counter" if kind is Counter else "dict": pairs}
    raise _refusal(path, f"a value of type {kind.__module__}.{kind.__qualname__}", "Convert it in state_dict()")


def _free_key(path: list[str], taken: Mapping[str, Any]) -> str:
    """``a/b`` for the path ``[a, b]``, told apart from others that read the same ({0: t, "0": t}) by tildes."""
    key = "/".join(path) if path else "tensor"
    key = key.encode("utf-8", "backslashreplace").decode()
    while key in taken or key == "__metadata__":
        key += "~"
    return key


def _storable(tensor: torch.Tensor, path: list[str]) -> torch.Tensor:
    plain = tensor.detach()
    if type(plain) is not torch.Tensor or plain.layout is not torch.strided or plain.is_meta:
        found = f"{type(tensor).__name__} with layout {tensor.layout} on {tensor.device}"
        raise _refusal(path, found, "Save a dense tensor that holds data")
    if plain.dtype not in DTYPES:
        raise _refusal(path, f"a tensor of {plain.dtype}", "Save it as another dtype")
    return plain.resolve_conj().resolve_neg()


def _refusal(path: list[str], found: str, fix: str) -> CheckpointError:
    return CheckpointError(
        f"cannot save {path[0]}",
        found=f"{found} at {'/'.join(path)}",
        needed="dicts, lists and tuples of tensors, None, bool, int, float, str and numpy scalars",
        fix=fix,
        cause="usage",
    )


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a run after ``step`` finished steps. Nobody may change its tensors.

    Args:
        step: finished steps.
        states: what each tracked object's ``state_dict()`` returned, by its tracked name.
        position: JSON values; everything else the run needs to go on.
        metrics: held-out metrics known at this step.
    """

    step: int
    states: Mapping[str, Any]
    position: Mapping[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def take(
        cls,
        *,
        step: int,
        states: Mapping[str, Any],
        position: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> Snapshot:
        """Copies everything, so that training may go on while the copy is written.

        On return every tensor lies in CPU memory of its own; tied weights share one copy. Tensors on a GPU are copied
        after all work queued on it so far, on any stream.

        Raises:
            CheckpointError: a value that cannot be saved; better now than in the background.
        """
        packed = {name: pack(name, state) for name, state in states.items()}
        gpus = {t.device for part in packed.values() for t in part.tensors.values() if t.is_cuda}
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        copies: dict[tuple[Any, ...], torch.Tensor] = {}
        taken = {}
        for name, part in packed.items():
            tensors = {key: _copy(tensor, copies) for key, tensor in part.tensors.items()}
            taken[name] = unpack(part.skeleton, tensors)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        return cls(
            step=step,
            states=taken,
            position=unpack(pack_json("position", dict(position)), {}),
            metrics=dict(metrics or {}),
        )


def _copy(tensor: torch.Tensor, copies: dict[tuple[Any, ...], torch.Tensor]) -> torch.Tensor:
    """A copy in CPU memory; of a GPU's tensor it is whole only after the GPU was synchronised."""
    alike = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if alike not in copies:
        copies[alike] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        copies[alike].copy_(tensor, non_blocking=tensor.is_cuda)
    return copies[alike]
