"""A block's second forward: it begins as its first one began, or the block is refused.

[Note: what a forward begins with] Random numbers, arguments, weights, buffers and attributes. Torch's own generators
are put back by ``checkpoint``; what it saves of tensor arguments it checks. The rest is here. What a forward may well
change for itself is put back for the second one, and afterwards is what it was: Python's and numpy's generators, which
weights train, attributes that are plain values (counters, ``training``, a cache that was ``None``) or were not there,
and buffers that the first forward changed, by copies. Attributes that the second one sets are dropped too: an auxiliary
loss kept on the module would else keep the second forward's graph alive. What a forward may not change is compared, in
every call: weights, the contents of lists and dicts among the arguments, and buffers that the first forward left alone.
One that it did change, such as BatchNorm's running mean, is taken for one that it only writes, if the calls whose
outputs are compared have seen it. What nothing here sees is in docs/memory.md, Limits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from paceline.determinism import HostRandomness
from paceline.errors import UsageError

__all__ = ["Again", "Buffer", "count_fused_steps"]

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})

Buffer = tuple[nn.Module, str]
"""The module that holds it, and its name there."""
_SMALL = 2**20
"""Bytes of a buffer that is copied though it looks unchanged: a mask, or a table of rotations, may be large."""
Refusal = Callable[..., UsageError]
"""``refusal(found, needed=..., fix=...)``: the error of a block that is found out; both have defaults."""


class Again:
    """Around a second forward. Made just before the first, whose beginning it notes; see the note above.

    Args:
        module: the block.
        arguments: of its call.
        refusal: makes the error.
        inside: makes a context of each second forward.
        once: whether there may be only one.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Sequence[Any],
        refusal: Refusal,
        inside: Callable[[], AbstractContextManager[Any]],
        *,
        once: bool,
    ) -> None:
        self._module, self._refusal, self._inside, self._once = module, refusal, inside, once
        self._randomness = HostRandomness()
        self._arguments = arguments
        self._leaves = _Noted(tree_leaves(arguments))
        self._containers: list[Any] = []
        parts = [*module.modules()]
        self._attributes = [
            (own, {*own}, {name: value for name, value in own.items() if type(value) in _PLAIN})
            for own in (part.__dict__ for part in parts)
        ]
        weights = [weight for part in parts for weight in part._parameters.values()]
        self._weights = _Noted(weights)
        self._trained = [(weight, weight.requires_grad) for weight in weights if weight is not None]
        self._buffers = _Noted(_buffers(module))
        self._written: list[Buffer] = []
        self._began = self._entered = False

    def first_ended(self) -> list[Buffer]:
        """Call it after the first forward, which has changed nothing that the second one needs.

        Returns:
            The buffers that it changed.

        Raises:
            UsageError: it has.
        """
        if not self._leaves.same_objects(tree_leaves(self._arguments)):
            raise self._refusal("a list or dict among its inputs whose contents its forward changes")
        if not self._leaves.same_contents():
            raise self._refusal("an input that its forward changes in place")
        self._check_weights("that its forward changes")
        # Of tensors that are passed themselves checkpoint takes care; and here they would be kept from being freed.
        self._containers = [
            each for each in self._arguments if not isinstance(each, Tensor) and type(each) not in _PLAIN
        ]
        self._leaves = _Noted(tree_leaves(self._containers))
        self._arguments = ()
        self._buffers, changed = self._buffers.unchanged(_buffers(self._module))
        places = [(part, name) for part in self._module.modules() for name in part._buffers]
        # Kernels such as batch norm's write without a trace, to what is small.
        self._written = [place for at, place in enumerate(places) if at in changed or _size(*place) <= _SMALL]
        self._began = True
        return [places[at] for at in changed]

    def __enter__(self) -> None:
        if self._began:  # not so if the block's own forward runs a backward
            self._check_weights("that was changed between its forward and its backward")
            self._check_buffers("a buffer that was changed between its forward and its backward", **_BETWEEN)
            if not self._leaves.same_objects(tree_leaves(self._containers)) or not self._leaves.same_contents():
                found = "a list or dict among its inputs that was changed between its forward and its backward"
                raise self._refusal(found, **_BETWEEN)
        if self._entered and self._once:
            found = "a second backward through what selective recompute keeps for one (retain_graph or create_graph)"
            raise self._refusal(found, needed="one backward", fix="Let that block recompute all, at level full")
        self._entered = True
        with ExitStack() as stack:
            stack.enter_context(self._randomness)
            stack.enter_context(_copied(self._written))
            stack.enter_context(self._attributes_as_at_first())
            stack.enter_context(self._weights_trained_as_at_first())
            stack.enter_context(self._inside())
            self._open = stack.pop_all()

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: Any) -> None:
        self._open.__exit__(kind, error, traceback)
        if self._began:
            self._check_buffers("a buffer that its second forward changes, and its first did not")
        if kind is CheckpointError:
            raise self._refusal("a second forward that saves more than the first") from error
        if kind is RuntimeError:
            for said, found, beats in _SELECTIVE:
                if said in str(error):
                    raise self._refusal(found, **beats) from error

    def _check_weights(self, what: str) -> None:
        now = [weight for part in self._module.modules() for weight in part._parameters.values()]
        if not self._weights.same_objects(now):
            found = "other weights in its backward than in its forward, as by torch.func.functional_call"
            raise self._refusal(found, needed="the same weights in both", fix="Run the backward inside of it too")
        if not self._weights.same_contents():
            name = next(name for name, each in self._module.named_parameters() if self._weights.has_changed(each))
            raise self._refusal(f"a weight {what}, {name}", **(_BETWEEN if self._began else {}))

    def _check_buffers(self, found: str, **beats: str) -> None:
        if not self._buffers.same_objects(_buffers(self._module)) or not self._buffers.same_contents():
            raise self._refusal(found, **beats)

    @contextmanager
    def _attributes_as_at_first(self) -> Iterator[None]:
        now = [(own, own.copy()) for own, _, _ in self._attributes]
        try:
            for own, names, first in self._attributes:
                for new in own.keys() - names:
                    del own[new]
                own.update(first)
            yield
        finally:
            for own, was in now:
                if own.keys() != was.keys() or any(own[name] is not value for name, value in was.items()):
                    own.clear()
                    own.update(was)

    @contextmanager
    def _weights_trained_as_at_first(self) -> Iterator[None]:
        switched = [(weight, trained) for weight, trained in self._trained if weight.requires_grad != trained]
        try:
            for weight, trained in switched:
                weight.requires_grad_(trained)
            yield
        finally:
            for weight, trained in switched:
                weight.requires_grad_(not trained)


_BETWEEN: dict[str, str] = {
    "needed": "weights, buffers and inputs in a backward that are those of its forward",
    "fix": "Run backward first, and then the optimizer's step or whatever else changes them",
}
_SELECTIVE: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "selective activation checkpoint has been mutated",
        "a change in place of what selective recompute keeps",
        {"fix": "Leave out inplace=True inside of it, and write y = y + x behind it; or let that block recompute all"},
    ),
    (
        "encountered during backward but not found in storage",
        "other operators in its second forward",
        {"fix": "Under torch.autocast set cache_enabled=False; or let that block recompute all, at level full"},
    ),
)
"""What torch says, and what that means: (its words, found, other beats)."""


class _Noted:
    """Values as they are now: which ones, and of tensors how often they were changed in place."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values
        self._versions = [_version(value) for value in values]

    def same_objects(self, values: list[Any]) -> bool:
        """Whether ``values`` are these, one by one; ``None`` here stands for any."""
        return len(values) == len(self._values) and all(
            one is other or one is _ANY or (type(one) is type(other) and type(one) in _PLAIN and one == other)
            for one, other in zip(self._values, values, strict=True)
        )

    def same_contents(self) -> bool:
        """Whether no tensor was changed in place since."""
        return [_version(value) for value in self._values] == self._versions

    def has_changed(self, value: object) -> bool:
        at = next(at for at, one in enumerate(self._values) if one is value)
        return _version(value) != self._versions[at]

    def unchanged(self, values: list[Any]) -> tuple[_Noted, list[int]]:
        """Those of these that are the same in ``values`` and were not changed in place, any will do for the others; and
        the places of the others."""
        changed = [
            at
            for at, now in enumerate(values)
            if at >= len(self._values) or self._values[at] is not now or _version(now) != self._versions[at]
        ]
        return _Noted([_ANY if at in changed else value for at, value in enumerate(values)]), changed


_ANY = object()


def _version(value: object) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _size(part: nn.Module, name: str) -> int:
    buffer = part._buffers[name]
    return 0 if buffer is None else buffer.nbytes


def _buffers(module: nn.Module) -> list[Tensor | None]:
    return [buffer for part in module.modules() for buffer in part._buffers.values()]


@contextmanager
def _copied(buffers: Sequence[Buffer]) -> Iterator[None]:
    """Inside it modules work on copies of these buffers, which are dropped. Autograd may hold the buffers themselves,
    so that these are not touched."""
    kept = [(part, name, part._buffers[name]) for part, name in buffers if name in part._buffers]
    try:
        for part, name, buffer in kept:
            part._buffers[name] = None if buffer is None else buffer.clone()
        yield
    finally:
        for part, name, buffer in kept:
            part._buffers[name] = buffer


@functools.cache
def count_fused_steps() -> None:
    """From now on, in this process, a fused optimizer's step counts as a change of its weights in place, as any other
    optimizer's does: torch leaves that out."""

    def count(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        fused = [weight for group in optimizer.param_groups if group.get("fused") for weight in group["params"]]
        torch.autograd.graph.increment_version(fused)

    register_optimizer_step_post_hook(count)
