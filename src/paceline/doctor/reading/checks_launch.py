"""Rules about how ranks are started, which device each takes, and how they end."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.doctor.reading.evidence import Found, rule_check
from paceline.doctor.reading.trace import Event, Trace
from paceline.doctor.reading.values import Value

__all__: list[str] = []


# --- devices


@dataclass(frozen=True, slots=True)
class _Device:
    """What a value says of a device: whether it is a GPU for all that is known, and which one, if it says so."""

    is_gpu: bool
    index: Value | None = None


_NO_GPU = _Device(is_gpu=False)


def _device(value: Value) -> _Device:
    if "size" in value.labels:  # `x.device`: where another tensor is already
        return _NO_GPU
    if value.kind == "device":
        kind, index = value.fields.get("type"), value.fields.get("index")
        if kind is None or index is None:
            return _device(kind) if kind is not None else _NO_GPU
        return _Device(is_gpu=True, index=index) if kind.default == "cuda" else _NO_GPU
    text = value.default
    if isinstance(text, str) and text.startswith("cuda"):
        return _Device(is_gpu=True, index=Value("scalar", value.labels) if ":" in text else None)
    points = value.known.points if value.known is not None else ()
    is_index = bool(points) and all(isinstance(point, int) and not isinstance(point, bool) for point in points)
    named = any(isinstance(point, str) and point.startswith("cuda:") for point in points)
    of_rank = bool(value.labels & {"rank", "modulo-devices"}) and value.kind != "tensor"
    return _Device(is_gpu=True, index=value) if is_index or named or of_rank else _NO_GPU


def _options(device: Value | None) -> Iterator[Value]:
    """What a device may be, one by one: ``torch.device("cuda" if available else "cpu")`` is either."""
    for option in device.each() if device is not None else ():
        kind = option.fields.get("type") if option.kind == "device" else None
        if kind is None or not kind.options:
            yield option
        else:
            for held in kind.each():
                yield Value("device", option.labels, fields={**option.fields, "type": held})


def _indices(trace: Trace) -> Iterator[tuple[Event, Value]]:
    """Wherever a GPU is named by its number."""
    for event in trace.of("set_device", "cuda", "place"):
        for option in _options(event.argument("device")) if not _casts(event) else ():
            if (index := _device(option).index) is not None:
                yield event, index
    for event in trace.of("wrap"):
        for part in (event.arguments.get("device_ids", Value()).items or [])[:1]:
            if (index := _device(part).index) is not None:
                yield event, index


def _casts(event: Event) -> bool:
    """Of ``x.to(y.dtype)``: another type, and the same place."""
    first = event.node.args[:1] if isinstance(event.node, ast.Call) else []
    return any(isinstance(part, ast.Attribute) and part.attr == "dtype" for part in first)


@rule_check("cuda-device-not-set", by_absence=True)
def cuda_device_not_set(trace: Trace) -> Iterator[Found]:
    chosen = {event.name for event in trace.of("environment")}
    if not trace.any("init") or trace.any("set_device") or "CUDA_VISIBLE_DEVICES" in chosen:
        return  # who sets up the ranks elsewhere may set the device there, too
    models = [event for event in trace.of("cuda", "place") if event.subject.of_kind("module", "ddp") is not None]
    by_rank = {(event.path, event.line) for event in models if _says_which(event.argument("device"))}
    for event in models:
        if event.in_context("device") or (event.path, event.line) in by_rank:
            continue
        device = event.argument("device")
        gpus = [named for option in _options(device) if (named := _device(option)).is_gpu]
        bare = event.role == "cuda" and device is None
        if bare or (gpus and all(gpu.index is None or not gpu.index.labels for gpu in gpus)):
            yield Found(event, "this puts every rank's model on the first GPU: no index, no `set_device`")
            return


def _says_which(device: Value | None) -> bool:
    """Whether the device may be another one for each rank."""
    indices = [_device(option).index for option in _options(device)]
    return any(index is not None and index.labels for index in indices)


@rule_check("nproc-exceeds-devices")
def nproc_exceeds_devices(trace: Trace) -> Iterator[Found]:
    for event, index in _indices(trace) if trace.distributed else ():
        if {"modulo-devices", "local_rank"} <= index.labels:
            message = "the modulo puts several ranks on one GPU where there are too few"
            yield Found(event, message, severity="advice", confidence="possible")
            return


@rule_check("global-rank-as-device")
def global_rank_as_device(trace: Trace) -> Iterator[Found]:
    for event, index in _indices(trace) if trace.distributed else ():
        if "global_rank" in index.labels and not index.labels & {"local_rank", "modulo-devices", "devices"}:
            yield Found(event, "the global rank is no GPU's number on the second machine")
            return


# --- the launcher's variables


@rule_check("rendezvous-overridden")
def rendezvous_overridden(trace: Trace) -> Iterator[Found]:
    other_launcher = any(name.startswith(("SLURM", "OMPI", "PMI")) for name in trace.variables)
    if other_launcher or trace.any("spawn", "process"):
        return
    init = next((event for event in trace.of("init") if not event.spawned and _meets_at_the_launcher(event)), None)
    for event in trace.of("environment") if init is not None else ():
        value = event.argument("value")
        before = init is not None and event.number < init.number
        known = value is not None and value.known is not None
        if event.name in ("MASTER_ADDR", "MASTER_PORT") and before and known:
            yield Found(event, f"{event.name} is overwritten, though the launcher already waits at its own address")


def _meets_at_the_launcher(init: Event) -> bool:
    """Whether a group's ranks find each other through the variables that the launcher sets."""
    rank, method = init.argument("rank"), init.argument("init_method")
    elsewhere = method is not None and str(method.default).startswith(("tcp", "file"))
    return not elsewhere and (rank is None or "environment" in rank.labels)


@rule_check("world-size-mismatch")
def world_size_mismatch(trace: Trace) -> Iterator[Found]:
    for event in trace.of("init"):
        size, rank = event.argument("world_size"), event.argument("rank")
        if event.spawned or size is None or rank is None or "environment" not in rank.labels:
            continue
        own = "devices" in size.labels or isinstance(size.only, int) or _counts_gpus(size.name)
        if own and "world" not in size.labels:
            yield Found(
                event, "the rank comes from the launcher and the world size does not: they need not belong together"
            )


def _counts_gpus(name: str) -> bool:
    return any(part in name for part in ("gpu", "device", "proc"))


@rule_check("spawn-under-torchrun")
def spawn_under_torchrun(trace: Trace) -> Iterator[Found]:
    inits = list(trace.of("init"))
    for event in trace.of("spawn") if inits else ():
        count = event.argument("nprocs")
        was_launched = any(init.number < event.number and not init.spawned for init in inits)
        if was_launched or (count is not None and {"world", "environment"} <= count.labels):
            yield Found(event, "every rank of a launcher comes here and starts as many ranks again")
        else:
            yield Found(
                event,
                "this script starts its ranks itself: under a launcher each of its ranks would do so",
                severity="advice",
                confidence="possible",
                fix="Start it with plain `python`, not with torchrun",
            )


@rule_check("group-not-destroyed", by_absence=True)
def group_not_destroyed(trace: Trace) -> Iterator[Found]:
    inits = list(trace.of("init"))
    if inits and not trace.any("destroy") and "torch.distributed.destroy_process_group" not in trace.names:
        yield Found(inits[-1], "this process group is never destroyed")


@rule_check("legacy-data-parallel")
def legacy_data_parallel(trace: Trace) -> Iterator[Found]:
    for event in trace.of("legacy") if not trace.any("wrap") else ():
        yield Found(event, "`nn.DataParallel` drives all GPUs from one process", confidence="certain")
