"""Rules about how ranks are started, which device each takes, and how they end."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.findings import Finding
from paceline.doctor.reading.evidence import found
from paceline.doctor.reading.trace import Event, Trace
from paceline.doctor.reading.values import UNKNOWN, Value

__all__ = ["CHECKS"]


def _index(device: Value) -> Value | str | None:
    """Of a CUDA device its index: a value; ``None`` if it has none; ``""`` if it is no CUDA device, or unknown."""
    if device.kind == "device":
        kind, index = device.fields.get("type"), device.fields.get("index")
        if kind is not None and index is not None:
            return index if kind.default == "cuda" else ""
        return _index(kind) if kind is not None else ""
    text = device.default
    if isinstance(text, str) and text.startswith("cuda"):
        return Value("scalar", device.labels, known=None) if ":" in text else None
    if isinstance(text, int) and not isinstance(text, bool):
        return device
    if device.known is not None and any(isinstance(p, str) and p.startswith("cuda:") for p in device.known.points):
        return device
    if device.known is not None and all(isinstance(p, int) for p in device.known.points):
        return device
    return device if device.labels & {"rank", "modulo-devices"} and device.kind != "tensor" else ""


def _named(device: Value | None) -> Iterator[Value]:
    """What a device may be, one by one: ``torch.device("cuda" if available else "cpu")`` is either."""
    for option in device.each() if device is not None else ():
        kind = option.fields.get("type") if option.kind == "device" else None
        for held in kind.each() if kind is not None and kind.options else ():
            yield Value("device", option.labels, fields={**option.fields, "type": held})
        if kind is None or not kind.options:
            yield option


def _devices(trace: Trace) -> Iterator[tuple[Event, Value]]:
    """Wherever a device is named."""
    for event in trace.of("set_device", "cuda", "place"):
        device = event.argument("device")
        for option in _named(device):
            yield event, option
    for event in trace.of("wrap"):
        for part in (event.arguments.get("device_ids", Value()).items or [])[:1]:
            yield event, part


def cuda_device_not_set(trace: Trace) -> Iterator[Finding]:
    if not trace.distributed or trace.any("set_device") or "CUDA_VISIBLE_DEVICES" in _environment(trace):
        return
    for event in trace.of("cuda", "place"):
        if event.subject.of_kind("module", "ddp") is None:
            continue
        device = event.argument("device")
        options = list(_named(device))
        bare = event.role == "cuda" and device is None
        cuda = [option for option in options if _index(option) != ""]
        first = [o for o in cuda if (index := _index(o)) is None or (isinstance(index, Value) and not index.labels)]
        if event.in_context("device"):
            continue
        if bare or (cuda and len(first) == len(cuda)):
            yield found(
                "cuda-device-not-set", event, "this puts every rank's model on the first GPU: no index, no `set_device`"
            )
            return


def _environment(trace: Trace) -> set[str]:
    return {event.name for event in trace.of("environment")}


def wrong_device(trace: Trace) -> Iterator[Finding]:
    if not trace.distributed:
        return
    seen: set[str] = set()
    for event, device in _devices(trace):
        index = _index(device)
        if not isinstance(index, Value):
            continue
        rule = ""
        if "modulo-devices" in index.labels and "local_rank" in index.labels:
            rule, message = "nproc-exceeds-devices", "the modulo puts several ranks on one GPU where there are too few"
        elif "global_rank" in index.labels and not index.labels & {"local_rank", "modulo-devices", "devices"}:
            rule, message = "global-rank-as-device", "the global rank is no GPU's number on the second machine"
        if rule and rule not in seen:
            seen.add(rule)
            yield found(rule, event, message)


def rendezvous_overridden(trace: Trace) -> Iterator[Finding]:
    if trace.any("spawn", "process") or any(name.startswith(("SLURM", "OMPI", "PMI")) for name in trace.variables):
        return
    inits = [event for event in trace.of("init") if not event.spawned]
    for init in inits:
        rank = init.argument("rank")
        launched = rank is None or "environment" in rank.labels
        method = init.argument("init_method")
        if not launched or (method is not None and str(method.default).startswith(("tcp", "file"))):
            continue
        for event in trace.of("environment"):
            if event.name in ("MASTER_ADDR", "MASTER_PORT") and event.number < init.number:
                value = event.argument("value")
                if value is not None and (value.only is not UNKNOWN or value.known is not None):
                    yield found(
                        "rendezvous-overridden",
                        event,
                        f"{event.name} is overwritten, though the launcher already waits at its own address",
                        confidence="likely",
                    )
        return


def world_size_mismatch(trace: Trace) -> Iterator[Finding]:
    for event in trace.of("init"):
        size, rank = event.argument("world_size"), event.argument("rank")
        if event.spawned or size is None or rank is None or "environment" not in rank.labels:
            continue
        gpus = any(part in size.name for part in ("gpu", "device", "proc"))
        if "world" not in size.labels and ("devices" in size.labels or isinstance(size.only, int) or gpus):
            yield found(
                "world-size-mismatch",
                event,
                "the rank comes from the launcher and the world size does not: they need not belong together",
            )


def spawn_under_torchrun(trace: Trace) -> Iterator[Finding]:
    for event in trace.of("spawn"):
        count = event.argument("nprocs")
        if not trace.any("init"):
            continue
        inits = [other for other in trace.of("init") if other.number < event.number and not other.spawned]
        if inits or (count is not None and {"world", "environment"} <= count.labels):
            yield found(
                "spawn-under-torchrun",
                event,
                "every rank of a launcher comes here and starts as many ranks again",
            )
        else:
            yield found(
                "spawn-under-torchrun",
                event,
                "this script starts its ranks itself: under a launcher each of its ranks would do so",
                severity="advice",
                confidence="possible",
                fix="Start it with plain `python`, not with torchrun",
            )


def group_not_destroyed(trace: Trace) -> Iterator[Finding]:
    inits = list(trace.of("init"))
    if inits and not trace.any("destroy") and "torch.distributed.destroy_process_group" not in trace.names:
        yield found(
            "group-not-destroyed",
            inits[-1],
            "this process group is never destroyed",
            severity="advice",
            confidence="certain",
        )


def legacy_data_parallel(trace: Trace) -> Iterator[Finding]:
    if trace.any("wrap"):
        return
    for event in trace.of("legacy"):
        yield found(
            "legacy-data-parallel", event, "`nn.DataParallel` drives all GPUs from one process", confidence="certain"
        )


CHECKS = (
    cuda_device_not_set,
    wrong_device,
    rendezvous_overridden,
    world_size_mismatch,
    spawn_under_torchrun,
    group_not_destroyed,
    legacy_data_parallel,
)
