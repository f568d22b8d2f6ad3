"""Rules about the model: what DDP wraps, what it knows of it, and what goes around it."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace

from paceline.doctor.reading.checks_steps import reduces_gradients
from paceline.doctor.reading.evidence import (
    Found,
    backwards_through,
    dealt_out,
    forwards,
    inner_module,
    is_weights,
    making,
    may_follow,
    modules_in,
    rule_check,
    wrapped,
)
from paceline.doctor.reading.trace import Condition, Event, Trace
from paceline.doctor.reading.values import Value, words

__all__: list[str] = []


@rule_check("ddp-forward-bypassed")
def ddp_forward_bypassed(trace: Trace) -> Iterator[Found]:
    inner = wrapped(trace)
    if not inner or reduces_gradients(trace) or not trace.any("step"):
        return
    owned = {id(part): wrap for wrap in inner.values() for part in modules_in(inner_module(wrap))}
    calls = forwards(trace)
    done: set[tuple[str, int]] = set()
    for backward in trace.of("backward"):
        for label in sorted(backward.labels & calls.keys()):
            event = calls[label]
            wrap = owned.get(id(event.subject))
            around = event.subject.kind == "module" and wrap is not None and wrap.number < event.number
            if not around or not event.with_grad or not _is_stepped_on(trace, backward, event.subject):
                continue
            from_outside = _called_from_outside(event, owned)
            place = (from_outside.path, from_outside.line)
            if place in done:
                continue
            done.add(place)
            yield Found(
                from_outside,
                "this forward goes around the DDP wrapper, so the gradients of its backward are not reduced",
                evidence=f"{from_outside.source}; backward at line {backward.line}",
            )


def _is_stepped_on(trace: Trace, backward: Event, part: Value) -> bool:
    """Whether a step takes the gradients that a backward leaves in a part of a model; or they are zeroed first, those
    for an attention map, or a critic's in its generator's turn."""

    def round_from_there(event: Event) -> tuple[bool, int]:
        return event.number < backward.number, event.number

    then = [
        event
        for event in trace.of("step", "zero_grad")
        if _shares_loops(backward, event) and may_follow(backward, event) and _minds(trace, event, part)
    ]
    steps, zeroings = ([event for event in then if event.role == role] for role in ("step", "zero_grad"))
    return any(
        not any(
            round_from_there(zeroing) < round_from_there(step)
            and _conditions(zeroing) <= _conditions(step) | _conditions(backward)
            for zeroing in zeroings
        )
        for step in steps
    )


def _conditions(event: Event) -> set[tuple[int, bool]]:
    return {(id(condition.value), condition.holds) for condition in event.under}


def _minds(trace: Trace, event: Event, part: Value) -> bool:
    """Whether a step, or a zeroing, may be of an optimizer that holds a part, or of a model that does."""
    for value in (event.subject, *event.arguments.values()):
        made = making(trace, "optimizer", value)
        params = made.argument("params") if made is not None else None
        owner = params.fields.get("owner") if params is not None else value if value.kind in ("module", "ddp") else None
        if owner is not None:
            return any(held is part for held in modules_in(owner))
    return True


def _shares_loops(event: Event, other: Event) -> bool:
    shared = min(len(event.loops), len(other.loops))
    return event.loops[:shared] == other.loops[:shared]


def _called_from_outside(event: Event, parts: Container[int]) -> Event:
    """Of ``self(x)`` in a method of the wrapped model: where that method was called."""
    for call in event.calls:
        if call.owner is not None and id(call.owner) in parts:
            return replace(event, path=call.path, line=getattr(call.node, "lineno", event.line), node=call.node)
    return event


@rule_check("params-changed-after-wrap")
def params_changed_after_wrap(trace: Trace) -> Iterator[Found]:
    for wrap in trace.of("wrap"):
        parts = {id(part) for part in modules_in(inner_module(wrap))} | {id(wrap.result)}
        trained = backwards_through(trace, wrap)
        looped = {loop.number for event in trained for loop in event.loops}
        changes = [event for event in trace.of("store", "freeze") if _is_of(event, parts)]
        while_training = [event for event in changes if any(loop.number in looped for loop in event.loops)]
        turned = {value.only for event in while_training if (value := _switch(event)) is not None}
        taken_in_turns = {True, False} <= turned  # as GANs do: frozen and trained again within each step
        some_frozen = any((value := _switch(event)) is not None and value.only is not True for event in changes)
        for event in changes:
            if event.number < wrap.number or _wrapped_again(trace, wrap, event):
                continue
            if not any(may_follow(event, backward) for backward in trained):
                continue
            value = _switch(event)
            switches = value is not None and not taken_in_turns and not _is_teacher(event, wrap)
            if value is not None and value.only is True and not some_frozen:
                continue  # as it was
            if switches or _replaces(event):
                what = "which parameters are trained" if switches else "the model's parameters"
                yield Found(event, f"this changes {what} after DDP took its list of them at line {wrap.line}")


def _is_of(event: Event, parts: Container[int]) -> bool:
    return any(id(value) in parts for value in (event.subject, event.subject.fields.get("owner")))


def _switch(event: Event) -> Value | None:
    """What an event sets ``requires_grad`` to; ``None``: it does no such thing."""
    if event.name not in ("requires_grad", "requires_grad_"):
        return None
    return event.argument("value", "requires_grad") or Value()


def _replaces(event: Event) -> bool:
    value = event.argument("value", "module", "param")
    return event.role == "store" and value is not None and value.of_kind("module", "parameter") is not None


def _is_teacher(event: Event, wrap: Event) -> bool:
    """Whether it freezes all of the wrapped model, whatever comes: nothing of it is trained."""
    value, owner = _switch(event), event.subject.fields.get("owner", event.subject)
    whole = owner is wrap.result or owner is inner_module(wrap)
    return whole and value is not None and value.only is False and len(event.under) <= len(wrap.under)


def _wrapped_again(trace: Trace, wrap: Event, event: Event) -> bool:
    return any(other.number > event.number and other is not wrap for other in trace.of("wrap"))


@rule_check("optimizer-stale-params")
def optimizer_stale_params(trace: Trace) -> Iterator[Found]:
    optimizers = list(trace.of("optimizer"))
    for event in optimizers:
        params = event.argument("params")
        owner = params.fields.get("owner") if params is not None else None
        held = owner.of_kind("module", "ddp") if owner is not None else None
        if held is None or "escaped" in held.labels:
            continue
        model = held.fields.get("module", held) if held.kind == "ddp" else held
        parts = {id(part) for part in modules_in(model)} | {id(held)}
        steps = [step for step in trace.of("step") if event.result in (step.subject, *step.arguments.values())]
        for store in trace.of("store"):
            made_anew = any(other.number > store.number for other in optimizers)
            later = store.number > event.number and any(may_follow(store, step) for step in steps)
            if id(store.subject) in parts and _replaces(store) and later and not made_anew:
                yield Found(store, f"the optimizer of line {event.line} holds the parameters that were there before")
        trained = [f for label, f in forwards(trace).items() if any(label in b.labels for b in trace.of("backward"))]
        twins = [f for f in trained if _is_twin(f.subject, model) and f.number > event.number]
        in_use = {id(part) for f in trained for part in modules_in(f.subject)} & parts
        if twins and steps and not in_use:
            yield Found(
                event,
                f"the model that is trained at line {twins[0].line} is another object than the one whose parameters "
                "this optimizer holds",
            )


def _is_twin(subject: Value, other: Value) -> bool:
    """Whether it is another model of the same class."""
    module = subject.fields.get("module", subject) if subject.kind == "ddp" else subject
    same_class = module.code is not None and module.code is other.code
    return module is not other and (same_class or (bool(module.name) and module.name == other.name))


@rule_check("not-distributed", by_absence=True)
def not_distributed(trace: Trace) -> Iterator[Found]:
    steps = list(trace.of("step"))
    yield from _meets_under_another_launcher_only(trace)
    if not steps or not trace.any("backward") or trace.any("wrap", "legacy"):
        return
    if not trace.any("init"):
        if not trace.any("spawn", "process") and not _knows_of_ranks(trace):
            yield Found(
                steps[0],
                "started as several ranks, each would train a model of its own: no process group is ever set up",
                severity="advice",
                confidence="possible",
            )
    elif _trains_its_own(trace) and not _exchanges_weights(trace) and not dealt_out(trace, steps[0]):
        yield Found(
            steps[0],
            "the process group is set up, but nothing reduces gradients: each rank trains a model of its own",
        )


def _meets_under_another_launcher_only(trace: Trace) -> Iterator[Found]:
    """Where torchrun tells each rank its number, and a variable that torchrun does not set tells how many there are."""
    inits = list(trace.of("init"))
    if "WORLD_SIZE" in trace.variables or not trace.variables & {"RANK", "LOCAL_RANK"}:
        return
    deciding = [next(filter(_is_of_another_launcher, event.under), None) for event in inits]
    if inits and None not in deciding and trace.any("backward"):
        yield Found(
            inits[0],
            "whether ranks meet here hangs on a variable that Slurm or MPI sets and torchrun does not: under torchrun "
            "each rank trains a model of its own",
            evidence=f"under {deciding[0].text}" if deciding[0] is not None else None,
            fix="Read WORLD_SIZE first, as RANK is read",
        )


def _is_of_another_launcher(condition: Condition) -> bool:
    """Whether nothing else decides: no option, and none of torchrun's variables."""
    labels = condition.value.labels
    return "other-launcher" in labels and not labels & {"environment", "config", "partly"}


_LAUNCHERS = words("accelerate lightning pytorch_lightning deepspeed horovod ray ignite transformers")
_SHARDERS = words(
    "fsdp fully_shard deepspeed horovod accelerate lightning ShardedDataParallel torch.distributed.tensor"
)
"""In the name of whatever trains over several ranks without DDP."""


def _knows_of_ranks(trace: Trace) -> bool:
    known = any(name.startswith("torch.distributed") or name.split(".")[0] in _LAUNCHERS for name in trace.names)
    return known or bool(trace.variables & {"RANK", "LOCAL_RANK", "WORLD_SIZE"})


_BETWEEN_TWO = words("send recv isend irecv batch_isend_irecv P2POp")


def _trains_its_own(trace: Trace) -> bool:
    """Whether what is trained are models of the script, called as they are."""
    calls = forwards(trace)
    models = [event.subject for event in calls.values() if not event.inside and event.with_grad]
    if not models or any(model.kind != "module" or "escaped" in model.labels for model in models):
        return False
    return any(event.labels & calls.keys() for event in trace.of("backward"))


def _exchanges_weights(trace: Trace) -> bool:
    """Whether anything made of gradients, parameters or activations is sent, or something else may do so."""
    if trace.any("comm_hook") or reduces_gradients(trace):
        return True
    if any(sharder in name for name in trace.names for sharder in _SHARDERS):
        return True
    if any(event.inside for event in trace.of("collective")):
        return True  # what passes between layers: each rank holds a part of one model
    if any(name.rpartition(".")[2] in _BETWEEN_TWO for name in trace.names if name.startswith("torch.distributed.")):
        return True
    sent = [value for event in trace.of("collective") for value in event.arguments.values()]
    return any(is_weights(value) or "graph" in value.labels for value in sent)
