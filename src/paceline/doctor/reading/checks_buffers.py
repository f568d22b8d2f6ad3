"""Rules about buffers: batch norm's statistics, and what a module counts for itself."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.findings import Finding
from paceline.doctor.reading.evidence import found, modules_in
from paceline.doctor.reading.trace import Event, Trace

__all__ = ["CHECKS"]


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


CHECKS = (batch_norms, syncbn_on_cpu, buffer_overwritten)
