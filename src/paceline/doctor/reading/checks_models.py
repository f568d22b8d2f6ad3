"""Rules about the model: what DDP wraps, what it knows of it, and what goes around it."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.findings import Finding
from paceline.doctor.reading.checks_steps import reduces_gradients
from paceline.doctor.reading.evidence import found, local, modules_in, wrapped
from paceline.doctor.reading.objects import method_of
from paceline.doctor.reading.trace import Event, Trace
from paceline.doctor.reading.values import NONE, VARYING, Value

__all__ = ["CHECKS"]

WITH_PARAMETERS = (
    "Linear LazyLinear Bilinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d BatchNorm1d "
    "BatchNorm2d BatchNorm3d SyncBatchNorm LayerNorm GroupNorm RMSNorm Embedding EmbeddingBag LSTM GRU RNN LSTMCell "
    "GRUCell RNNCell Transformer TransformerEncoder TransformerDecoder TransformerEncoderLayer TransformerDecoderLayer "
    "MultiheadAttention PReLU"
).split()


def _inner(event: Event) -> Value | None:
    """The module that a `wrap` event wraps, if that is one thing."""
    module = event.argument("module")
    return module.of_kind("module") if module is not None else None


def _forwards(trace: Trace) -> dict[str, Event]:
    return {f"forward:{event.number}": event for event in trace.of("forward")}


def forward_bypassed(trace: Trace) -> Iterator[Finding]:
    inner = wrapped(trace)
    if not inner or reduces_gradients(trace) or not any(e.role == "step" for e in trace.events):
        return
    owned = {id(part): wrap for wrap in inner.values() for part in modules_in(_inner(wrap))}
    forwards = _forwards(trace)
    done: set[int] = set()
    for backward in trace.of("backward"):
        for label in sorted(backward.labels):
            event = forwards.get(label)
            if event is None or event.line in done or not event.with_grad:
                continue
            wrap = owned.get(id(event.subject))
            if event.subject.kind == "module" and wrap is not None and wrap.number < event.number:
                done.add(event.line)
                yield found(
                    "ddp-forward-bypassed",
                    event,
                    "this forward goes around the DDP wrapper, so the gradients of its backward are not reduced",
                    evidence=f"{event.source}; backward at line {backward.line}",
                )


def replicas_start_different(trace: Trace) -> Iterator[Finding]:
    if not reduces_gradients(trace):
        return
    inner = wrapped(trace)
    for event in trace.of("optimizer"):
        params = event.argument("params")
        owner = params.fields.get("owner") if params is not None else None
        if owner is None or owner.kind != "module" or id(owner) in inner:
            continue
        drawn = [module for module in modules_in(owner) if "rng" in module.labels]
        sent = [
            e
            for e in trace.of("collective")
            if e.name.endswith("broadcast")
            and (tensor := e.argument("tensor")) is not None
            and (tensor.kind == "parameter" or "owner" in tensor.fields)
        ]
        first = next(trace.of("backward"), None)
        early = [e for e in sent if first is None or e.number < first.number]
        if drawn and not early and not any(load.subject is owner for load in trace.of("load_state")):
            yield found(
                "replicas-start-different",
                event,
                "each rank draws its first weights from a differently seeded generator, and nothing makes them equal",
                line=owner.line or event.line,
            )


def changed_after_wrap(trace: Trace) -> Iterator[Finding]:
    for wrap in trace.of("wrap"):
        parts = {id(part) for part in modules_in(_inner(wrap))} | {id(wrap.result)}
        toggles = {
            value.only
            for event in trace.of("store", "freeze")
            if (value := event.argument("value", "requires_grad")) is not None and event.loops
        }
        for event in trace.of("store", "freeze"):
            if event.number < wrap.number or _wrapped_again(trace, wrap, event):
                continue
            value = event.argument("value", "module", "param", "requires_grad") or NONE
            owner = event.subject.fields.get("owner", event.subject)
            if id(owner) not in parts and id(event.subject) not in parts:
                continue
            replaced = event.role == "store" and value.of_kind("module", "parameter") is not None
            froze = event.name in ("requires_grad", "requires_grad_") and not {True, False} <= toggles
            if replaced or froze:
                what = "which parameters are trained" if froze else "the model's parameters"
                yield found(
                    "params-changed-after-wrap",
                    event,
                    f"this changes {what} after DDP took its list of them at line {wrap.line}",
                )


def _wrapped_again(trace: Trace, wrap: Event, event: Event) -> bool:
    return any(other.number > event.number and other is not wrap for other in trace.of("wrap"))


def stale_parameters(trace: Trace) -> Iterator[Finding]:
    optimizers = list(trace.of("optimizer"))
    for event in optimizers:
        params = event.argument("params")
        owner = params.fields.get("owner") if params is not None else None
        held = owner.of_kind("module", "ddp") if owner is not None else None
        if held is None or "escaped" in held.labels:
            continue
        inner = held.fields.get("module", held) if held.kind == "ddp" else held
        parts = {id(part) for part in modules_in(inner)} | {id(held)}
        again = [other for other in optimizers if other.number > event.number]
        for store in trace.of("store"):
            value = store.argument("value", "module", "param")
            changes = value is not None and value.of_kind("module", "parameter") is not None
            if store.number > event.number and id(store.subject) in parts and changes and not again:
                yield found(
                    "optimizer-stale-params",
                    store,
                    f"the optimizer of line {event.line} holds the parameters that were there before",
                )
        trained = [f for label, f in _forwards(trace).items() if any(label in b.labels for b in trace.of("backward"))]
        used = {id(part) for f in trained for part in modules_in(f.subject)}
        twins = [f for f in trained if _twin(f.subject, inner) and f.number > event.number]
        if trained and twins and not used & parts:
            yield found(
                "optimizer-stale-params",
                event,
                f"the model that is trained at line {twins[0].line} is another object than the one whose parameters "
                "this optimizer holds",
            )


def _twin(subject: Value, other: Value) -> bool:
    module = subject.fields.get("module", subject) if subject.kind == "ddp" else subject
    same_class = module.code is not None and module.code is other.code
    return module is not other and (same_class or (bool(module.name) and module.name == other.name))


# --- which parameters take part


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
    for module in list(modules_in(_inner(wrap)))[:200]:
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
        inner = _inner(wrap)
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


_LAUNCHERS = frozenset("accelerate lightning pytorch_lightning deepspeed horovod ray ignite transformers".split())


def not_distributed(trace: Trace) -> Iterator[Finding]:
    steps = list(trace.of("step"))
    if steps and trace.any("backward") and not trace.any("init", "wrap", "spawn", "process", "legacy"):
        known = any(name.startswith("torch.distributed") or name.split(".")[0] in _LAUNCHERS for name in trace.names)
        if not known and not trace.variables & {"RANK", "LOCAL_RANK", "WORLD_SIZE"}:
            yield found(
                "not-distributed",
                steps[0],
                "started as several ranks, each would train a model of its own: no process group is ever set up",
                severity="advice",
                confidence="possible",
            )
    if not trace.any("init") or not steps or not trace.any("backward") or trace.any("wrap", "comm_hook"):
        return
    others = ("fsdp", "fully_shard", "deepspeed", "horovod", "accelerate", "lightning", "ShardedDataParallel", "tensor")
    if any(other in name.split(".") or other in name for name in trace.names for other in others[:-1]):
        return
    if reduces_gradients(trace) or any(
        value.kind in ("parameter", "state_dict", "unknown", "tensor")
        and ("owner" in value.fields or value.kind == "parameter")
        for event in trace.of("collective")
        for value in event.arguments.values()
    ):
        return
    models = [e.subject for e in trace.of("forward") if not e.inside and e.with_grad]
    if not models or any("escaped" in model.labels for model in models) or any(m.kind != "module" for m in models):
        return
    trained = {label for event in trace.of("backward") for label in event.labels}
    if trained & {f"forward:{event.number}" for event in trace.of("forward")} and not _shares(trace):
        yield found(
            "not-distributed",
            steps[0],
            "the process group is set up, but nothing reduces gradients: each rank trains a model of its own",
        )


def _shares(trace: Trace) -> bool:
    """Whether anything made of gradients or parameters is reduced."""
    return any("graph" in event.labels for event in trace.of("collective"))


# --- buffers


def batch_norms(trace: Trace) -> Iterator[Finding]:
    converted = trace.any("convert")
    for wrap in trace.of("wrap"):
        inner = wrap.argument("module")
        norms = [part for part in modules_in(inner) if part.name.startswith("torch.nn.BatchNorm")]
        counts = [part for part in modules_in(inner) if part.kind == "buffer"]
        synced = _syncs_buffers(wrap) or any(
            (tensor := e.argument("tensor")) is not None and tensor.kind == "tensor" and "owner" in tensor.fields
            for e in trace.of("collective")
        )
        if norms and not converted:
            yield found(
                "batchnorm-unsynced",
                wrap,
                "batch norm in this model takes its statistics from one rank's samples",
                evidence=f"{norms[0].name.removeprefix('torch.')} made at line {norms[0].line}",
                severity="advice",
            )
        evaluated = trace.any("save") or any(not event.with_grad for event in trace.of("forward"))
        if not synced and ((norms and not converted) or counts) and evaluated:
            yield found(
                "buffers-not-synced",
                wrap,
                "`broadcast_buffers=False`: buffers drift apart, and each rank evaluates or saves its own",
            )


def _syncs_buffers(wrap: Event) -> bool:
    switch = wrap.argument("forward_sync_buffers", "broadcast_buffers")
    return switch is None or switch.default is not False


def syncbn_on_cpu(trace: Trace) -> Iterator[Finding]:
    backends = {event.arguments["backend"].default for event in trace.of("init") if "backend" in event.arguments}
    if backends != {"gloo"} or trace.any("cuda", "set_device"):
        return
    if any(
        "cuda" in str(v.default) or v.kind == "device" or v.labels
        for e in trace.of("place")
        for v in e.arguments.values()
    ):
        return
    made = [event for event in trace.of("module") if event.name == "torch.nn.SyncBatchNorm"]
    for event in [*trace.of("convert"), *made]:
        if not any("cuda" in condition.value.name for condition in event.under):
            yield found("syncbn-on-cpu", event, "SyncBatchNorm needs a GPU, and this model stays on the CPU with gloo")


def buffer_overwritten(trace: Trace) -> Iterator[Finding]:
    if not trace.any("wrap") or not all(_syncs_buffers(wrap) for wrap in trace.of("wrap")):
        return
    done: set[int] = set()
    for event in trace.of("buffer"):
        value = event.argument("value")
        in_ddp = any(module.kind == "ddp" for module in event.inside)
        if in_ddp and value is not None and value.varies and event.line not in done:
            done.add(event.line)
            yield found(
                "rank-local-buffer-overwritten",
                event,
                f"the buffer `{event.name}` gathers this rank's own values, and DDP overwrites it with rank 0's",
            )


CHECKS = (
    forward_bypassed,
    replicas_start_different,
    changed_after_wrap,
    stale_parameters,
    parameters_used,
    rank_dependent_graph,
    model_differs,
    reentrant,
    not_distributed,
    batch_norms,
    syncbn_on_cpu,
    buffer_overwritten,
)
