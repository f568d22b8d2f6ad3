"""Rules about which parts of the model take part, and whether those are the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.reading.evidence import (
    Found,
    backwards_through,
    differs,
    inner_module,
    local,
    modules_in,
    rule_check,
)
from paceline.doctor.reading.parts import has_parameters, idle_parts, inside, is_frozen
from paceline.doctor.reading.trace import Condition, Event, Trace
from paceline.doctor.reading.values import NONE, VARYING, Value

__all__: list[str] = []

# --- parts that take no part


@rule_check("unused-parameters", by_absence=True)
def unused_parameters(trace: Trace) -> Iterator[Found]:
    for wrap in _judgeable(trace):
        if any(wrap.arguments.get(name, NONE).default not in (None, False) for name in _LENIENT):
            continue
        idle = next((idle for idle in idle_parts(trace, wrap) if idle.use in ("never", "in some copies")), None)
        if idle is None:
            yield from _left_out(trace, wrap)
            continue
        module, name = idle.module, idle.name
        owner = module.fields["__class__"].name if "__class__" in module.fields else "the model"
        some, seen = ("", "never") if idle.use == "never" else ("some ", "by some copies only")
        yield Found(
            wrap,
            f"`self.{name}` of {some}{owner} takes no part in forward: DDP waits for gradients of its parameters",
            evidence=f"made at line {module.fields[name].line or module.line}, {seen} read in forward",
        )


_LENIENT = ("find_unused_parameters", "static_graph")


@rule_check("static-graph-changes")
def static_graph_changes(trace: Trace) -> Iterator[Found]:
    for wrap in _judgeable(trace):
        if wrap.arguments.get("static_graph", NONE).only is not True or not _changes(trace, wrap):
            continue
        name = next((idle.name for idle in idle_parts(trace, wrap) if idle.use == "sometimes"), None)
        if name is not None:
            yield Found(wrap, f"`static_graph=True`, but `self.{name}` takes part in some steps only")


@rule_check("find-unused-unneeded", by_absence=True)
def find_unused_unneeded(trace: Trace) -> Iterator[Found]:
    for wrap in _judgeable(trace):
        looks = wrap.arguments.get("find_unused_parameters", NONE).only is True
        whole = not _may_skip(trace, wrap) and _all_known(inner_module(wrap)) and not trace.any("checkpoint")
        if looks and whole and not idle_parts(trace, wrap):
            yield Found(wrap, "`find_unused_parameters=True`, though each forward uses every parameter")


def _judgeable(trace: Trace) -> Iterator[Event]:
    """Wraps of models whose forward is called, and that are in the script's own hands."""
    called = [event.subject for event in trace.of("forward")]
    for wrap in trace.of("wrap"):
        inner = inner_module(wrap)
        if inner is not None and any(wrap.result is model for model in called) and "escaped" not in inner.labels:
            yield wrap


def _left_out(trace: Trace, wrap: Event) -> Iterator[Found]:
    """Parts whose output reaches no loss."""
    inner = inner_module(wrap)
    losses = backwards_through(trace, wrap)
    reached = {label for event in losses for label in event.labels}
    for event, outer in inside(trace, wrap):
        direct = len(event.inside) == 2 and outer.with_grad and event.with_grad
        fields = inner.fields.items() if inner is not None else ()
        held = next((name for name, part in fields if part is event.subject), None)
        left_out = f"part:{id(event.subject)}" not in reached and has_parameters(event.subject)
        if losses and direct and held is not None and left_out and not is_frozen(trace, event.subject, wrap):
            yield Found(event, f"what `self.{held}` gives reaches no loss: DDP waits for gradients of its parameters")
            return


def _changes(trace: Trace, wrap: Event) -> bool:
    """Whether what decides over a part of the graph changes while training."""
    for event, outer in inside(trace, wrap):
        for condition in event.under[len(outer.under) :]:
            value = condition.value
            if value.labels & ({"counter", "every-nth"} | VARYING) or (value.known and value.known.loop is not None):
                return True
    return False


def _may_skip(trace: Trace, wrap: Event) -> bool:
    return any(
        len(event.under) > len(outer.under) or not event.with_grad
        for event, outer in inside(trace, wrap)
        if outer.with_grad
    )


def _all_known(inner: Value | None) -> bool:
    """Whether it is known of all that it holds which parameters that has."""
    held = [part for module in modules_in(inner) if module.kind == "module" for part in module.fields.values()]
    if any(option.kind == "unknown" and "." in option.name for part in held for option in part.each()):
        return False  # made by a library
    return all(
        part.kind in ("parameter", "buffer") or part.code is not None or part.name.startswith("torch.nn.")
        for part in modules_in(inner)
    )


# --- parts that differ between ranks


@rule_check("rank-dependent-graph")
def rank_dependent_graph(trace: Trace) -> Iterator[Found]:
    for wrap in trace.of("wrap"):
        if wrap.arguments.get("find_unused_parameters", NONE).default is True:
            continue
        for event, _ in inside(trace, wrap, "choose"):
            key = event.argument("key")
            if key is not None and differs(key) and has_parameters(event.subject):
                yield Found(event, "which part of the model runs is not the same on all ranks")
        done: set[int] = set()
        for event, outer in inside(trace, wrap):
            for condition in event.under[len(outer.under) :]:
                if _differs(condition) and has_parameters(event.subject) and condition.line not in done:
                    done.add(condition.line)
                    yield Found(
                        event,
                        "whether this part of the model runs is not the same on all ranks",
                        evidence=f"{event.source} under the condition of line {condition.line}",
                    )


def _differs(condition: Condition) -> bool:
    return ("rank" in condition.value.labels and differs(condition.value)) or local(condition)


@rule_check("model-differs-across-ranks")
def model_differs_across_ranks(trace: Trace) -> Iterator[Found]:
    wrapped_parts = {id(part) for wrap in trace.of("wrap") for part in modules_in(wrap.argument("module"))}
    for event in trace.of("module"):
        if id(event.result) not in wrapped_parts:
            continue
        if event.on_some_ranks or any(
            _is_size(name, value) and differs(value) for name, value in event.arguments.items()
        ):
            yield Found(event, "this layer's size or kind is not the same on all ranks")
            return


def _is_size(name: str, value: Value) -> bool:
    """Whether an argument may say how large a layer is; another module or its weights do not."""
    return name not in ("device", "dtype") and value.kind not in ("module", "ddp", "parameter", "tensor", "function")


@rule_check("reentrant-checkpoint")
def reentrant_checkpoint(trace: Trace) -> Iterator[Found]:
    wraps = list(trace.of("wrap"))
    if not wraps or any(wrap.arguments.get("static_graph", NONE).default is True for wrap in wraps):
        return
    for event in trace.of("checkpoint"):
        if event.arguments.get("use_reentrant", NONE).only is True:
            yield Found(event, "reentrant checkpointing runs a backward of its own inside DDP's")
            return
