"""Hooks on DDP, autograd, optimizers, clipping, scalers and schedulers."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Generator, Iterable
from types import FrameType
from typing import Any

import torch

from paceline.doctor.watching.probe import digests
from paceline.doctor.watching.probe.hooking import Call, Hooked
from paceline.doctor.watching.probe.recorder import Recorder
from paceline.doctor.watching.records import WEIGHTED

__all__ = ["TABLE", "Replicas", "replicas", "watch_modules"]

_GRAPHS = 6
"""So many forwards of a DDP have their graphs walked."""
_NODES = 50_000
_SMALL = 4096
"""Buffers of so many values are compared before and after DDP's broadcast."""
_NAMES = 300
_SAMPLED = 8
_AROUND = 200


class Replicas:
    """The DDP models of this process by number, and what belongs to them."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._wrapped: dict[int, weakref.ref[Any]] = {}
        self._inner: dict[int, int] = {}
        self.calling: list[int] = []
        self.graphs: dict[int, int] = {}
        self.registered: dict[int, dict[str, int]] = {}
        self.whole: set[int] = set()
        self.marks: dict[int, tuple[int, int]] = {}
        self.before: dict[str, Any] = {}
        self.pending: dict[int, str] = {}

    def add(self, ddp: Any) -> int:
        number = self._numbers[ddp] = len(self._wrapped)
        self._wrapped[number] = weakref.ref(ddp.module)
        self._inner |= {id(module): number for module in ddp.module.modules()}
        self.registered[number] = {name: id(p) for name, p in ddp.module.named_parameters() if p.requires_grad}
        if ddp.process_group.size() == sys.modules["torch.distributed"].get_world_size():
            self.whole.add(number)
        return number

    def number(self, ddp: Any) -> int | None:
        return self._numbers.get(ddp)

    def holding(self, module: Any) -> int | None:
        """The DDP of which ``module`` is a part."""
        return self._inner.get(id(module))

    def models(self) -> dict[int, Any]:
        """What each wraps. A script may keep that alone, and drop the wrapper."""
        kept = {number: model for number, wrapped in self._wrapped.items() if (model := wrapped()) is not None}
        alive = {number: ddp.module for ddp, number in self._numbers.items()}
        return {number: model for number, model in kept.items() if self.holding(model) == number} | alive

    def alike(self) -> set[int]:
        """Ids of the parameters that are to be equal on all ranks. Local SGD lets them come apart for a while."""
        local = {number for ddp, number in self._numbers.items() if any("LocalSGD" in str(h) for h in ddp._comm_hooks)}
        return {id(p) for number, m in self.models().items() if number in self.whole - local for p in m.parameters()}

    def names(self) -> dict[int, str]:
        """By id of a parameter its name in a DDP's module."""
        return {id(p): name for model in self.models().values() for name, p in model.named_parameters()}


replicas = Replicas()


def _wrapped(call: Call) -> Generator[None, Any, None]:
    module, dist = call["module"], sys.modules["torch.distributed"]
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    norms = [m for m in module.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    synced = [m for m in norms if isinstance(m, torch.nn.SyncBatchNorm)]
    number = call.recorder.tell(
        "wrap",
        names=[name for name, _ in named][:_NAMES],
        shapes=[list(p.shape) for _, p in named][:_NAMES],
        buffers=len(list(module.buffers())),
        norms=len(norms) - len(synced),
        ranks=dist.get_world_size(call["process_group"]) if dist.is_initialized() else None,
        find_unused=bool(call["find_unused_parameters"]),
        forwards=_forwards(call.recorder, module),
        static=bool(call["static_graph"]),
    )
    yield
    if call.error is None:
        call.recorder.syncs += 1
        call.recorder.done(number, ddp=replicas.add(call.owner), broadcasts=bool(call.owner.forward_sync_buffers))
    else:
        call.recorder.done(number, failed=True)


def _forward(call: Call) -> Generator[None, Any, None]:
    ddp = call.owner
    own = replicas.number(ddp)
    if own is None:
        return
    grad = torch.is_grad_enabled()
    first = next(iter(digests.tensors_in([*call.args[1:], *call.kwargs.values()])), None)
    communicates = bool(ddp.will_sync_module_buffers())
    number = call.recorder.tell(
        "forward",
        ddp=own,
        grad=grad,
        training=ddp.training,
        sync=bool(ddp.require_backward_grad_sync),
        communicates=communicates,
        batch=int(first.shape[0]) if first is not None and first.dim() else None,
        input=_content(first),
    )
    noted = replicas.graphs[own] = replicas.graphs.get(own, 0) + 1
    looks = noted <= _GRAPHS and not torch.compiler.is_compiling()
    drawn = digests.generators() if looks and ddp.training else {}
    replicas.before = {}
    if communicates and looks:
        replicas.before = {name: buffer.clone() for name, buffer in _own_buffers(ddp.module)}
    replicas.calling.append(own)
    result = yield
    replicas.calling.pop()
    if call.error is not None:
        call.recorder.done(number, failed=True)
        return
    call.recorder.syncs += communicates
    call.recorder.done(number)
    if grad:
        replicas.pending[own] = "synced" if ddp.require_backward_grad_sync else "held"
    for name, state in drawn.items():
        if digests.generators()[name] != state:
            call.recorder.tell("draw", where="forward", generator=name, state=state)
    if grad and (looks or ddp.find_unused_parameters or ddp.static_graph):
        _tell_graph(call.recorder, ddp, own, result)


def _forwards(recorder: Recorder, module: Any) -> list[tuple[str, int]]:
    """Where the parts of a model say how they go forward, as far as the user has written them."""
    forwards = [type(part).forward for part in module.modules()]
    codes = {forward.__code__ for forward in forwards if hasattr(forward, "__code__")}
    written = [(recorder.users_path(code.co_filename), code.co_firstlineno) for code in codes]
    return sorted((path, line) for path, line in written if path is not None)[:_NAMES]


def _content(tensor: Any) -> str | None:
    """A digest by which to tell batches apart."""
    whole = tensor is not None and tensor.device.type == "cpu" and tensor.layout is torch.strided
    return digests.of(tensor)[:12] if whole else None


def _own_buffers(module: Any) -> Iterable[tuple[str, Any]]:
    """Those that are not a batch norm's statistics, which everybody knows to be local, and that change in training."""
    norms = {
        f"{name}.{own}" if name else own
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.modules.batchnorm._NormBase)
        for own, _ in part.named_buffers(recurse=False)
    }
    return [(name, b) for name, b in module.named_buffers() if name not in norms and 0 < b.numel() <= _SMALL]


def _tell_graph(recorder: Recorder, ddp: Any, own: int, output: Any) -> None:
    """Which parameters the output depends on, as DDP looks for them itself."""
    found = torch.nn.parallel.distributed._find_tensors(output)
    pending = [tensor.grad_fn for tensor in found if tensor.grad_fn is not None]
    seen, used = {id(node) for node in pending}, set()
    while pending and len(seen) < _NODES:
        node = pending.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            used.add(id(leaf))
        for following, _ in node.next_functions:
            if following is not None and id(following) not in seen:
                seen.add(id(following))
                pending.append(following)
    if pending:
        return
    named = [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad]
    registered = replicas.registered[own]
    unused = [name for name, p in named if id(p) not in used and name in registered]
    recorder.tell("graph", ddp=own, unused=unused[:_NAMES], total=len(named))


def watch_modules(recorder: Recorder) -> None:
    """Tells of modules inside of a DDP that are called around it, and what DDP's broadcast did to buffers."""

    def before_forward(module: Any, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        own = replicas.holding(module)
        if own is None:
            return
        if replicas.calling:
            if replicas.before:
                with recorder.unnoticed():
                    _tell_overwritten(recorder, own, module)
            return
        if torch.is_grad_enabled() and next(told) < _AROUND:
            places = recorder.places(_caller(own))
            recorder.tell("around", places=places, ddp=own, module=type(module).__name__, training=module.training)

    told = itertools.count()
    torch.nn.modules.module.register_module_forward_pre_hook(before_forward)


def _caller(own: int) -> FrameType | None:
    """Who has called a DDP's part from outside: of ``self(x)`` in a method of that part, whoever called the method."""
    caller, frame = None, sys._getframe(1)
    while frame.f_back is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        if owner is not None and replicas.holding(owner) == own:
            caller = frame.f_back
        frame = frame.f_back
    return caller


def _tell_overwritten(recorder: Recorder, own: int, module: Any) -> None:
    """At the first module that runs inside of a DDP's forward: the broadcast is over."""
    before, replicas.before = replicas.before, {}
    now = dict(_own_buffers(module))
    changed = [name for name in before if name in now and not torch.equal(before[name], now[name])]
    if changed:
        recorder.tell(
            "overwritten",
            ddp=own,
            names=changed[:_NAMES],
            before=[digests.sampled(before[name], 1)[0] for name in changed[:_SAMPLED]],
            after=[digests.sampled(now[name], 1)[0] for name in changed[:_SAMPLED]],
        )


def _no_sync(call: Call) -> Generator[None, Any, None]:
    context = yield
    if call.error is None:
        _around_context(call.recorder, context, replicas.number(call.owner))


def _around_context(recorder: Recorder, context: Any, own: int | None) -> None:
    """Tells when the context is entered and left. It is torch's own kind of context, of a generator."""
    inner = context.gen

    def outer() -> Generator[Any, Any, Any]:
        number = recorder.tell("no-sync", ddp=own)
        try:
            return (yield from inner)
        finally:
            recorder.done(number)

    context.gen = outer()


def _backward(call: Call) -> Generator[None, Any, None]:
    roots = list(digests.tensors_in(call["tensors"]))
    if not roots:
        return
    models = replicas.models()
    before = {own: _marks(model) for own, model in models.items()}
    weighted = any(True for _ in digests.tensors_in([call["grad_tensors"]]))
    told = [_root(root, weighted=weighted) for root in roots[:4]]
    number = call.recorder.tell("backward", roots=told, onto=_untouched(models))
    yield
    reached = {own: replicas.pending.get(own) for own, marks in before.items() if _marks(models[own]) != marks}
    for own in reached:  # a forward of another model may have its backward yet to come
        replicas.pending.pop(own, None)
    replicas.marks = {
        id(p): (id(p.grad), p.grad._version) for m in models.values() for p in m.parameters() if p.grad is not None
    }
    call.recorder.syncs += "synced" in reached.values()
    call.recorder.done(number, failed=call.error is not None, reached=list(reached.items()))


def _untouched(models: dict[int, Any]) -> bool:
    """Whether there are gradients of the last backward, neither zeroed nor scaled since: this one adds to them."""
    return any(
        p.grad is not None and replicas.marks.get(id(p)) == (id(p.grad), p.grad._version)
        for model in models.values()
        for p in model.parameters()
    )


def _marks(model: Any) -> list[tuple[int, int]]:
    """They change whenever a gradient does."""
    return [(id(p.grad), p.grad._version) for p in model.parameters() if p.grad is not None]


def _root(tensor: Any, *, weighted: bool) -> list[list[Any]]:
    """The last functions of a loss, from its end backwards: name, and what it was divided by, where that is known. If
    ``backward`` was given a gradient to begin with, that comes before them."""
    told: list[list[Any]] = [["gradient", None]] if weighted else []
    pending = [tensor.grad_fn]
    while pending and len(told) < 8:
        node = pending.pop(0)
        if node is None:
            continue
        name = node.name()
        told.append([f"{name}{WEIGHTED}" if _is_weighted(node) else name, _divisor(node, name)])
        if name in _PASSING:
            pending += [following for following, _ in node.next_functions]
    return told


_PASSING = (
    "DivBackward0",
    "MulBackward0",
    "AddBackward0",
    "SubBackward0",
    "NegBackward0",
    "ToCopyBackward0",
    "SqueezeBackward0",
)


def _divisor(node: Any, name: str) -> float | None:
    """How many samples a mean was taken over, or what was divided or multiplied by."""
    value: Any = None
    if name == "MeanBackward0":
        value = node._saved_self_sym_numel
    elif name in ("DivBackward0", "MulBackward0"):
        value = node._saved_other
    elif getattr(node, "_saved_reduction", None) == _MEAN:  # of a loss
        value = node._saved_total_weight if hasattr(node, "_saved_total_weight") else node._saved_self.numel()
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def _is_weighted(node: Any) -> bool:
    """Whether a loss takes a mean in which classes have weights: it divides by their sum, which is no count."""
    return getattr(node, "_saved_weight", None) is not None and getattr(node, "_saved_reduction", None) == _MEAN


_MEAN = 1
"""``reduction="mean"``, as torch keeps it."""


def _clipped(call: Call) -> Generator[None, Any, None]:
    result = yield
    norm = result.item() if isinstance(result, torch.Tensor) else None
    call.recorder.tell("clip", norm=norm)


def _scaler_updated(call: Call) -> Generator[None, Any, None]:
    before = call.owner.get_scale()
    yield
    call.recorder.tell("scale", before=before, after=call.owner.get_scale())


_LENGTHS = ("total_steps", "T_max", "total_iters")
_schedulers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_scheduler_numbers = itertools.count()


def _scheduler_made(call: Call) -> Generator[None, Any, None]:
    yield
    scheduler = call.owner
    number = _schedulers[scheduler] = next(_scheduler_numbers)
    length = next((getattr(scheduler, name) for name in _LENGTHS if hasattr(scheduler, name)), None)
    call.recorder.tell("schedule", scheduler=number, name=type(scheduler).__name__, length=length)


def _scheduler_stepped(call: Call) -> Generator[None, Any, None]:
    yield
    if call.owner in _schedulers:
        rates = [float(group["lr"]) for group in call.owner.optimizer.param_groups]
        call.recorder.tell("scheduled", scheduler=_schedulers[call.owner], rates=rates)


def _state_loaded(call: Call) -> Generator[None, Any, None]:
    module = call.owner
    given, own = list(call["state_dict"] or ()), [name for name, _ in module.named_parameters()]
    lost = _prefixed(given) and bool(own) and not _prefixed(own)
    yield
    number = replicas.number(module)
    call.recorder.tell(
        "load-state",
        ddp=replicas.holding(module) if number is None else number,
        params=len(own),
        lost=lost,
        whole=call.error is None,
    )


def _prefixed(names: list[str]) -> bool:
    """Whether they are of what a DDP wraps."""
    return bool(names) and all(name.startswith("module.") for name in names)


def _joined(call: Call) -> Generator[None, Any, None]:
    call.recorder.tell("join")
    yield


def _checkpointed(call: Call) -> Generator[None, Any, None]:
    call.recorder.tell("checkpointed", ddp=replicas.calling[-1] if replicas.calling else None)
    yield


def _threads_set(call: Call) -> Generator[None, Any, None]:
    call.recorder.tell("threads", count=int(call.args[0]))
    yield


def _replicated(call: Call) -> Generator[None, Any, None]:
    call.recorder.tell("replicated")
    yield


_SCHEDULERS = ("LRScheduler", "ReduceLROnPlateau", "CosineAnnealingWarmRestarts")
"""Those with a ``step`` of their own; one that is made of others steps through them."""
_DDP = "torch.nn.parallel.distributed"
TABLE = (
    Hooked(_DDP, "DistributedDataParallel.__init__", _wrapped, scope="wrap"),
    Hooked(_DDP, "DistributedDataParallel.forward", _forward),
    Hooked(_DDP, "DistributedDataParallel.no_sync", _no_sync),
    Hooked("torch.autograd", "backward", _backward, scope="backward"),
    Hooked("torch.nn.utils", "clip_grad_norm_", _clipped, scope="clip"),
    Hooked("torch.nn.utils", "clip_grad_value_", _clipped, scope="clip"),
    Hooked("torch.nn.utils.clip_grad", "clip_grad_norm_", _clipped, scope="clip"),
    Hooked("torch.nn.utils.clip_grad", "clip_grad_value_", _clipped, scope="clip"),
    Hooked("torch.amp", "GradScaler.update", _scaler_updated),
    *(Hooked("torch.optim.lr_scheduler", f"{n}.__init__", _scheduler_made, scope="schedule") for n in _SCHEDULERS),
    *(Hooked("torch.optim.lr_scheduler", f"{n}.step", _scheduler_stepped, scope="schedule") for n in _SCHEDULERS),
    Hooked("torch.nn", "Module.load_state_dict", _state_loaded, scope="load-state"),
    Hooked(_DDP, "DistributedDataParallel.join", _joined, scope="join"),
    Hooked("torch.distributed.algorithms.join", "Join.__init__", _joined, scope="join"),
    Hooked("torch.utils.checkpoint", "CheckpointFunction.forward", _checkpointed),
    Hooked("torch", "set_num_threads", _threads_set),
    Hooked("torch.nn.parallel.data_parallel", "DataParallel.__init__", _replicated),
)
