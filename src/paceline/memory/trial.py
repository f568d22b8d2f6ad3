"""Tries a step, on shapes alone or for real, and leaves all that it reaches as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from paceline.determinism import forked_randomness
from paceline.errors import PacelineError, UsageError
from paceline.memory.fakes import current_fakes
from paceline.memory.live import shapes_only
from paceline.memory.recompute import is_compiled

__all__ = ["Trial", "leaves_of"]

T = TypeVar("T")
Step = Callable[[], Tensor]


class Trial:
    """A step of a model that is run to be looked at.

    It may reach more than ``model``: another module, such as a head or a teacher, or a parameter of its own. Of every
    module that it calls, and of every leaf of its graph, gradients, buffers, what attributes hold (lists and dicts of
    them too) and whether they train are afterwards what they were, and no hook is called that takes up gradients.
    Random states too.

    Args:
        step: the forward of one micro-batch; enters autocast itself and returns the loss, a scalar.
    """

    def __init__(self, model: nn.Module, step: Step) -> None:
        self.model, self._step = model, step
        self._others: dict[nn.Module, None] = {}
        """Modules outside of the model that were called."""
        self._mistake: UsageError | None = None

    def on_shapes_or_for_real(self, count: Callable[[Step], T]) -> tuple[T, str | None]:
        """What ``count`` gives on shapes alone, or on real tensors if it must be, and why then; blocks run eagerly.

        Raises:
            UsageError: a step that returns no loss, or does not call the model; or what cannot be counted either way,
                though the step can be run. If it cannot, its own error.
        """
        try:
            return self.on_shapes(count), None
        except Exception as error:  # a forward may look at numbers, in any way; if it is something else, it comes again
            if error is self._mistake:
                raise
            why = _shown(error)
        try:
            with _as_written(self.model), self.undisturbed() as step:
                return count(step), why
        except PacelineError:
            raise
        except Exception as error:
            found = _shown(error)
        with self.undisturbed() as step:
            loss = step()
            torch.autograd.grad(loss, leaves_of(loss), allow_unused=True)
        raise UsageError(
            "cannot count the memory of the step",
            found=f"{found}; on shapes alone, {why}",
            needed="a forward and backward that can be followed operator by operator",
            fix="Choose by hand what recomputes, as in paceline.memory.recompute(model, 'every:2')",
        )

    def on_shapes(self, count: Callable[[Step], T]) -> T:
        """What ``count`` gives on shapes alone; raises whatever it does where it needs numbers."""
        known = len(self._others)
        with _as_written(self.model), self.undisturbed() as step, shapes_only(self.model, *self._others):
            counted = count(step)
        # A view of a real weight is of shapes alone, and so counts as new: once more, with those of the others as well.
        return counted if len(self._others) == known else self.on_shapes(count)

    @contextmanager
    def undisturbed(self, *, watch: bool = True) -> Iterator[Step]:
        """Gives the step to be run inside.

        Args:
            watch: look which modules are called. Without it only those that are known already are kept: what is
                compiled would be compiled anew.
        """
        with ExitStack() as stack:
            stack.enter_context(forked_randomness(_device_of(self.model)))
            kept: set[int] = set()

            def keep(module: nn.Module) -> None:
                parts = [part for part in module.modules() if id(part) not in kept]
                kept.update(map(id, parts))
                for part in parts:
                    stack.enter_context(_as_it_was(part))

            def keep_leaves(leaves: Iterable[Tensor], *, in_place: bool) -> None:
                for leaf in leaves:
                    if id(leaf) not in kept:
                        kept.add(id(leaf))
                        stack.enter_context(_gradient_as_it_was(leaf, in_place=in_place))

            own, called = {*self.model.modules()}, set[nn.Module]()

            def about_to_call(module: nn.Module, _: object) -> None:
                if module not in called and module not in own:
                    if id(module) not in kept:
                        self._others[module] = None
                    keep(module)
                    keep_leaves(module.parameters(), in_place=True)
                called.add(module)

            def step() -> Tensor:
                loss = self._step()
                leaves = self._leaves(loss)
                keep_leaves((leaf for leaf in leaves if not isinstance(leaf, FakeTensor)), in_place=True)
                weights = {id(parameter) for parameter in self.model.parameters()}
                if watch and called.isdisjoint(own) and weights.isdisjoint(map(id, leaves)):
                    raise self._refusal(f"a step that does not call {type(self.model).__name__}")
                return loss

            for module in (self.model, *self._others):
                keep(module)
                keep_leaves(module.parameters(), in_place=False)
            if watch:
                stack.callback(register_module_forward_pre_hook(about_to_call).remove)
            yield step

    def _leaves(self, loss: object) -> list[Tensor]:
        if not isinstance(loss, Tensor):
            raise self._refusal(f"a step that returns {'None' if loss is None else f'a {type(loss).__name__}'}")
        if loss.dim() != 0:
            raise self._refusal(f"a step that returns a tensor of shape {tuple(loss.shape)}")
        if not loss.requires_grad:
            raise self._refusal("a step that returns a tensor without a gradient")
        return leaves_of(loss)

    def _refusal(self, found: str) -> UsageError:
        self._mistake = UsageError(
            "cannot try the step",
            found=found,
            needed="the loss of one micro-batch by this model: a tensor of one number, with a gradient",
            fix="Give a function without arguments, such as lambda: F.cross_entropy(model(x), y)",
        )
        return self._mistake


def leaves_of(loss: Tensor) -> list[Tensor]:
    """The tensors whose gradients the backward of ``loss`` adds to: the leaves of its graph."""
    leaves: dict[int, Tensor] = {}
    known, open_ = {loss.grad_fn}, [loss.grad_fn]
    while open_:
        node: Any = open_.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        new = {after for after, _ in node.next_functions} - known
        known |= new
        open_ += new
    return list(leaves.values()) or [loss]


@contextmanager
def _as_it_was(part: nn.Module) -> Iterator[None]:
    """Of one module, without those inside."""
    kept = [(own, own.copy()) for own in (part.__dict__, *part.__dict__.values()) if isinstance(own, dict | list | set)]
    try:
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.clone()
        yield
    finally:
        for own, was in kept:
            own.clear()
            own.extend(was) if isinstance(own, list) else own.update(was)


@contextmanager
def _gradient_as_it_was(leaf: Tensor, *, in_place: bool) -> Iterator[None]:
    """Takes the gradient and its hooks away meanwhile.

    Args:
        in_place: give a parameter zeros to add to, as it has in a run, which are not counted.
    """
    gradient, needed = leaf.grad, leaf.requires_grad
    hooks = [(each, each.copy()) for each in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks) if each]
    try:
        leaf.grad = None
        for each, _ in hooks:
            each.clear()
        if in_place and needed and isinstance(leaf, nn.Parameter):
            fakes = current_fakes()
            with (
                _disable_current_modes(),
                fakes or nullcontext(),
                fakes.watched_by(_NOBODY) if fakes else nullcontext(),
            ):
                leaf.grad = torch.zeros_like(leaf)
        yield
    finally:
        leaf.grad = gradient
        leaf.requires_grad_(needed)
        for each, was in hooks:
            each.update(was)


class _Nobody:
    def begins(self, func: object) -> None:
        pass

    def ends(self, func: object, args: object, kwargs: object, result: object) -> None:
        pass


_NOBODY = _Nobody()


@contextmanager
def _as_written(model: nn.Module) -> Iterator[None]:
    """Inside it blocks run eagerly: of shapes alone nothing is compiled. What compiled blocks hold is about as much, or
    less."""
    compiled = [(module, module._compiled_call_impl) for module in model.modules() if is_compiled(module)]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
