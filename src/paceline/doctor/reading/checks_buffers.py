"""Rules about buffers: batch norm's statistics, and what a module counts for itself."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.reading.evidence import Found, is_weights, modules_in, rule_check
from paceline.doctor.reading.trace import Event, Trace
from paceline.doctor.reading.values import Value

__all__ = ["syncs_buffers"]


@rule_check("batchnorm-unsynced")
def batchnorm_unsynced(trace: Trace) -> Iterator[Found]:
    for wrap in trace.of("wrap"):
        if norms := _own_batch_norms(trace, wrap):
            yield Found(
                wrap,
                "batch norm in this model takes its statistics from one rank's samples",
                evidence=f"{norms[0].name.removeprefix('torch.')} made at line {norms[0].line}",
            )


def _own_batch_norms(trace: Trace, wrap: Event) -> list[Value]:
    """Those of a wrapped model that are not converted to SyncBatchNorm."""
    if trace.any("convert"):
        return []
    return [part for part in modules_in(wrap.argument("module")) if part.name.startswith("torch.nn.BatchNorm")]


@rule_check("buffers-not-synced", by_absence=True)
def buffers_not_synced(trace: Trace) -> Iterator[Found]:
    saved = any(0 not in event.ranks or not event.on_some_ranks for event in trace.of("save"))
    evaluated = saved or any(not event.with_grad for event in trace.of("forward"))  # rank 0's own would be saved anyway
    written = {id(event.subject) for event in trace.of("buffer") if not _is_the_same_on_all(event.argument("value"))}
    by_hand = any(is_weights(event.argument("tensor")) for event in trace.of("collective"))
    for wrap in trace.of("wrap"):
        counted = any(part.kind == "buffer" and id(part) in written for part in modules_in(wrap.argument("module")))
        drifts = counted or bool(_own_batch_norms(trace, wrap))
        if drifts and evaluated and not by_hand and not syncs_buffers(wrap):
            yield Found(
                wrap, "`broadcast_buffers=False`: buffers drift apart, and each rank evaluates or saves its own"
            )


def _is_the_same_on_all(value: Value | None) -> bool:
    """As what was gathered from all ranks is: the queue of keys of contrastive learning."""
    return value is not None and "reduced" in value.labels and not value.varies


def syncs_buffers(wrap: Event) -> bool:
    """Whether DDP makes buffers equal before each forward."""
    switch = wrap.argument("forward_sync_buffers", "broadcast_buffers")
    return switch is None or switch.default is not False


@rule_check("syncbn-on-cpu")
def syncbn_on_cpu(trace: Trace) -> Iterator[Found]:
    backends = {event.arguments["backend"].default for event in trace.of("init") if "backend" in event.arguments}
    if backends != {"gloo"} or trace.any("cuda", "set_device") or _may_move_to_a_gpu(trace):
        return
    made = [event for event in trace.of("module") if event.name == "torch.nn.SyncBatchNorm"]
    for event in [*trace.of("convert"), *made]:
        if not any("cuda" in condition.value.name for condition in event.under):
            yield Found(event, "SyncBatchNorm needs a GPU, and this model stays on the CPU with gloo")


def _may_move_to_a_gpu(trace: Trace) -> bool:
    devices = [device for event in trace.of("place") for device in event.arguments.values()]
    return any("cuda" in str(device.default) or device.kind == "device" or device.labels for device in devices)


@rule_check("rank-local-buffer-overwritten")
def rank_local_buffer_overwritten(trace: Trace) -> Iterator[Found]:
    wraps = list(trace.of("wrap"))
    if not wraps or not all(map(syncs_buffers, wraps)):
        return
    done: set[int] = set()
    for event in trace.of("buffer"):
        value = event.argument("value")
        in_ddp = any(module.kind == "ddp" for module in event.inside)
        if in_ddp and value is not None and value.varies and event.line not in done:
            done.add(event.line)
            yield Found(
                event,
                f"the buffer `{event.name}` gathers this rank's own values, and DDP overwrites it with rank 0's",
            )
