"""Tries a step, on shapes alone or for real, and leaves all that it reaches as it was."""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from paceline.determinism import forked_randomness
from paceline.errors import PacelineError, UsageError
from paceline.memory.fakes import current_fakes
from paceline.memory.live import shapes_only
from paceline.memory.recompute import is_compiled

__all__ = ["Trial", "leaves_of", "missing_arguments"]

T = TypeVar("T")
Step = Callable[[], Tensor]


class Trial:
    """A step of a model that is run to be looked at.

    It may reach more than ``model``: another module, such as a head or a teacher, or a parameter of its own. Of every
    module that it calls, and of every leaf of its graph, gradients, buffers, what attributes hold (tensors, and what
    lies in lists, dicts and the like, however deep) and whether they train are afterwards what they were, and no hook
    is called that takes up gradients. Random states too. A step that runs backward, or an optimizer's step, is refused
    before it does.

    Args:
        step: the forward of one micro-batch; enters autocast itself and returns the loss, a scalar.
    """

    def __init__(self, model: nn.Module, step: Step) -> None:
        self.model, self._step = model, step
        self._others: dict[nn.Module, None] = {}
        """Modules outside of the model that were called."""
        self._looked = False
        """A step has come to its end, and ran nothing but a forward."""
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
            if not self._looked:
                with _as_written(self.model), self.undisturbed() as step:
                    step()
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
        if not self._looked:  # first for itself: torch takes other ways in some forwards while they are looked at
            self._on_shapes(lambda step: step())
        known = len(self._others)
        counted = self._on_shapes(count)
        # A view of a real weight is of shapes alone, and so counts as new: once more, with those of the others as well.
        return counted if len(self._others) == known else self.on_shapes(count)

    def _on_shapes(self, count: Callable[[Step], T]) -> T:
        with _as_written(self.model), self.undisturbed() as step, shapes_only(self.model, *self._others):
            return count(step)

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
                only = nullcontext() if self._looked else _forward_only(self._refusal, keep_leaves)
                try:
                    with only:
                        loss = self._step()
                except StopIteration:
                    raise self._refusal(
                        "a step that takes from an iterator, which has ended",
                        needed="a step that can run many times, on the same batch",
                        fix="Take the batch before: batch = next(it); then give lambda: loss_of(model, batch)",
                    ) from None
                self._looked = True
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
        if loss.is_complex():
            raise self._refusal(f"a step that returns a complex number, {loss.dtype}")
        return leaves_of(loss)

    def _refusal(
        self,
        found: str,
        *,
        needed: str = "the loss of one micro-batch by this model: a tensor of one number, with a gradient",
        fix: str = "Give a function without arguments, such as lambda: F.cross_entropy(model(x), y)",
    ) -> UsageError:
        self._mistake = UsageError("cannot try the step", found=found, needed=needed, fix=fix)
        return self._mistake


def missing_arguments(function: object) -> str:
    """What it must be given when it is called, by name; nothing if it cannot be told.

    >>> missing_arguments(lambda x, y, z=0: x), missing_arguments(lambda *rest: rest)
    ('x, y', '')
    """
    try:
        parameters = inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(name for name, one in parameters.items() if one.default is one.empty and one.kind not in rest)


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
def _forward_only(refusal: Callable[..., UsageError], keep_leaves: Callable[..., None]) -> Iterator[None]:
    """Inside it this thread can run neither a backward that adds to gradients nor an optimizer's step."""

    def refused(found: str) -> UsageError:
        return refusal(
            found,
            needed="the forward alone, which returns the loss",
            fix="Give lambda: F.cross_entropy(model(x), y), and leave backward and the optimizer to the loop",
        )

    class ForwardOnly(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (Tensor.backward, torch.autograd.backward):
                raise refused("a step that runs backward itself")
            if func == _SET_GRADIENT and not isinstance(
                args[0], FakeTensor
            ):  # as zero_grad does, of parameters that may belong to a module not yet called
                keep_leaves(args[:1], in_place=False)
            return func(*args, **(kwargs or {}))

    mine = threading.get_ident()

    def about_to_step(optimizer: object, *_: object) -> None:
        if threading.get_ident() == mine:
            raise refused(f"a step that takes an optimizer's step, of {type(optimizer).__name__}")

    handle = register_optimizer_step_pre_hook(about_to_step)
    try:
        with ForwardOnly():
            yield
    finally:
        handle.remove()


_SET_GRADIENT = Tensor.grad.__set__  # type: ignore[union-attr]


@contextmanager
def _as_it_was(part: nn.Module) -> Iterator[None]:
    """Of one module, without those inside."""
    containers, tensors = _reached(part)
    was = [(own, dict(own) if isinstance(own, dict) else list(own)) for own in containers]
    with _disable_current_modes():
        values = [(own, own._version, own.detach().clone()) for own in tensors]
    try:
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.clone()
        yield
    finally:
        for own, entries in was:
            own.clear()
            own.extend(entries) if isinstance(own, list | deque) else own.update(entries)
        with _disable_current_modes(), torch.no_grad():
            for own, version, value in values:
                if own._version != version:
                    own.copy_(value)


def _reached(part: nn.Module) -> tuple[list[Any], list[Tensor]]:
    """What can change without its attribute: containers, at any depth, and tensors but parameters and buffers."""
    containers: list[Any] = []
    tensors: list[Tensor] = []
    known = {id(buffer) for buffer in part._buffers.values()}
    open_: list[Any] = [part.__dict__]
    while open_:
        value = open_.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, dict | list | set | deque):
            containers.append(value)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_inference():
            tensors.append(value)
        elif isinstance(value, dict):
            open_ += value.values()
        elif isinstance(value, list | set | deque | tuple):
            open_ += value
    return containers, tensors


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
