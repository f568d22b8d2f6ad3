"""Rules about checkpoints and downloads: who writes a file, and who reads it when."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.reading.evidence import Found, is_weights, on_all_ranks, rule_check, wrapped
from paceline.doctor.reading.trace import Condition, Event, Trace
from paceline.doctor.reading.values import NONE, RANKS, Value

__all__: list[str] = []


def _path(event: Event) -> Value:
    return event.argument("f", "file", "filename", "path") or Value()


def _same_path(one: Value, other: Value) -> bool:
    """Whether two values surely name one file."""
    return one is other or (isinstance(one.only, str) and one.only == other.only)


# --- saving


@rule_check("save-on-all-ranks")
def save_on_all_ranks(trace: Trace) -> Iterator[Found]:
    for event in _saves(trace):
        in_turn = _locks(trace) or _after_a_barrier_of_some(trace, event)
        guarded = _under_a_lock(event) or (_if_not_there(event) and in_turn)
        if on_all_ranks(event) and not guarded:
            yield Found(
                event,
                "every rank writes this file, all at once",
                severity="advice" if _is_the_same_small_thing(event) else None,
            )


def _is_the_same_small_thing(event: Event) -> bool:
    """Whether it is no checkpoint, and the same on every rank: options, a vocabulary."""
    held = [value for name, value in event.arguments.items() if name not in ("file", "f")]
    return event.name.startswith(("pickle.", "json.", "numpy.")) and not any(value.may_vary for value in held)


@rule_check("save-on-local-rank0")
def save_on_local_rank0(trace: Trace) -> Iterator[Found]:
    for event in _saves(trace):
        deciding = [condition.value for condition in event.under if "rank" in condition.value.labels]
        if _if_not_there(event) or "own-disk" in _path(event).labels:
            continue  # each machine prepares its own copy of the data
        local = any("local_rank" in value.labels for value in deciding)
        if local and not event.spawned and not any("global_rank" in value.labels for value in deciding):
            yield Found(event, "the local rank decides who saves: on several machines, one of each")


def _saves(trace: Trace) -> Iterator[Event]:
    """Those to a path that is the same on all ranks."""
    for event in trace.of("save") if trace.distributed else ():
        path = _path(event)
        if any("exception" in condition.value.labels for condition in event.under):
            continue
        if not path.may_vary and not path.name.startswith(("io.", "tempfile.")):
            yield event


def _if_not_there(event: Event) -> bool:
    """Whether it is done only where a file is missing: under ``not exists(...)``, or behind a return if it is there."""
    return any("exists" in c.value.labels and c.holds is (c.value.name == "not") for c in event.under)


def _under_a_lock(event: Event) -> bool:
    return any("lock" in option.name.lower() for context in event.within for option in context.each())


def _locks(trace: Trace) -> bool:
    """Whether the script locks files, somewhere."""
    return any(name.startswith(("fcntl.", "filelock.", "portalocker.", "fasteners.")) for name in trace.names)


def _after_a_barrier_of_some(trace: Trace, event: Event) -> bool:
    """Whether some ranks wait before, for one that goes first."""
    barriers = (e for e in trace.of("collective") if e.name.endswith("barrier"))
    return any(e.number < event.number and e.on_some_ranks for e in barriers)


@rule_check("module-prefix-checkpoint")
def module_prefix_checkpoint(trace: Trace) -> Iterator[Found]:
    """Keys of a wrapped model, given to a plain one."""
    if any("consume_prefix" in name for name in trace.names):
        return
    loads = [event for event in trace.of("load_state") if event.subject.of_kind("module", "ddp") is not None]
    plain = [load for load in loads if load.subject.kind == "module" and _is_strict(load)]
    for event in trace.of("save"):
        if not _holds_wrapped_keys(event.argument("obj", "tensors")):
            continue
        same = [load for load in plain if _loaded_from(load, _path(event))]
        if same:
            yield Found(
                event,
                f"these keys start with `module.`, and line {same[0].line} loads them into a plain model",
            )
        elif not any(load.subject.of_kind("ddp") is not None for load in loads):
            yield Found(
                event,
                "these keys start with `module.`, which a plain model does not load",
                severity="advice",
                confidence="possible",
            )


def _is_strict(load: Event) -> bool:
    return load.arguments.get("strict", NONE).only is not False


def _holds_wrapped_keys(saved: Value | None) -> bool:
    held = [
        option for value in ([saved, *saved.fields.values()] if saved is not None else []) for option in value.each()
    ]
    states = [value for value in held if value.kind == "state_dict"]
    return any((owner := state.fields.get("owner")) is not None and owner.kind == "ddp" for state in states)


def _loaded(load: Event) -> list[Value]:
    """What `torch.load` gave, of what a model is given."""
    state = load.argument("state_dict")
    return [option for option in state.each() if option.kind == "loaded"] if state is not None else []


def _loaded_from(load: Event, path: Value) -> bool:
    return any(_same_path(option.fields.get("f", Value()), path) for option in _loaded(load))


# --- loading


@rule_check("load-without-map-location")
def load_without_map_location(trace: Trace) -> Iterator[Found]:
    if not trace.distributed or not (trace.uses_cuda or "torch.cuda.is_available" in trace.names):
        return
    states = [option.fields for load in trace.of("load_state") for option in _loaded(load)]
    for event in trace.of("load"):
        if _was_never_saved(trace, event):
            continue  # weights from elsewhere: they were saved from a CPU, as a rule
        if event.arguments.keys() & {"map_location", "**"} or len(event.ranks) < RANKS:
            continue
        is_state = any(event.result.fields is fields for fields in states)
        yield Found(
            event,
            "tensors are loaded to the device that they were saved from",
            severity=None if is_state else "advice",
            confidence="likely" if is_state else "possible",
        )


def _was_never_saved(trace: Trace, load: Event) -> bool:
    """Whether it loads a file of a name that the script, as far as it can be read, never gives to what it saves."""
    name, saved = _path(load).only, [_path(save).default for save in trace.of("save")]
    return isinstance(name, str) and bool(saved) and all(isinstance(path, str) and path != name for path in saved)


@rule_check("load-without-barrier", by_absence=True)
def load_without_barrier(trace: Trace) -> Iterator[Found]:
    for save in trace.of("save"):
        if not save.on_some_ranks:
            continue
        for load in trace.of("load"):
            if load.number < save.number or load.ranks <= save.ranks or not _same_path(_path(save), _path(load)):
                continue
            if not any(len(met.ranks) == RANKS for met in trace.between(save, load, "collective", "wrap")):
                yield Found(
                    load,
                    f"line {save.line} writes this file on one rank, and nothing makes the others wait for it",
                )


@rule_check("resume-on-one-rank", by_absence=True)
def resume_on_one_rank(trace: Trace) -> Iterator[Found]:
    wraps = wrapped(trace)
    for event in trace.of("load_state"):
        subject = event.subject.of_kind("module", "ddp", "optimizer")
        if subject is None or not event.on_some_ranks:
            continue
        wrap = wraps.get(id(subject))
        late = subject.kind in ("ddp", "optimizer") or (wrap is not None and wrap.number < event.number)
        trained = any(backward.number > event.number for backward in trace.of("backward"))
        if late and trained and not _sent_later(trace, event, subject):
            yield Found(event, "only some ranks load this state, after the weights were made equal")


def _sent_later(trace: Trace, event: Event, subject: Value) -> bool:
    """Whether weights are broadcast before the next training step; of an optimizer's state, anything at any time."""
    trained = min(backward.number for backward in trace.of("backward") if backward.number > event.number)
    later = [other for other in trace.of("collective") if other.number > event.number]
    if subject.kind == "optimizer" and any(e.name.endswith(("broadcast", "broadcast_object_list")) for e in later):
        return True
    return any(e.number < trained and e.name.endswith("broadcast") and is_weights(e.argument("tensor")) for e in later)


# --- downloading


@rule_check("download-on-all-ranks")
def download_on_all_ranks(trace: Trace) -> Iterator[Found]:
    for event in trace.of("dataset", "download") if trace.distributed else ():
        wants = event.role == "download" or event.arguments.get("download", NONE).only is True
        if not wants or not on_all_ranks(event) or _to_its_own_place(event) or _under_a_lock(event):
            continue
        if event.role == "download" and not all(map(_is_usual, event.under)):
            continue
        met = any(e.number < event.number and e.name.endswith("barrier") for e in trace.of("collective"))
        if _after_a_barrier_of_some(trace, event) or (met and _fetched_before(trace, event)):
            continue
        yield Found(event, "every rank downloads to the same place at once")


def _is_usual(condition: Condition) -> bool:
    """Whether a helper is meant to download under it: an option says so, or the file is not there yet."""
    value = condition.value
    return value.decided() is not None or not value.labels.isdisjoint({"exists", "config", "listing"})


def _to_its_own_place(event: Event) -> bool:
    return any(value.may_vary for value in event.arguments.values())


def _fetched_before(trace: Trace, event: Event) -> bool:
    return any(e.number < event.number and e.on_some_ranks for e in trace.of("dataset", "download"))
