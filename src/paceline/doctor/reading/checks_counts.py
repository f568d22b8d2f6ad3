"""Rules about how much each rank does: batches, steps, samples that are counted, workers and threads."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from paceline.doctor.reading.evidence import (
    Found,
    dealt_out,
    instead,
    is_distributed_sampler,
    local,
    making,
    rule_check,
    samplers_of,
    synchronising,
    trained_loaders,
)
from paceline.doctor.reading.trace import Event, Loop, Trace, loaders_in
from paceline.doctor.reading.values import NONE, UNKNOWN, Value

__all__: list[str] = []


@rule_check("uneven-inputs")
def uneven_inputs(trace: Trace) -> Iterator[Found]:
    seen: set[int] = set()
    for event in synchronising(trace):
        if event.in_context("join") or (event.role != "collective" and dealt_out(trace, event)):
            continue
        for loop in event.loops:
            how_often = _rounds(loop) or (None if _told_lengths(trace, event) else _rounds_of_pieces(loop))
            if loop.number in seen or how_often is None:
                continue
            seen.add(loop.number)
            yield Found(
                event,
                f"ranks go round this loop differently often: {how_often}",
                evidence=f"of 2 ranks; {event.source} at line {event.line} waits for all",
                at=loop,
            )


def _rounds(loop: Loop) -> str | None:
    """How often ranks go round it, if that is known and not the same."""
    known = loop.count.known if loop.count is not None else None
    uneven = known is not None and known.loop is None and len(set(known.points)) > 1
    return f"{' and '.join(str(point) for point in known.points)} times" if known is not None and uneven else None


def _rounds_of_pieces(loop: Loop) -> str | None:
    """As that, where each rank goes through the pieces of its own samples: the words of its documents."""
    count = loop.count
    ragged = count is not None and count.known is None and {"own-size", "data"} <= count.labels
    return "as often as its own samples have pieces" if ragged else None


def _told_lengths(trace: Trace, event: Event) -> bool:
    """Whether ranks have told each other before how much they hold."""
    sent = [v for e in trace.of("collective") if e.number < event.number for v in e.arguments.values()]
    return any(value.labels & {"size", "own-size"} for value in sent)


@rule_check("rank-local-skip")
def rank_local_skip(trace: Trace) -> Iterator[Found]:
    if not trace.any("wrap", "collective"):
        return
    leaves = {id(condition.value) for event in trace.of("break", "return", "exit") for condition in event.under}
    steps = [event for event in trace.of("backward", "step", "forward") if event.loops and _is_step(event)]
    done: set[int] = set()
    for event in steps:
        for condition in event.under:
            if not local(condition) or id(condition.value) in leaves or condition.line in done:
                continue
            if instead(event, condition, trace):
                continue
            done.add(condition.line)
            yield Found(
                event,
                "whether this rank takes the step depends on what only it sees",
                evidence=f"{event.source} at line {event.line} is under the condition of line {condition.line}",
                at=condition,
            )
    yield from _skipped_after_an_exception(trace)


def _is_step(event: Event) -> bool:
    return event.role != "forward" or (event.subject.kind == "ddp" and event.with_grad)


def _skipped_after_an_exception(trace: Trace) -> Iterator[Found]:
    for event in trace.of("continue") if trace.any("wrap") else ():
        loop = event.loops[-1] if event.loops else None
        steps = [backward for backward in trace.of("backward") if loop in backward.loops]
        outside = {(id(c.value), c.holds) for backward in steps for c in backward.under}  # around the loop, or the step
        deciding = [c for c in event.under if (id(c.value), c.holds) not in outside]
        if steps and any("exception" in condition.value.labels for condition in deciding):
            yield Found(event, "a rank that meets an error here skips the step, and the others do not")


@rule_check("eval-padded-duplicates")
def eval_padded_duplicates(trace: Trace) -> Iterator[Found]:
    if not trace.any("init"):
        return
    trained = {id(loader) for loader, _ in trained_loaders(trace)}
    evaluates_apart = any(not event.with_grad for event in trace.of("forward"))
    for event in trace.of("iterate"):
        sampler = next(filter(is_distributed_sampler, samplers_of(event.subject)), None)
        if id(event.subject) in trained or sampler is None or sampler.fields.get("drop_last", NONE).default is True:
            continue
        size = sampler.fields.get("dataset", NONE).length
        pads = size is not None and size.only is not UNKNOWN and size.only % 2 == 1
        reduced = any(e.number > event.number for e in trace.of("collective") if e.name.endswith("reduce"))
        if size is None or not pads or not reduced or (event.with_grad and not evaluates_apart):
            continue
        yield Found(
            event,
            f"{size.only} samples over 2 ranks: the sampler repeats some, and the metric counts them twice",
            evidence=f"DistributedSampler made at line {sampler.line} without drop_last",
        )


@rule_check("global-batch-grows")
def global_batch_grows(trace: Trace) -> Iterator[Found]:
    rates = [event.argument("lr") for event in trace.of("optimizer")]
    fixed = [rate is None or (rate.only is not UNKNOWN and "world" not in rate.labels) for rate in rates]
    if not rates or not all(fixed):
        return
    for loader, event in trained_loaders(trace):
        size = loader.fields.get("batch_size")
        made = making(trace, "loader", loader)
        if size is None or not isinstance(size.only, int) or size.only == 1 or "world" in size.labels:
            continue
        meant = made is not None and _is_meant_for_all(made, size.only)
        if meant and any(map(is_distributed_sampler, samplers_of(loader))):
            yield Found(
                event,
                f"each rank takes batches of {size.only}, so 2 ranks take {2 * size.only} for each step, "
                "at the same learning rate",
                evidence=f"batch_size={size.only} at line {loader.line}",
                confidence="possible",
                at=made,
            )


_LARGE = 32
"""A number that is written down for one rank's batch is smaller as a rule: this is advice, and must be rare."""


def _is_meant_for_all(loader: Event, size: int) -> bool:
    """Whether the batch size may be that of one process: a setting by a name that does not say otherwise, or large."""
    call = loader.node
    if not isinstance(call, ast.Call):
        return size >= _LARGE
    given = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "batch_size")]
    names = [part for node in given for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)]
    texts = [(part.id if isinstance(part, ast.Name) else part.attr).lower() for part in names]
    if any(hint in text for text in texts for hint in ("per", "micro", "local", "mini", "device", "rank", "gpu")):
        return False
    return bool(texts) or size >= _LARGE


@rule_check("schedule-length-mismatch")
def schedule_length_mismatch(trace: Trace) -> Iterator[Found]:
    if not trace.any("wrap"):
        return
    sharded = [loader for loader, _ in trained_loaders(trace) if any(map(is_distributed_sampler, samplers_of(loader)))]
    shared_batch = any("world" in loader.fields.get("batch_size", NONE).labels for loader in sharded)
    per_batch = {
        id(event.subject): event
        for event in trace.of("schedule")
        if any(loader in sharded for loop in event.loops for loader in loaders_in(loop.over))
    }
    for event in trace.of("scheduler"):
        length = _length_of_schedule(event)
        if (steps := per_batch.get(id(event.result))) is None or length is None:
            continue
        counts_all = "count-of-dataset" in length.labels and not length.labels & {"count-of-shard", "world"}
        taken, planned = _times(steps), length.default
        if taken is not None and isinstance(planned, int | float):
            too_long = planned > _NEARLY * taken
        else:
            too_long = not shared_batch  # a rank's batch is a share of the whole one: as many steps as alone
        if counts_all and too_long:
            yield Found(
                event, "the schedule counts the whole dataset's batches, of which each rank takes only its share"
            )


_NEARLY = 1.25
"""Schedules are rounded, and left a little before their end; on two ranks the wrong ones are twice too long."""


def _length_of_schedule(event: Event) -> Value | None:
    return event.argument(
        "total_steps", "steps_per_epoch", "T_max", "total_iters", "num_training_steps", "rates", "milestones"
    )


def _times(event: Event) -> int | None:
    """How often it happens, if that is known of each loop around it."""
    counts = [loop.count.default if loop.count is not None else None for loop in event.loops]
    known = [count for count in counts if isinstance(count, int)]
    return math.prod(known) if len(known) == len(counts) and not event.under else None


@rule_check("loader-workers-oversubscribed")
def loader_workers_oversubscribed(trace: Trace) -> Iterator[Found]:
    for event in trace.of("loader") if trace.any("init") else ():
        if _takes_all_cores(event.argument("num_workers")):
            yield Found(event, "each rank starts one loader worker for every core")


@rule_check("threads-oversubscribed")
def threads_oversubscribed(trace: Trace) -> Iterator[Found]:
    for event in trace.of("threads", "environment") if trace.any("init") else ():
        by_variable = event.name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        value = event.argument("threads") or (event.argument("value") if by_variable else None)
        if _takes_all_cores(value):
            yield Found(event, "each rank takes as many threads as there are cores")


def _takes_all_cores(count: Value | None) -> bool:
    return count is not None and "cores" in count.labels and not count.labels & {"world", "devices"}
