"""Rules about which rank sees which samples."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.findings import Finding
from paceline.doctor.reading.evidence import (
    found,
    local,
    modules_in,
    samplers_of,
    synchronising,
    trained_loaders,
)
from paceline.doctor.reading.objects import loaders_in
from paceline.doctor.reading.trace import Event, Trace
from paceline.doctor.reading.values import NONE, UNKNOWN, VARYING, Value

__all__ = ["CHECKS"]

DISTRIBUTED = "torch.utils.data.DistributedSampler"


def missing_set_epoch(trace: Trace) -> Iterator[Finding]:
    for loader, event in trained_loaders(trace):
        epochs = [loop for loop in event.loops if loop.repeats and loader not in loaders_in(loop.over)]
        sampler = next((s for s in samplers_of(loader) if s.name == DISTRIBUTED), None)
        if not epochs or sampler is None or sampler.fields.get("shuffle", Value()).default is False:
            continue
        if "escaped" in loader.labels | sampler.labels:
            continue
        told = [e for e in trace.of("set_epoch") if sampler in e.subject.each() or e.subject.kind != "sampler"]
        if not told:
            yield found(
                "missing-set-epoch",
                event,
                "this loop goes through the loader once an epoch, and its DistributedSampler is never told which",
                evidence=f"loop at line {epochs[-1].line} repeats it; sampler made at line {sampler.line}",
            )
        elif all(e.loops and (epoch := e.argument("epoch")) is not None and epoch.only is not UNKNOWN for e in told):
            yield found("missing-set-epoch", told[0], "`set_epoch` is given the same epoch each time")


def shuffle_with_sampler(trace: Trace) -> Iterator[Finding]:
    for event in trace.of("loader"):
        sampler = event.argument("sampler")
        if sampler is None or event.arguments.get("shuffle", NONE).only is not True:
            continue
        if sampler.kind == "sampler" or (sampler.options and not any(option.is_none for option in sampler.options)):
            yield found(
                "shuffle-with-sampler",
                event,
                "`shuffle=True` is given together with a sampler: DataLoader refuses both",
                confidence="certain",
            )


def no_distributed_sampler(trace: Trace) -> Iterator[Finding]:
    if not trace.any("wrap"):
        return
    for loader, event in trained_loaders(trace):
        given = [loader.fields.get(name, NONE) for name in ("sampler", "batch_sampler")]
        dataset = loader.fields.get("dataset", NONE)
        if any(not value.is_none for value in given) or "escaped" in loader.labels:
            continue
        shuffled = loader.fields.get("shuffle", NONE).only is True
        if not shuffled and (dataset.of_kind("dataset") is None or dataset.options):
            continue
        if {"rank", "escaped"} & dataset.labels or _shards_itself(trace, loader):
            continue
        yield found(
            "no-distributed-sampler",
            event,
            "each rank trains on the whole dataset: the loader has no sampler that deals it out",
            evidence=f"DataLoader made at line {loader.line} without a sampler",
            line=loader.line or event.line,
        )


def _shards_itself(trace: Trace, loader: Value) -> bool:
    return any(
        "shard" in value.labels or "rank" in value.labels
        for event in trace.of("backward")
        for loop in event.loops
        if loader in loaders_in(loop.over)
        for value in (event.subject,)
    )


def sampler_seed_differs(trace: Trace) -> Iterator[Finding]:
    for event in trace.of("sampler"):
        seed = event.argument("seed")
        if seed is not None and seed.varies and event.arguments.get("shuffle", Value()).default is not False:
            yield found("sampler-seed-differs", event, "this DistributedSampler's seed is not the same on all ranks")


def dataset_order_differs(trace: Trace) -> Iterator[Finding]:
    for event in trace.of("sampler"):
        dataset = event.argument("dataset")
        if dataset is None:
            continue
        labels = dataset.labels
        if dataset.length is not None and len(set(dataset.length.points)) > 1:
            sizes = " and ".join(str(size) for size in dataset.length.points)
            yield found("dataset-order-differs", event, f"ranks hold different numbers of samples: {sizes}")
        elif "shuffled" in labels and "rng" in labels:
            yield found(
                "dataset-order-differs",
                event,
                "the samples were shuffled with a generator that each rank seeds differently",
            )
        elif "hash-order" in labels:
            yield found("dataset-order-differs", event, "the samples come out of a set, whose order differs by process")
        elif "listing" in labels:
            yield found(
                "dataset-order-differs",
                event,
                "the samples are in the order in which the file system lists them",
                severity="advice",
                confidence="possible",
            )


def random_split_differs(trace: Trace) -> Iterator[Finding]:
    if not trace.any("init"):
        return
    for event in trace.of("split"):
        if "drawn-apart" in event.result.labels:
            yield found("random-split-differs", event, "the split is drawn from numbers that differ between ranks")


def iterable_not_sharded(trace: Trace) -> Iterator[Finding]:
    if not trace.any("init"):
        return
    for event in trace.of("iterate"):
        for loader in event.subject.each():
            dataset = loader.fields.get("dataset", NONE).of_kind("stream")
            if dataset is None or dataset.code is None or "escaped" in loader.labels | dataset.labels:
                continue
            batch = next((e.result for e in trace.of("batch") if e.subject is loader), None)
            if batch is not None and not batch.varies and (trace.any("wrap") or trace.any("collective")):
                yield found(
                    "iterable-not-sharded",
                    event,
                    "every rank iterates the whole stream: nothing in its `__iter__` depends on the rank",
                    evidence=f"dataset made at line {dataset.line}",
                )


def stale_epoch_in_workers(trace: Trace) -> Iterator[Finding]:
    for loader in {id(event.subject): event.subject for event in trace.of("iterate")}.values():
        workers = loader.fields.get("num_workers", NONE).default
        if loader.fields.get("persistent_workers", NONE).only is not True or workers in (None, 0):
            continue
        dataset = loader.fields.get("dataset")
        for event in trace.of("store", "dataset_epoch"):
            if dataset is not None and event.subject in dataset.each() and any(loop.repeats for loop in event.loops):
                yield found(
                    "stale-epoch-in-workers",
                    event,
                    "the dataset is told the epoch here, and persistent workers keep their copy of it",
                    evidence=f"persistent_workers=True at line {loader.line}",
                )


def uneven_inputs(trace: Trace) -> Iterator[Finding]:
    seen: set[int] = set()
    for event in synchronising(trace):
        if event.in_context("join"):
            continue
        for loop in event.loops:
            count = loop.count.known if loop.count is not None else None
            if loop.number in seen or count is None or count.loop is not None or len(set(count.points)) < 2:
                continue
            seen.add(loop.number)
            yield found(
                "uneven-inputs",
                event,
                f"ranks go round this loop differently often: {' and '.join(str(p) for p in count.points)} times",
                evidence=f"of 2 ranks; {event.source} at line {event.line} waits for all",
                line=loop.line,
                confidence="certain",
            )


def rank_local_skip(trace: Trace) -> Iterator[Finding]:
    left = {id(condition.value) for event in trace.of("break", "return", "exit") for condition in event.under}
    done: set[int] = set()
    for event in trace.of("backward", "step", "forward"):
        if event.role == "forward" and (event.subject.kind != "ddp" or not event.with_grad):
            continue
        if not event.loops or not (trace.any("wrap") or trace.any("collective")):
            continue
        for condition in event.under:
            if not local(condition) or id(condition.value) in left or condition.line in done:
                continue
            done.add(condition.line)
            yield found(
                "rank-local-skip",
                event,
                "whether this rank takes the step depends on what only it sees",
                evidence=f"{event.source} at line {event.line} is under the condition of line {condition.line}",
                line=condition.line,
            )


def skipped_after_an_exception(trace: Trace) -> Iterator[Finding]:
    for event in trace.of("continue"):
        if not any("exception" in condition.value.labels for condition in event.under):
            continue
        loop = event.loops[-1] if event.loops else None
        if trace.any("wrap") and any(loop in e.loops for e in trace.of("backward")):
            yield found(
                "rank-local-skip", event, "a rank that meets an error here skips the step, and the others do not"
            )


def eval_padded_duplicates(trace: Trace) -> Iterator[Finding]:
    trained = {id(loader) for loader, _ in trained_loaders(trace)}
    for event in trace.of("iterate"):
        loader = event.subject
        sampler = next((s for s in samplers_of(loader) if s.name == DISTRIBUTED), None)
        if id(loader) in trained or sampler is None or sampler.fields.get("drop_last", NONE).default is True:
            continue
        size = sampler.fields.get("dataset", NONE).length
        reduced = any(e.number > event.number for e in trace.of("collective") if e.name.endswith("reduce"))
        if size is None or size.only is UNKNOWN or size.only % 2 == 0 or not (reduced and trace.any("init")):
            continue
        if event.with_grad and not any(e.with_grad is False for e in trace.of("forward")):
            continue
        yield found(
            "eval-padded-duplicates",
            event,
            f"{size.only} samples over 2 ranks: the sampler repeats some, and the metric counts them twice",
            evidence=f"DistributedSampler made at line {sampler.line} without drop_last",
        )


def global_batch_grows(trace: Trace) -> Iterator[Finding]:
    rates = [event.argument("lr") for event in trace.of("optimizer")]
    for loader, event in trained_loaders(trace):
        size = loader.fields.get("batch_size")
        if size is None or not isinstance(size.only, int) or size.only == 1 or "world" in size.labels:
            continue
        plain = all(rate is None or (rate.only is not UNKNOWN and "world" not in rate.labels) for rate in rates)
        if plain and rates and any(s.name == DISTRIBUTED for s in samplers_of(loader)):
            yield found(
                "global-batch-grows",
                event,
                f"each rank takes batches of {size.only}, so 2 ranks take {2 * size.only} for each step, "
                "at the same learning rate",
                evidence=f"batch_size={size.only} at line {loader.line}",
                severity="advice",
                confidence="possible",
                line=loader.line or event.line,
            )


def schedule_length_mismatch(trace: Trace) -> Iterator[Finding]:
    if not trace.any("wrap"):
        return
    sharded = [
        loader for loader, _ in trained_loaders(trace) if any(s.name == DISTRIBUTED for s in samplers_of(loader))
    ]
    per_batch = {
        id(event.subject)
        for event in trace.of("schedule")
        if any(loader in sharded for loop in event.loops for loader in loaders_in(loop.over))
    }
    for event in trace.of("scheduler"):
        if id(event.result) not in per_batch or "count-of-shard" in (labels := _labels(event)):
            continue
        if labels & {"count-of-dataset"} and "world" not in labels:
            yield found(
                "schedule-length-mismatch",
                event,
                "the schedule counts the whole dataset's batches, of which each rank takes only its share",
            )


def _labels(event: Event) -> frozenset[str]:
    names = ("total_steps", "steps_per_epoch", "T_max", "total_iters", "num_training_steps", "rates", "milestones")
    return frozenset(label for name in names if name in event.arguments for label in event.arguments[name].labels)


def workers_oversubscribed(trace: Trace) -> Iterator[Finding]:
    if not trace.any("init"):
        return
    shared = {"world", "devices"}
    for event in trace.of("loader"):
        workers = event.argument("num_workers")
        if workers is not None and "cores" in workers.labels and not shared & workers.labels:
            yield found("loader-workers-oversubscribed", event, "each rank starts one loader worker for every core")
    for event in trace.of("threads"):
        threads = event.argument("threads")
        if threads is not None and "cores" in threads.labels and not shared & threads.labels:
            yield found("threads-oversubscribed", event, "each rank takes as many threads as there are cores")
    for event in trace.of("environment"):
        value = event.argument("value")
        named = event.name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        if named and value is not None and "cores" in value.labels and not shared & value.labels:
            yield found("threads-oversubscribed", event, "each rank takes as many threads as there are cores")


def worker_seed_identical(trace: Trace) -> Iterator[Finding]:
    for event in trace.of("worker_seed"):
        seed = next(iter(event.arguments.values()), NONE)
        if "worker-seed" not in seed.labels and not seed.varies:
            same = "worker" in seed.labels
            yield found(
                "worker-seed-identical",
                event,
                "loader workers are seeded the same on every rank"
                + ("" if same else ", and each worker the same as the next"),
                severity="warning" if same else None,
            )


def rng_identical_across_ranks(trace: Trace) -> Iterator[Finding]:
    seeds = [event for event in trace.of("seed") if event.name in ("torch.manual_seed", "transformers.set_seed")]
    wraps = list(trace.of("wrap"))
    if not wraps or not seeds or any(_differs(event) for event in seeds):
        return
    for wrap in wraps:
        drops = [m for m in modules_in(wrap.arguments.get("module")) if m.name == "torch.nn.Dropout"]
        if any(m.fields.get("p", Value()).default != 0 for m in drops) and trace.any("backward"):
            yield found(
                "rng-identical-across-ranks",
                seeds[-1],
                "all ranks are seeded alike and stay so: dropout drops the same units on each",
                severity="advice",
                confidence="likely",
            )
            return


def _differs(event: Event) -> bool:
    seed = next(iter(event.arguments.values()), NONE)
    return seed.varies or any(condition.value.labels & VARYING for condition in event.under)


CHECKS = (
    missing_set_epoch,
    shuffle_with_sampler,
    no_distributed_sampler,
    sampler_seed_differs,
    dataset_order_differs,
    random_split_differs,
    iterable_not_sharded,
    stale_epoch_in_workers,
    uneven_inputs,
    rank_local_skip,
    skipped_after_an_exception,
    eval_padded_duplicates,
    global_batch_grows,
    schedule_length_mismatch,
    workers_oversubscribed,
    worker_seed_identical,
    rng_identical_across_ranks,
)
