"""Torch's fake tensors, made cheap for steps that run the same operators on the same shapes over and over."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch._library.utils import is_builtin
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["Fakes", "Watcher", "current_fakes"]


class Watcher(Protocol):
    """Somebody who is told of operators."""

    def begins(self, func: Any) -> None:
        """Before each."""

    def ends(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """After each."""


class Fakes(FakeTensorMode):
    """A `FakeTensorMode` that remembers what operators return: a fifth of the time that torch's own memory takes.

    What is remembered of a call is its operator with the shapes, strides, types and devices of its tensors and all
    other arguments; what is given back are tensors of the same shapes, new ones or views of the same arguments. All
    that is unusual is left to torch, each time anew: numbers as results, operators that look at numbers or are not
    torch's own, tensors that are not fake, sparse, or constants.
    """

    def __init__(self) -> None:
        # Tensors that a model holds outside of its buffers are taken for fake ones of the same shape.
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's own
        self._watcher: Watcher | None = None
        """Who is told of each operator: at a third less time than a dispatch mode of its own would take."""
        self._known: dict[object, _Result] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        """Of a new fake tensor, by device."""

    @contextmanager
    def watched_by(self, watcher: Watcher) -> Iterator[None]:
        """Inside it ``watcher`` is told of each operator, and nobody else."""
        before, self._watcher = self._watcher, watcher
        try:
            yield
        finally:
            self._watcher = before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would wrap each call once more, though nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for each operator."""
        if func is torch.ops.prim.device.default:  # two thirds of all calls
            return args[0].fake_device
        watcher, kwargs = self._watcher, kwargs or {}
        if watcher is None:
            return self._result(func, types, args, kwargs)
        self._watcher = None  # what an operator is made of is not told
        try:
            watcher.begins(func)
            result = self._result(func, types, args, kwargs)
            if result is not NotImplemented:
                watcher.ends(func, args, kwargs, result)
            return result
        finally:
            self._watcher = watcher

    def _result(self, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given: list[FakeTensor] = []
        described = None
        if _is_usual(func) and not torch.is_inference_mode_enabled():
            described = self._described((args, kwargs), given)
        if described is None:  # `dispatch`, since what calls it in torch logs errors
            return self.dispatch(func, types, args, kwargs)
        key = (func, torch.get_default_dtype(), described)
        known = self._known.get(key)
        if known is not None:
            made = [None if output is None else self._made(output, given) for output in known.outputs]
            return known.container(made) if known.container is not None else made[0]
        result = self.dispatch(func, types, args, kwargs)
        if self._described((args, kwargs), []) == described:  # else it changed what it was given
            learned = self._learned(result, given)
            if learned is not None:
                self._known[key] = learned
        return result

    def _described(self, value: Any, given: list[FakeTensor]) -> object:
        """A key for a value among the arguments, ``None`` for one that is unusual; its tensors go to ``given``."""
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.fake_mode is not self or value.layout is not torch.strided:
                return None
            if value.is_conj() or value.is_neg():
                return None
            given.append(value)
            return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
        if kind is tuple or kind is list:
            parts = []
            for each in value:
                part = self._described(each, given)
                if part is None:
                    return None
                parts.append(part)
            return kind, *parts
        if kind is dict:
            return self._described([*value, *value.values()], given)
        if kind in _PLAIN:
            return kind, value  # 1 and 1.0 are equal, but make other tensors
        return None

    def _learned(self, result: Any, given: list[FakeTensor]) -> _Result | None:
        """How to give that result again, if that can be."""
        container = type(result) if type(result) in (tuple, list) else None
        outputs: list[_Output | None] = []
        new: set[int] = set()
        for output in result if container is not None else [result]:
            learned = None
            if output is not None:
                if type(output) is not FakeTensor or self._described(output, []) is None:
                    return None
                storage = output.untyped_storage()
                sources = [at for at, tensor in enumerate(given) if tensor.untyped_storage()._cdata == storage._cdata]
                is_same = bool(sources) and given[sources[0]] is output
                if len(sources) > 1 or storage._cdata in new:
                    return None  # which of them is it?
                if output.requires_grad and not is_same:
                    return None
                learned = _Output(
                    shape=tuple(output.shape),
                    stride=output.stride(),
                    offset=int(output.storage_offset()),
                    dtype=output.dtype,
                    device=output.fake_device,
                    source=sources[0] if sources else None,
                    is_same=is_same,
                )
                self._attributes.setdefault(learned.device, dict(output.__dict__))
                if not sources:
                    new.add(storage._cdata)
                    again = self._made(learned, [])
                    if output.storage_offset() or again.untyped_storage().nbytes() != storage.nbytes():
                        return None  # it lies in a larger storage
            outputs.append(learned)
        return _Result(container, outputs)

    def _made(self, output: _Output, given: list[FakeTensor]) -> FakeTensor:
        if output.is_same:
            return given[cast(int, output.source)]
        meta = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
        if output.source is not None:
            meta.set_(given[output.source].untyped_storage(), output.offset, output.shape, output.stride)
        fake = Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=output.device
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(self._attributes[output.device])
        return fake


class _Output(NamedTuple):
    """A tensor to be made; ``source``: the place of the argument that it is a view of, or ``is_same``: itself."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    source: int | None
    is_same: bool


class _Result(NamedTuple):
    """What a call returns: one output, or several in a ``container``."""

    container: type[tuple[Any, ...]] | type[list[Any]] | None
    outputs: list[_Output | None]


_PLAIN = {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


@functools.cache
def _is_usual(func: Any) -> bool:
    """An operator of torch's whose results follow from what is described of its arguments."""
    if not isinstance(func, torch._ops.OpOverload) or not is_builtin(func):
        return False
    unusual = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
    return not any(tag in func.tags for tag in unusual) and not func.name().startswith(("prim::", "aten::lift"))


def current_fakes() -> Fakes | None:
    """The mode that is on, if one is."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode if isinstance(mode, Fakes) else None
