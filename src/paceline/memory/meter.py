"""Measures what autograd keeps for backward: in all, and by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.errors import UsageError
from paceline.memory.recompute import Recomputed
from paceline.memory.trial import missing_arguments

__all__ = ["SavedBytes", "saved_bytes"]


@dataclass(frozen=True, kw_only=True)
class SavedBytes:
    """What autograd kept for backward while a function, or a module in it, ran.

    Args:
        packed: bytes of every tensor that it packed. A tensor counts each time an operator saves it, weights too, so
            this is more than memory holds: compare it with itself, before and after a change.
        held: bytes of memory that it kept: each storage once, without parameters, and without the model's buffers if
            the model was given. So it is what recompute can free, and the inputs with it. A view keeps, and counts, the
            whole storage that it looks into. Copies of weights in another dtype, as autocast makes, are no parameters.
        modules: the same for each module of the model by its path (``blocks.3``; the model is ``""``): what was packed
            while it, or a module registered inside it, ran. A storage belongs to the first that packs it, so what
            siblings hold adds up. Empty without a model, and in the parts themselves.
    """

    packed: int
    held: int
    modules: Mapping[str, SavedBytes] = field(default_factory=dict, repr=False)


def saved_bytes(fn: Callable[[], object], model: nn.Module | None = None) -> SavedBytes:
    """Runs ``fn`` once and measures what autograd saves for backward meanwhile. Not collective.

    Give it the forward pass (``lambda: model(x)``); what it returns is dropped, and with it what was saved. Inside
    ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`` only the inputs of the checkpointed part are saved,
    and so counted: for the module that called it, or, by `paceline.memory.recompute`, for the block. What is kept past
    autograd is not seen: keyword arguments of a checkpointed part, attributes of a ``ctx``, and what a selective
    checkpoint keeps. This is `torch.autograd.graph.saved_tensors_hooks`. Calls may lie inside one another; an outer one
    counts what inner ones do.

    Args:
        fn: forward, or a whole step.
        model: tells the parts of this model apart; ``fn`` calls it, or modules in it. A module that is registered twice
            goes by its first path. What lies inside a compiled module is not told apart, and left out.

    Raises:
        UsageError: ``fn`` is no function without arguments, or ``model`` no module.

    >>> model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    >>> x_BF = torch.zeros(64, 256)
    >>> saved = saved_bytes(lambda: model(x_BF), model)
    >>> saved.held == 2 * x_BF.nbytes, saved.packed == 2 * x_BF.nbytes + model[1].weight.nbytes
    (True, True)
    >>> saved.modules["0"].held, saved.modules["1"].held
    (65536, 65536)
    """
    _check(fn, model)
    meter = _Meter(model, outer=_innermost.get())
    before = _innermost.set(meter)
    try:
        with meter.watching(), torch.autograd.graph.saved_tensors_hooks(meter.pack, lambda tensor: tensor):
            fn()
    finally:
        _innermost.reset(before)
    return meter.result()


def _check(fn: object, model: object) -> None:
    missing = missing_arguments(fn)
    if not callable(fn) or missing or not isinstance(model, nn.Module | None):
        wrong = f"a function that needs {missing}" if missing else f"a {type(fn).__name__} in place of a function"
        raise UsageError(
            "cannot measure what autograd keeps",
            found=f"a model of type {type(model).__name__}" if callable(fn) and not missing else wrong,
            needed="a function without arguments, and the torch.nn.Module whose parts shall be told apart, or none",
            fix="Write saved_bytes(lambda: model(x), model)",
        )


class _Meter:
    def __init__(self, model: nn.Module | None, *, outer: _Meter | None) -> None:
        self._outer = outer  # autograd tells the innermost hooks alone
        # By weak reference, so that an address which is freed and used again is another storage. The Python object of
        # a storage lives as long as the storage itself.
        self._known: WeakSet[torch.UntypedStorage] = WeakSet()
        if model is not None:
            self._known.update(
                part.untyped_storage() for each in (*model.parameters(), *model.buffers()) for part in _parts(each)
            )
        self._modules = {} if model is None else _apart(model)
        self._running: list[frozenset[str]] = [frozenset()]
        """Paths of the modules that run, with those that they lie in, for each call that goes on."""
        self._total = Counter(packed=0, held=0)
        self._by_path = {path: Counter(packed=0, held=0) for path in self._modules}

    def pack(self, tensor: Tensor) -> Tensor:
        """What autograd calls for each tensor that it saves."""
        if self._outer is not None:
            self._outer.pack(tensor)
        is_parameter = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
        for part in _parts(tensor):
            storage = part.untyped_storage()
            is_new = not is_parameter and storage not in self._known
            self._known.add(storage)
            counts = {"packed": part.numel() * part.element_size(), "held": storage.nbytes() if is_new else 0}
            self._total.update(counts)
            for path in self._running[-1]:
                self._by_path[path].update(counts)
        return tensor.detach()  # an operator's own output, kept as it is, would keep the operator: both would leak

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes which modules run: around all of a module's call, so that what a checkpointed one keeps is its own.

        See [Note: where the call is wrapped] in recompute.py.
        """
        with ExitStack() as stack:
            for path, module in self._modules.items():
                call = module._compiled_call_impl
                module._compiled_call_impl = _Noted(call, module, path, self._running)
                stack.callback(setattr, module, "_compiled_call_impl", call)
            yield

    def result(self) -> SavedBytes:
        modules = {path: SavedBytes(packed=at["packed"], held=at["held"]) for path, at in self._by_path.items()}
        return SavedBytes(packed=self._total["packed"], held=self._total["held"], modules=modules)


_innermost: ContextVar[_Meter | None] = ContextVar("_innermost", default=None)
"""The meter that is on."""


class _Noted:
    """The call of a module that is watched."""

    def __init__(
        self, inner: Callable[..., Any] | None, module: nn.Module, path: str, running: list[frozenset[str]]
    ) -> None:
        self.inner, self._module, self._running = inner, module, running
        names = path.split(".") if path else []
        self._paths = frozenset(".".join(names[:depth]) for depth in range(len(names) + 1))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = self._module._call_impl if self.inner is None else self.inner
        self._running.append(self._running[-1] | self._paths)
        try:
            return call(*args, **kwargs)
        finally:
            self._running.pop()


def _apart(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of ``model`` without those inside a compiled one, which would be compiled again to be watched."""
    found: dict[str, nn.Module] = {}
    compiled: list[str] = []
    for path, module in model.named_modules():
        if not any(path.startswith(outer) for outer in compiled):
            found[path] = module
            call: object = module._compiled_call_impl
            while isinstance(call, _Noted | Recomputed):
                call = call.inner
            if call is not None or hasattr(module, "_orig_mod"):  # by Module.compile, or by torch.compile
                compiled.append(f"{path}." if path else "")
    return found


_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
"""By layout, the methods that give what a sparse tensor is made of."""


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with a storage of their own that make it up: itself, mostly."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor
    else:
        for name in _SPARSE.get(tensor.layout, ()):
            yield getattr(tensor, name)()
