"""Rules about files, metrics and output."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.findings import Finding
from paceline.doctor.reading.evidence import found, wrapped
from paceline.doctor.reading.trace import Event, Trace
from paceline.doctor.reading.values import NONE, UNKNOWN, VARYING, Value

__all__ = ["CHECKS"]


def _several(trace: Trace) -> bool:
    return trace.any("init", "wrap")


def _path(event: Event) -> Value:
    return event.argument("f", "file", "filename", "path") or Value()


def same_path(one: Value, other: Value) -> bool:
    """Whether two values surely name one file."""
    if one is other:
        return True
    return one.only is not UNKNOWN and isinstance(one.only, str) and one.only == other.only


def saved(trace: Trace) -> Iterator[Finding]:
    if not _several(trace):
        return
    for event in trace.of("save"):
        path = _path(event)
        if path.labels & VARYING or path.name.startswith(("io.", "tempfile.")):
            continue
        conditions = [c.value for c in event.under if "rank" in c.value.labels]
        if event.ranks == {0, 1} and not conditions:
            yield found("save-on-all-ranks", event, "every rank writes this file, all at once")
        elif conditions and not any("global_rank" in value.labels for value in conditions) and not event.spawned:
            yield found(
                "save-on-local-rank0",
                event,
                "the local rank decides who saves: on several machines, one of each",
            )


def load_without_map_location(trace: Trace) -> Iterator[Finding]:
    if not _several(trace) or not (trace.uses_cuda or "torch.cuda.is_available" in trace.names):
        return
    for event in trace.of("load"):
        if "map_location" not in event.arguments and "**" not in event.arguments and len(event.ranks) == 2:
            yield found(
                "load-without-map-location", event, "tensors are loaded to the device that they were saved from"
            )


def module_prefix(trace: Trace) -> Iterator[Finding]:
    """Keys of a wrapped model, given to a plain one."""
    strips = any("consume_prefix" in name for name in trace.names)
    loads = [event for event in trace.of("load_state") if event.subject.of_kind("module", "ddp") is not None]
    for event in trace.of("save"):
        held = event.argument("obj", "tensors")
        states = [
            option
            for value in ([held, *held.fields.values()] if held is not None else [])
            for option in value.each()
            if option.kind == "state_dict" and (owner := option.fields.get("owner")) is not None and owner.kind == "ddp"
        ]
        if not states or strips:
            continue
        plain = [
            load
            for load in loads
            if load.subject.kind == "module" and load.arguments.get("strict", NONE).only is not False
        ]
        same = [load for load in plain if _loaded_from(load, _path(event))]
        if same:
            yield found(
                "module-prefix-checkpoint",
                event,
                f"these keys start with `module.`, and line {same[0].line} loads them into a plain model",
                confidence="certain",
            )
        elif not any(load.subject.of_kind("ddp") is not None for load in loads):
            yield found(
                "module-prefix-checkpoint",
                event,
                "these keys start with `module.`, which a plain model does not load",
                severity="advice",
                confidence="possible",
            )


def _loaded_from(load: Event, path: Value) -> bool:
    state = load.argument("state_dict")
    return any(
        option.kind == "loaded" and same_path(option.fields.get("f", Value()), path)
        for option in (state.each() if state is not None else ())
    )


def load_without_barrier(trace: Trace) -> Iterator[Finding]:
    for save in trace.of("save"):
        if not save.on_some_ranks:
            continue
        for load in trace.of("load"):
            if load.number < save.number or load.ranks <= save.ranks or not same_path(_path(save), _path(load)):
                continue
            met = [e for e in trace.between(save, load, "collective", "wrap") if e.ranks == {0, 1}]
            if not met:
                yield found(
                    "load-without-barrier",
                    load,
                    f"line {save.line} writes this file on one rank, and nothing makes the others wait for it",
                )


def resume_on_one_rank(trace: Trace) -> Iterator[Finding]:
    wraps = wrapped(trace)
    for event in trace.of("load_state"):
        subject = event.subject.of_kind("module", "ddp", "optimizer")
        if subject is None or not event.on_some_ranks:
            continue
        wrap = wraps.get(id(subject))
        late = subject.kind in ("ddp", "optimizer") or (wrap is not None and wrap.number < event.number)
        sent = any(
            e.number > event.number and e.name.endswith(("broadcast", "broadcast_object_list"))
            for e in trace.of("collective")
        )
        trained = any(e.number > event.number for e in trace.of("backward"))
        if late and trained and not _sent_later(trace, event) and not (sent and subject.kind == "optimizer"):
            yield found(
                "resume-on-one-rank", event, "only some ranks load this state, after the weights were made equal"
            )


def _sent_later(trace: Trace, event: Event) -> bool:
    """Whether weights are broadcast before the next training step."""
    trained = min((e.number for e in trace.of("backward") if e.number > event.number), default=0)
    return any(
        event.number < other.number < trained
        and other.name.endswith("broadcast")
        and (tensor := other.argument("tensor")) is not None
        and (tensor.kind == "parameter" or "owner" in tensor.fields)
        for other in trace.of("collective")
    )


def metric_not_reduced(trace: Trace) -> Iterator[Finding]:
    if not _several(trace):
        return
    seen: set[int] = set()
    for event in trace.of("print", "log"):
        batchwise = any("shard" in loop.over.labels or loop.over.of_kind("loader", "enumerate") for loop in event.loops)
        if batchwise or event.line in seen or event.everywhere:
            continue
        for value in event.arguments.values():
            labels = value.labels
            if {"eval", "shard"} <= labels and "graph" not in labels and value.kind != "batch":
                seen.add(event.line)
                yield found(
                    "metric-not-reduced", event, "what is reported here was measured on one rank's samples only"
                )
                break


def printed(trace: Trace) -> Iterator[Finding]:
    if not _several(trace) or not trace.any("backward"):
        return
    busy = {loop.number for event in trace.of("backward", "step") for loop in event.loops}
    seen: set[int] = set()
    ending = {id(condition.value) for event in trace.of("exit") for condition in event.under[-1:]}
    for event in trace.of("print"):
        told = [value for value in event.arguments.values() if "rank" in value.labels and value.kind == "scalar"]
        if not event.everywhere or event.ranks != {0, 1} or told or event.line in seen or "file" in event.arguments:
            continue
        looped = any(loop.number in busy for loop in event.loops)
        measured = any(value.labels & {"graph", "eval"} for value in event.arguments.values())
        exceptional = any(
            "exception" in condition.value.labels or id(condition.value) in ending for condition in event.under
        )
        if exceptional or not (looped or measured):
            continue
        seen.add(event.line)
        yield found("print-on-all-ranks", event, "every rank prints this", severity=None if looped else "advice")


def tracked(trace: Trace) -> Iterator[Finding]:
    if not _several(trace):
        return
    for event in trace.of("tracker"):
        told = any(value.labels & {"rank", "local_rank"} for value in event.arguments.values())
        if event.everywhere and event.ranks == {0, 1} and not told:
            yield found("tracker-on-all-ranks", event, "every rank starts a tracker run of its own")


def downloaded(trace: Trace) -> Iterator[Finding]:
    if not _several(trace):
        return
    for event in trace.of("dataset", "download"):
        wants = event.arguments.get("download")
        if event.role == "dataset" and (wants is None or wants.only is not True):
            continue
        if not event.everywhere or event.ranks != {0, 1}:
            continue
        guards = [e for e in trace.of("collective") if e.number < event.number and e.name.endswith("barrier")]
        if any(e.on_some_ranks for e in guards) or (guards and _fetched_before(trace, event)):
            continue
        yield found("download-on-all-ranks", event, "every rank downloads to the same place at once")


def _fetched_before(trace: Trace, event: Event) -> bool:
    return any(e.number < event.number and e.on_some_ranks for e in trace.of("dataset", "download"))


CHECKS = (
    saved,
    load_without_map_location,
    module_prefix,
    load_without_barrier,
    resume_on_one_rank,
    metric_not_reduced,
    printed,
    tracked,
    downloaded,
)
