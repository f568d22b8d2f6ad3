"""Runs a step and follows every byte: on shapes alone, without allocating, or for real.

[Note: phases of a step] A step is cut where a block's forward begins, and the same cuts hold for its backward: autograd
numbers its nodes as forward makes them, so the node at work says which phase the backward is in, whatever the model
returns and however often blocks recompute. What lies between two blocks belongs to the first of them; before the first
block is the prologue, whose backward belongs to the first block; after the last one comes the loss, with its backward.
"""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.errors import UsageError

__all__ = ["Call", "LiveBytes", "Trace", "Work", "gradients_in_place", "shapes_only", "simulate"]


class LiveBytes(TorchDispatchMode):
    """Adds up the bytes of all tensors that come to life while it is on, until they die. Fake tensors count as real.

    What counts are storages: views, in-place operators and outputs that are inputs add nothing, and neither do tensors
    from before, or what a kernel allocates inside. A storage that an operator resizes counts with its new size. Not
    collective.

    Attributes:
        current: bytes alive now that came to life while it was on.
        peak: the most that ``current`` has been.

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
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = self.peak = 0
        self._alive: dict[int, tuple[int, object, weakref.ref[object]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for each operator."""
        self._before()
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        changed = [self._note(tensor, args, kwargs) for tensor in outputs]
        self._after(func, args, kwargs, result, outputs, touched=any(changed) or func._schema.is_mutable)
        return result

    def _before(self) -> None:
        """Before each operator; for those that want to know."""

    def _after(
        self, func: Any, args: Any, kwargs: Any, result: Any, outputs: Iterable[Tensor], *, touched: bool
    ) -> None:
        """After each operator; ``touched``: it wrote memory."""

    def _phase(self) -> object:
        """What a storage that is born now is marked with."""
        return None

    def _gone(self, size: int, phase: object) -> None:
        self.current -= size

    def _note(self, tensor: Tensor, args: Any, kwargs: Any) -> bool:
        """Counts an output's storage if it is new; whether it is."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is not None:
            if known[0] != size:  # resized
                self._alive[key] = (size, *known[1:])
                self._grow(size - known[0])
            return False
        if any(key == given.untyped_storage()._cdata for given in _tensors((args, kwargs))):
            return False
        # A storage's Python object lives as long as the storage, whoever holds that.
        self._alive[key] = (size, self._phase(), weakref.ref(storage, lambda _: self._gone(*self._alive.pop(key)[:2])))
        self._grow(size)
        return True

    def _grow(self, size: int) -> None:
        self.current += size
        self.peak = max(self.peak, self.current)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree] if tree.layout is torch.strided else []
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


@contextmanager
def shapes_only(*models: nn.Module) -> Iterator[None]:
    """Inside it tensors have shapes, dtypes and devices, and no memory: what is made inside, and these models.

    The models' parameters and buffers are replaced by fake ones, tied ones by one, and put back at the end; so nothing
    that happens inside changes them. A GPU's tensors can be made on a machine without one. The first time takes a
    second, for imports. Not collective.

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
    # Tensors that a model holds outside of its buffers are taken for fake ones of the same shape.
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode, ExitStack() as stack:
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


@dataclass(frozen=True, kw_only=True)
class Work:
    """What operators had to do, for an estimate of their time.

    Args:
        flops: floating point operations of matrix products, convolutions and attention.
        moved: bytes read and written by all other operators, which memory's speed decides about.
    """

    flops: int = 0
    moved: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(flops=self.flops + other.flops, moved=self.moved + other.moved)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a block in a step. Bytes; see [Note: phases of a step] at the top of the file.

    Args:
        name: the block's. One that is called twice has two calls, each with its own backward.
        before: alive when its forward began, on top of what was there before the step.
        after: alive when its forward had ended.
        base: of ``before``, what stays until backward: without what is let go before, as autocast's copies of weights.
        held: what it adds to the next call's ``base``: kept from its forward until its backward.
        peak: most bytes alive during its forward and its backward, on top of ``base``.
        forward: the work of its forward.
        backward: the work of its backward, with what is recomputed.
    """

    name: str
    before: int
    after: int
    base: int
    held: int
    peak: int
    forward: Work
    backward: Work


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a forward and backward held and did. Bytes on top of what was there before.

    Args:
        calls: of the blocks, in the order of their forwards.
        fixed: kept from before the first block until its backward.
        loss: most bytes alive from the end of the last block's forward until its backward, on top of ``fixed`` and all
            blocks' ``held``. All there is, if no block ran.
        peak: the most alive at any time.
        left: still alive at the end: the loss, and gradients that were not there before.
        work: of all.
    """

    calls: tuple[Call, ...]
    fixed: int
    loss: int
    peak: int
    left: int
    work: Work


def simulate(step: Callable[[], Tensor], blocks: Mapping[str, nn.Module]) -> Trace:
    """Runs a step's forward and backward once and records what it held, in all and for each block. Not collective.

    Inside `shapes_only` nothing is computed; outside it is real. Give gradients first (`gradients_in_place`), or they
    count as what the step makes.

    Args:
        step: forward; enters autocast itself and returns the loss, a scalar.
        blocks: modules by name; none inside another.

    Raises:
        UsageError: a block inside a block.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(3)))
    >>> with shapes_only(model), gradients_in_place(model):
    ...     x_BF = torch.zeros(8, 64)
    ...     trace = simulate(lambda: model(x_BF).sum(), dict(model.named_children()))
    >>> [call.held for call in trace.calls]  # what Tanh returned
    [2048, 2048, 2048]
    """
    recorder = _Recorder()
    with recorder.watching(blocks), recorder:
        loss = step()
        recorder.end = _autograd_nodes()
        loss.backward()
    return recorder.trace()


_Phase = tuple[Literal["forward", "between", "backward"], int]


class _Recorder(LiveBytes):
    """`LiveBytes` by phase of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.end: int | None = None
        """Autograd nodes when the forward had ended."""
        self.phase: _Phase = ("between", -1)
        self.peaks: defaultdict[_Phase, int] = defaultdict(int)
        self.freed: defaultdict[tuple[object, _Phase], int] = defaultdict(int)
        """Bytes by the phases in which they came and went."""
        self.work: defaultdict[_Phase, Work] = defaultdict(Work)
        self.names: list[str] = []
        self.starts: list[int] = []
        """Autograd nodes when each call began."""
        self.stop = 0
        """And when the last one ended."""
        self.before: list[int] = []
        self.after: list[int] = []

    @contextmanager
    def watching(self, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Notes when each of ``blocks`` begins and ends its forward; a forward in backward is a recomputed one."""

        def begin(name: str) -> None:
            if _in_backward():
                return
            if self.phase[0] == "forward":
                raise UsageError(
                    "cannot tell the blocks' memory apart",
                    found=f"{name} called inside {self.names[-1]}",
                    needed="blocks that do not lie inside one another",
                    fix="Name the outer or the inner ones",
                )
            self.names.append(name)
            self.starts.append(_autograd_nodes())
            self.before.append(self.current)
            self._enter(("forward", len(self.names) - 1))

        def finish() -> None:
            if not _in_backward():
                self.stop = _autograd_nodes()
                self.after.append(self.current)
                self._enter(("between", len(self.names) - 1))

        with ExitStack() as stack:
            for name, block in blocks.items():
                first = block.register_forward_pre_hook(lambda *_, name=name: begin(name), prepend=True)
                last = block.register_forward_hook(lambda *_: finish())
                stack.callback(first.remove)
                stack.callback(last.remove)
            yield

    def _enter(self, phase: _Phase) -> None:
        self.phase = phase
        self.peaks[phase] = max(self.peaks[phase], self.current)

    def _before(self) -> None:
        if self.end is None or not _in_backward():
            return
        node = torch._C._current_autograd_node()
        made = self.end if node is None else node._sequence_nr()
        if made >= self.end:
            return  # the node that adds up a parameter's gradient, or one made in backward: part of what goes on
        last = len(self.names) - 1
        phase: _Phase = ("between", last)
        if last >= 0 and made < self.stop:
            phase = ("backward", max(0, bisect_right(self.starts, made) - 1))
        if phase != self.phase:
            self._enter(phase)

    def _after(
        self, func: Any, args: Any, kwargs: Any, result: Any, outputs: Iterable[Tensor], *, touched: bool
    ) -> None:
        formula = _flop_formulas().get(func._overloadpacket)
        if formula is not None:
            self.work[self.phase] += Work(flops=formula(*args, **kwargs, out_val=result))
        elif touched:
            tensors = [*_tensors((args, kwargs)), *outputs]
            self.work[self.phase] += Work(moved=sum(each.numel() * each.element_size() for each in tensors))

    def _phase(self) -> object:
        return self.phase

    def _gone(self, size: int, phase: object) -> None:
        super()._gone(size, phase)
        self.freed[phase, self.phase] += size

    def _grow(self, size: int) -> None:
        super()._grow(size)
        self.peaks[self.phase] = max(self.peaks[self.phase], self.current)

    def trace(self) -> Trace:
        """What was recorded, in the end."""
        loss: _Phase = ("between", len(self.names) - 1)
        calls = []
        base = fixed = self.before[0] - self.freed[("between", -1), loss] if self.names else 0
        for call, name in enumerate(self.names):
            phases: tuple[_Phase, ...] = (("forward", call), ("between", call), ("backward", call))
            own = phases if call < len(self.names) - 1 else (phases[0], phases[2])
            let_go = sum(self.freed[phase, loss] for phase in own[: len(own) - 1])
            following = self.before[call + 1] if call < len(self.names) - 1 else self.after[call]
            held = following - self.before[call] - let_go
            if call == 0:
                own = (("between", -1), *own)
            calls.append(
                Call(
                    name=name,
                    before=self.before[call],
                    after=self.after[call],
                    base=base,
                    held=held,
                    peak=max(self.peaks[phase] for phase in own) - base,
                    forward=self.work["forward", call],
                    backward=self.work["backward", call],
                )
            )
            base += held
        return Trace(
            calls=tuple(calls),
            fixed=fixed,
            loss=self.peaks[loss] - base,
            peak=self.peak,
            left=self.current,
            work=sum(self.work.values(), Work()),
        )


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _autograd_nodes() -> int:
    """How many nodes autograd has made in this thread: the number of the next."""
    return int(torch._C._autograd._get_sequence_nr())


@functools.cache
def _flop_formulas() -> dict[Any, Callable[..., int]]:
    """Torch's, with attention on CPU, which it leaves out: the same as on a GPU."""
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    return {
        **flop_registry,
        aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
        aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
            aten._scaled_dot_product_flash_attention_backward
        ],
    }
