"""Rules about which parts of the model take part, and whether those are the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.findings import Finding
from paceline.doctor.reading.evidence import found, inner_module, local, modules_in
from paceline.doctor.reading.objects import method_of
from paceline.doctor.reading.trace import Event, Trace
from paceline.doctor.reading.values import NONE, VARYING, Value, words

__all__ = ["CHECKS"]

WITH_PARAMETERS = words(
    "Linear LazyLinear Bilinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d BatchNorm1d "
    "BatchNorm2d BatchNorm3d SyncBatchNorm LayerNorm GroupNorm RMSNorm Embedding EmbeddingBag LSTM GRU RNN LSTMCell "
    "GRUCell RNNCell Transformer TransformerEncoder TransformerDecoder TransformerEncoderLayer TransformerDecoderLayer "
    "MultiheadAttention PReLU"
)


def _has_parameters(module: Value, depth: int = 8) -> bool:
    if module.kind == "parameter":
        return module.fields.get("requires_grad", Value()).only is not False
    if module.name.removeprefix("torch.nn.") in WITH_PARAMETERS:
        return True
    return depth > 0 and any(_has_parameters(part, depth - 1) for part in modules_in(module, 2) if part is not module)


def _frozen(trace: Trace, module: Value, wrap: Event) -> bool:
    """Whether it is frozen before the wrap, or may be."""
    for event in trace.of("freeze", "store"):
        if event.number > wrap.number or event.name not in ("requires_grad", "requires_grad_"):
            continue
        owner = event.subject.fields.get("owner", event.subject)
        if any(part is module for option in owner.each() for part in modules_in(option)):
            return True
    return False


def _unread(trace: Trace, wrap: Event) -> Iterator[tuple[Value, str, bool]]:
    """Of the script's own modules in a wrapped model: fields with parameters that a forward never, or not always,
    looks at."""
    called: dict[int, bool] = {}
    for event, outer in _inside(trace, wrap):
        always = len(event.under) <= len(outer.under)
        called[id(event.subject)] = called.get(id(event.subject), False) or always
    for module in list(modules_in(inner_module(wrap)))[:200]:
        if module.kind != "module" or (
            not module.code
            and "some" not in module.labels
            and module.name not in ("torch.nn.ModuleList", "torch.nn.ModuleDict")
        ):
            continue
        reads = trace.reads.get(id(module))
        if reads is None or (module.code and method_of(module, "forward") is None):
            continue
        for name, held in module.fields.items():
            parts = [option for option in held.each() if option.kind in ("module", "parameter")]
            if name == "__class__" or not any(_has_parameters(part) for part in parts):
                continue
            if any(_frozen(trace, part, wrap) for part in parts):
                continue
            calls = [called[id(part)] for part in parts if id(part) in called]
            if not (reads.get(name, False) and (not calls or any(calls))):
                yield module, name, name in reads


def parameters_used(trace: Trace) -> Iterator[Finding]:
    for wrap in trace.of("wrap"):
        inner = inner_module(wrap)
        called = any(e.subject is wrap.result for e in trace.of("forward"))
        if inner is None or not called or "escaped" in inner.labels:
            continue
        finds, static = (wrap.arguments.get(name, NONE) for name in ("find_unused_parameters", "static_graph"))
        unread = list(_unread(trace, wrap))
        never = [(module, name) for module, name, sometimes in unread if not sometimes]
        if never and finds.default in (None, False) and static.default in (None, False):
            module, name = never[0]
            yield found(
                "unused-parameters",
                wrap,
                f"`self.{name}` of {module.fields['__class__'].name if '__class__' in module.fields else 'the model'} "
                "has parameters and takes no part in forward: DDP waits for their gradients",
                evidence=f"made at line {module.fields[name].line or module.line}, never read in forward",
            )
        elif finds.default in (None, False) and static.default in (None, False):
            yield from _left_out(trace, wrap, inner)
        if static.only is True and any(sometimes for _, _, sometimes in unread):
            name = next(name for _, name, sometimes in unread if sometimes)
            if _changes(trace, wrap):
                yield found(
                    "static-graph-changes",
                    wrap,
                    f"`static_graph=True`, but `self.{name}` takes part in some steps only",
                )
        if (
            finds.only is True
            and not unread
            and not trace.any("checkpoint")
            and _all_known(inner)
            and not _may_skip(trace, wrap)
        ):
            yield found(
                "find-unused-unneeded",
                wrap,
                "`find_unused_parameters=True`, though each forward uses every parameter",
            )


def _left_out(trace: Trace, wrap: Event, inner: Value) -> Iterator[Finding]:
    """Parts whose output reaches no loss."""
    forwards = {f"forward:{e.number}" for e in trace.of("forward") if e.subject is wrap.result and e.with_grad}
    losses = [event.labels for event in trace.of("backward") if event.labels & forwards]
    reached = {label for labels in losses for label in labels}
    for event, outer in _inside(trace, wrap):
        direct = len(event.inside) == 2 and outer.with_grad and event.with_grad
        held = next((name for name, part in inner.fields.items() if part is event.subject), None)
        left_out = f"part:{id(event.subject)}" not in reached and _has_parameters(event.subject)
        if losses and direct and held is not None and left_out and not _frozen(trace, event.subject, wrap):
            yield found(
                "unused-parameters",
                event,
                f"what `self.{held}` gives reaches no loss: DDP waits for gradients of its parameters",
            )
            return


def _inside(trace: Trace, wrap: Event, role: str = "forward") -> Iterator[tuple[Event, Event]]:
    """Each module's forward within the wrapped model's, with that one."""
    outer: Event | None = None
    for event in trace.of("forward", "choose"):
        if not event.inside:
            outer = event if event.subject is wrap.result else None
        elif outer is not None and event.role == role:
            yield event, outer


def _changes(trace: Trace, wrap: Event) -> bool:
    """Whether what decides over a part of the graph changes while training."""
    for event, outer in _inside(trace, wrap):
        for condition in event.under[len(outer.under) :]:
            value = condition.value
            if value.labels & ({"counter", "every-nth"} | VARYING) or (value.known and value.known.loop is not None):
                return True
    return False


def _may_skip(trace: Trace, wrap: Event) -> bool:
    return any(
        len(e.under) > len(outer.under) or not e.with_grad for e, outer in _inside(trace, wrap) if outer.with_grad
    )


def _all_known(inner: Value) -> bool:
    return all(
        part.kind in ("parameter", "buffer") or part.code is not None or part.name.startswith("torch.nn.")
        for part in modules_in(inner)
    )


def rank_dependent_graph(trace: Trace) -> Iterator[Finding]:
    for wrap in trace.of("wrap"):
        if wrap.arguments.get("find_unused_parameters", NONE).default is True:
            continue
        for event, _ in _inside(trace, wrap, "choose"):
            key = event.argument("key")
            if key is not None and key.varies and _has_parameters(event.subject):
                yield found("rank-dependent-graph", event, "which part of the model runs is not the same on all ranks")
        done: set[int] = set()
        for event, outer in _inside(trace, wrap):
            for condition in event.under[len(outer.under) :]:
                differs = "rank" in condition.value.labels or local(condition)
                if differs and _has_parameters(event.subject) and condition.line not in done:
                    done.add(condition.line)
                    yield found(
                        "rank-dependent-graph",
                        event,
                        "whether this part of the model runs is not the same on all ranks",
                        evidence=f"{event.source} under the condition of line {condition.line}",
                    )


def model_differs(trace: Trace) -> Iterator[Finding]:
    parts = {id(part): wrap for wrap in trace.of("wrap") for part in modules_in(wrap.argument("module"))}
    for event in trace.of("module"):
        if id(event.result) not in parts:
            continue
        sizes = [value for name, value in event.arguments.items() if name not in ("device", "dtype")]
        if any(value.labels & VARYING for value in sizes) or event.on_some_ranks:
            yield found("model-differs-across-ranks", event, "this layer's size or kind is not the same on all ranks")
            return


def reentrant(trace: Trace) -> Iterator[Finding]:
    static = any(wrap.arguments.get("static_graph", NONE).default is True for wrap in trace.of("wrap"))
    if not trace.any("wrap") or static:
        return
    done: set[int] = set()
    for event in trace.of("checkpoint"):
        if event.arguments.get("use_reentrant", NONE).only is True and event.line not in done:
            done.add(event.line)
            yield found(
                "reentrant-checkpoint", event, "reentrant checkpointing runs a backward of its own inside DDP's"
            )
            return


CHECKS = (parameters_used, rank_dependent_graph, model_differs, reentrant)
