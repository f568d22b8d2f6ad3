"""Rules about the model: what DDP wraps, what it knows of it, and what goes around it."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace

from paceline.doctor.findings import Finding
from paceline.doctor.reading.checks_steps import reduces_gradients
from paceline.doctor.reading.evidence import found, inner_module, modules_in, wrapped
from paceline.doctor.reading.trace import Event, Trace
from paceline.doctor.reading.values import NONE, Value, words

__all__ = ["CHECKS"]


def _forwards(trace: Trace) -> dict[str, Event]:
    return {f"forward:{event.number}": event for event in trace.of("forward")}


def forward_bypassed(trace: Trace) -> Iterator[Finding]:
    inner = wrapped(trace)
    if not inner or reduces_gradients(trace) or not any(e.role == "step" for e in trace.events):
        return
    owned = {id(part): wrap for wrap in inner.values() for part in modules_in(inner_module(wrap))}
    forwards = _forwards(trace)
    done: set[tuple[str, int]] = set()
    for backward in trace.of("backward"):
        for label in sorted(backward.labels):
            event = forwards.get(label)
            if event is None or not event.with_grad:
                continue
            wrap = owned.get(id(event.subject))
            if event.subject.kind == "module" and wrap is not None and wrap.number < event.number:
                from_outside = _called_from_outside(event, owned)
                place = (from_outside.path, from_outside.line)
                if place in done:
                    continue
                done.add(place)
                yield found(
                    "ddp-forward-bypassed",
                    from_outside,
                    "this forward goes around the DDP wrapper, so the gradients of its backward are not reduced",
                    evidence=f"{from_outside.source}; backward at line {backward.line}",
                )


def _called_from_outside(event: Event, parts: Container[int]) -> Event:
    """Of ``self(x)`` in a method of the wrapped model: where that method was called."""
    for call in event.calls:
        if call.owner is not None and id(call.owner) in parts:
            return replace(event, path=call.path, line=getattr(call.node, "lineno", event.line), node=call.node)
    return event


def replicas_start_different(trace: Trace) -> Iterator[Finding]:
    if not reduces_gradients(trace):
        return
    inner = wrapped(trace)
    for event in trace.of("optimizer"):
        params = event.argument("params")
        owner = params.fields.get("owner") if params is not None else None
        if owner is None or owner.kind != "module" or id(owner) in inner:
            continue
        drawn = [
            module
            for module in modules_in(owner)
            if "rng" in module.labels or any("rng" in held.labels for held in module.fields.values())
        ]
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
        parts = {id(part) for part in modules_in(inner_module(wrap))} | {id(wrap.result)}
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
        stepped = any(event.result in (step.subject, *step.arguments.values()) for step in trace.of("step"))
        if trained and twins and stepped and not used & parts:
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


_LAUNCHERS = words("accelerate lightning pytorch_lightning deepspeed horovod ray ignite transformers")


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
    if not trace.any("init") or not steps or not trace.any("backward") or trace.any("wrap", "legacy", "comm_hook"):
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


CHECKS = (
    forward_bypassed,
    replicas_start_different,
    changed_after_wrap,
    stale_parameters,
    not_distributed,
)
