"""Follows every byte that tensors hold: for real, or on shapes alone, where none is allocated."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import UsageError
from paceline.memory.fakes import Fakes, Watcher, current_fakes
from paceline.memory.gaps import SMALL

__all__ = ["LiveBytes", "gradients_in_place", "shapes_only", "tensors_in"]


_OF_UNKNOWN_SIZE = {"aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::miopen_rnn"}
"""Fake tensors give these an empty workspace; really it is most of what an LSTM keeps."""


class LiveBytes:
    """Adds up the bytes of all tensors that come to life while it is on, until they die. Fake tensors count as real.

    What counts are storages: views, in-place operators and outputs that are inputs add nothing, and neither do tensors
    from before, or what a kernel allocates inside. A storage that an operator resizes counts with its new size. Not
    collective.

    Raises:
        UsageError: an LSTM or GRU on shapes alone, whose library says how much it keeps only when it runs.

    Attributes:
        current: bytes alive now that came to life while it was on.
        peak: the most that ``current`` has been.
        small, most_small, most_large: the same of those below `paceline.memory.gaps.SMALL`, and the most of others.

    >>> x = torch.ones(256)
    >>> with LiveBytes() as live:
    ...     y = (x + 1).view(16, 16).mul_(2)
    >>> live.current, live.peak
    (1024, 1024)
    >>> del y
    >>> live.current, live.peak
    (0, 1024)
    """

    def __init__(self) -> None:
        self.current = self.peak = 0
        self.small = self.most_small = self.most_large = 0
        self._alive: dict[int, tuple[int, object, weakref.ref[object]]] = {}
        self._on = ExitStack()

    def __enter__(self) -> Self:
        fakes = current_fakes()
        self._on.enter_context(_Watching(self) if fakes is None else fakes.watched_by(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._on.close()

    def begins(self, func: Any) -> None:
        """Before each operator."""

    def ends(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """After each operator."""
        given, outputs = tensors_in((args, kwargs)), tensors_in(result)
        if func._schema.name in _OF_UNKNOWN_SIZE and any(hasattr(output, "fake_device") for output in outputs):
            raise UsageError(
                "cannot count memory on shapes alone",
                found=f"{func}, whose workspace has a size only when it runs",
                needed="operators whose result's size follows from the shapes",
                fix="Measure on real tensors",
            )
        there = {tensor.untyped_storage()._cdata for tensor in given}
        made = [output for output in outputs if self._note(output.untyped_storage(), func, there)]
        if made or func._schema.is_mutable:
            self._touched(func, args, kwargs, result, [*given, *outputs])

    def _touched(self, func: Any, args: Any, kwargs: Any, result: Any, tensors: list[Tensor]) -> None:
        """After each operator that wrote memory; ``tensors``: those that it was given and gave."""

    def _mark(self, func: Any) -> object:
        """What a storage that ``func`` brings to life now is remembered with."""
        return None

    def _gone(self, size: int, mark: object) -> None:
        self.current -= size
        self.small -= size if size < SMALL else 0

    def _note(self, storage: torch.UntypedStorage, func: Any, there: set[int]) -> bool:
        """Counts an output's storage if it is new; whether it is. ``there``: those that ``func`` was given."""
        key, size = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is not None:
            if known[0] != size:  # resized
                self._alive[key] = (size, *known[1:])
                self._grow(size, known[0])
            return False
        if key in there:
            return False
        # A storage's Python object lives as long as the storage, whoever holds that.
        dies: weakref.ref[object] = weakref.ref(storage, lambda _: self._gone(*self._alive.pop(key)[:2]))
        self._alive[key] = (size, self._mark(func), dies)
        self._grow(size)
        return True

    def _grow(self, size: int, before: int = 0) -> None:
        """A storage has ``size`` bytes now in place of those ``before``."""
        self.current += size - before
        self.small += (size if size < SMALL else 0) - (before if before < SMALL else 0)
        self.peak = max(self.peak, self.current)
        self.most_small = max(self.most_small, self.small)
        self.most_large = max(self.most_large, self.current - self.small)


class _Watching(TorchDispatchMode):
    """Tells of operators on real tensors."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watcher = watcher

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would wrap each call once more, and import its compiler for that, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for each operator."""
        kwargs = kwargs or {}
        self._watcher.begins(func)
        result = func(*args, **kwargs)
        self._watcher.ends(func, args, kwargs, result)
        return result


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested arguments or results of an operator that have a storage."""
    if isinstance(tree, Tensor):
        return [tree] if tree.layout is torch.strided else []
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for each in tree for tensor in tensors_in(each)]


@contextmanager
def shapes_only(*models: nn.Module) -> Iterator[None]:
    """Inside it tensors have shapes, dtypes and devices, and no memory: what is made inside, and these models.

    The models' parameters and buffers are replaced by fake ones, tied ones by one, and put back at the end; so nothing
    that happens inside changes them. Python attributes are as they were left. The first time takes a second, for
    imports. Not collective.

    Raises:
        UsageError: something inside needs numbers, not shapes: ``loss.item()``, a mask that selects, an operator that
            does not say what it returns.

    >>> with shapes_only():
    ...     matrix = torch.empty(2**20, 2**20)
    >>> tuple((matrix @ matrix).shape)
    (1048576, 1048576)
    """
    from torch._subclasses import fake_tensor  # it takes a second

    needs_numbers = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
    )
    log = logging.getLogger(fake_tensor.__name__)  # a failed operator is an error already
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with Fakes(), ExitStack() as stack:
            for model in models:
                stack.enter_context(_faked(model))
            yield
    except needs_numbers as error:
        raise UsageError(
            "cannot run on shapes alone",
            found=f"{getattr(error, 'func', error)}, which needs the numbers in a tensor",
            needed="operators whose result's shape follows from the shapes",
            fix="Leave it out of the loss (.item(), .tolist(), a mask that selects), or measure on real tensors",
        ) from error
    finally:
        log.setLevel(level)


@contextmanager
def _faked(model: nn.Module) -> Iterator[None]:
    fakes: dict[int, Tensor] = {}  # a tied tensor has one

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            of = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            fakes[id(tensor)] = of
        return fakes[id(tensor)]

    held = [
        (module, own, dict(own)) for module in model.modules() for own in (module._parameters, module._buffers)
    ]  # first of all modules, since a tensor's id is one only while it lives
    try:
        for module, _, entries in held:
            for name, tensor in entries.items():
                if tensor is not None:
                    setattr(module, name, fake(tensor))  # not into the dict: RNNs keep a list of theirs beside it
        yield
    finally:
        for module, own, entries in held:
            for name in own.keys() - entries.keys():
                del own[name]  # made inside
            for name, tensor in entries.items():
                setattr(module, name, tensor)


@contextmanager
def gradients_in_place(model: nn.Module) -> Iterator[None]:
    """Gives each parameter that has no gradient zeros, so that backward adds to them in place, as in a run; inside
    `shapes_only` they cost nothing. Taken away again at the end."""
    given = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.grad is None]
    try:
        for parameter in given:
            parameter.grad = torch.zeros_like(parameter)
        yield
    finally:
        for parameter in given:
            parameter.grad = None
