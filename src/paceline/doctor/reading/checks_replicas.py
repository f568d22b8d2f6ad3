"""Rules about replicas that are not equal: from the start, or from some step on."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.reading.checks_steps import reduces_gradients
from paceline.doctor.reading.evidence import (
    Found,
    backwards_through,
    differs,
    inner_module,
    instead,
    is_weights,
    local,
    may_follow,
    modules_in,
    rule_check,
    wrapped,
)
from paceline.doctor.reading.flows import labels_of
from paceline.doctor.reading.trace import Event, Trace
from paceline.doctor.reading.values import NONE, Value, words

__all__: list[str] = []


@rule_check("replicas-start-different", by_absence=True)
def replicas_start_different(trace: Trace) -> Iterator[Found]:
    if not reduces_gradients(trace) or any(name.rpartition(".")[2] in _WEIGHTS_AS_ONE for name in trace.names):
        return
    inner = wrapped(trace)
    for event in trace.of("optimizer"):
        params = event.argument("params")
        owner = params.fields.get("owner") if params is not None else None
        if owner is None or owner.kind != "module" or id(owner) in inner:
            continue
        loaded = any(load.subject is owner for load in trace.of("load_state"))
        if _drawn_apart(owner) and not loaded and not _broadcast_before_training(trace):
            yield Found(
                event,
                "each rank draws its first weights from a differently seeded generator, and nothing makes them equal",
                at=owner if owner.path else event,
            )


_WEIGHTS_AS_ONE = words("parameters_to_vector vector_to_parameters _flatten_dense_tensors _broadcast_coalesced")
"""With these weights are sent as one tensor, of which it cannot be read what it is made of."""


def _drawn_apart(model: Value) -> bool:
    drawn = {"rng", "drawn"}
    return any(
        drawn & module.labels or any(drawn & held.labels for held in module.fields.values())
        for module in modules_in(model)
    )


def _broadcast_before_training(trace: Trace) -> bool:
    first = min((event.number for event in trace.of("backward")), default=0)
    return any(
        event.name.endswith("broadcast") and is_weights(event.argument("tensor"))
        for event in trace.of("collective")
        if not first or event.number < first
    )


@rule_check("replicas-diverged", by_absence=True)
def replicas_diverged(trace: Trace) -> Iterator[Found]:
    yield from _weights_changed_apart(trace)
    yield from _went_back_apart(trace)
    if trace.any("wrap") or reduces_gradients(trace):
        yield from _rates_apart(trace)


def _weights_changed_apart(trace: Trace) -> Iterator[Found]:
    for wrap in trace.of("wrap"):
        parts = {id(part) for part in modules_in(inner_module(wrap))} | {id(wrap.result)}
        trained = backwards_through(trace, wrap)
        for event in trace.of("weights"):
            owner = event.subject.fields.get("owner", event.subject)
            if event.number < wrap.number or not {id(event.subject), id(owner)} & parts:
                continue
            apart = event.on_some_ranks or differs(event.argument("value") or NONE)
            used = any(may_follow(event, backward) for backward in trained)
            if apart and used and not _sent_after(trace, event):
                yield Found(
                    event,
                    "each rank changes the weights in its own way here, and only gradients are made equal",
                    fix="Change them in the same way on every rank, or broadcast them from rank 0 afterwards",
                )


def _sent_after(trace: Trace, event: Event) -> bool:
    later = [other for other in trace.of("collective") if other.number > event.number]
    return any(is_weights(value) for other in later for value in other.arguments.values())


def _went_back_apart(trace: Trace) -> Iterator[Found]:
    """Best weights that are put back, of which each rank decides by itself when they were best."""
    for wrap in trace.of("wrap"):
        models = {id(inner_module(wrap)), id(wrap.result)}
        trained = backwards_through(trace, wrap)
        for event in trace.of("load_state"):
            used = any(may_follow(event, backward) for backward in trained)
            if id(event.subject) not in models or event.number < wrap.number or not used or _sent_after(trace, event):
                continue
            state = event.argument("state_dict")
            if _decided_here(trace, event) or (state is not None and _measured_here(Value(labels=labels_of((state,))))):
                message = "which weights are put back here is decided by what was measured on one rank"
                yield Found(event, message, fix=_AGREE)


def _rates_apart(trace: Trace) -> Iterator[Found]:
    """Learning rates, or other settings of an optimizer, that are not the same on all ranks."""
    backwards = list(trace.of("backward"))
    for event in trace.of("schedule", "rate", "optimizer"):
        given = event.argument("metrics", "epoch", "value", "lr")
        if event.role != "optimizer" and not any(may_follow(event, backward) for backward in backwards):
            continue  # nothing is trained with it any more
        if given is not None and event.role != "optimizer" and _measured_here(given):
            why = "what decides over the learning rate is measured on this rank's samples only"
        elif given is not None and _numbers_differ(given):
            why = "the learning rate is not the same on all ranks"
        elif event.role != "optimizer" and (event.on_some_ranks or _decided_here(trace, event)):
            why = "not every rank changes the learning rate here"
        else:
            continue
        if event.role != "optimizer" and _told_later(trace, event):
            continue
        yield Found(event, f"{why}, so that the same gradients make other weights on each", fix=_AGREE)


_AGREE = "Reduce what decides over all ranks first (`dist.all_reduce`), and let every rank do the same with the result"


def _measured_here(value: Value) -> bool:
    """Whether a number surely comes from this rank's share of the samples, and nobody has put it together since."""
    return {"data", "shard"} <= value.labels and not value.labels & {"reduced", "gathered", "partly", "escaped"}


def _numbers_differ(value: Value) -> bool:
    points = value.known.points if value.known is not None and value.known.loop is None else ()
    return value.known is not None and not value.known.assumed and len(set(points)) > 1


def _decided_here(trace: Trace, event: Event) -> bool:
    """Whether some ranks come to it and others do not, for what they measured."""
    return any(local(c) and _measured_here(c.value) and not instead(event, c, trace) for c in event.under)


def _told_later(trace: Trace, event: Event) -> bool:
    """Whether something is broadcast afterwards: it may be the rate."""
    return any(other.number > event.number and "broadcast" in other.name for other in trace.of("collective"))
