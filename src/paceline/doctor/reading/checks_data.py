"""Rules about which rank sees which samples, in which order, and what it draws for them."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from paceline.doctor.reading.evidence import (
    Found,
    dealt_out,
    differs,
    is_distributed_sampler,
    making,
    modules_in,
    rule_check,
    samplers_of,
    trained_loaders,
)
from paceline.doctor.reading.flows import labels_of
from paceline.doctor.reading.trace import Event, Trace, loaders_in
from paceline.doctor.reading.values import NONE, UNKNOWN, VARYING, Value, words

__all__: list[str] = []


@rule_check("missing-set-epoch", by_absence=True)
def missing_set_epoch(trace: Trace) -> Iterator[Found]:
    for loader, event in trained_loaders(trace):
        epochs = [loop for loop in event.loops if loop.repeats and loader not in loaders_in(loop.over)]
        sampler = next(filter(is_distributed_sampler, samplers_of(loader)), None)
        if not epochs or sampler is None or _is_told_otherwise(sampler) or "escaped" in loader.labels | sampler.labels:
            continue
        if sampler.fields.get("shuffle", NONE).default is False:
            continue
        told = [e for e in trace.of("set_epoch") if sampler in e.subject.each() or e.subject.kind != "sampler"]
        if not told:
            yield Found(
                event,
                "this loop goes through the loader once an epoch, and its DistributedSampler is never told which",
                evidence=f"loop at line {epochs[-1].line} repeats it; sampler made at line {sampler.line}",
            )
        elif all(_tells_a_constant(event) for event in told):
            yield Found(told[0], "`set_epoch` is given the same epoch each time")


def _is_told_otherwise(sampler: Value) -> bool:
    """Whether its class, of the script's own, has another way to set the epoch: ``with sampler.in_epoch(epoch)``."""
    methods = [m for m in ast.walk(sampler.code.node) if isinstance(m, ast.FunctionDef)] if sampler.code else []
    return any(
        isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and part.attr == "epoch"
        for method in methods
        if method.name not in ("__init__", "set_epoch", "__iter__")
        for part in ast.walk(method)
    )


def _tells_a_constant(event: Event) -> bool:
    epoch = event.argument("epoch")
    return bool(event.loops) and epoch is not None and epoch.only is not UNKNOWN


@rule_check("shuffle-with-sampler")
def shuffle_with_sampler(trace: Trace) -> Iterator[Found]:
    for event in trace.of("loader"):
        sampler = event.argument("sampler")
        if sampler is None or event.arguments.get("shuffle", NONE).only is not True:
            continue
        never_none = bool(sampler.options) and not any(option.is_none for option in sampler.options)
        if sampler.kind == "sampler" or never_none:
            yield Found(
                event,
                "`shuffle=True` is given together with a sampler: DataLoader refuses both",
                confidence="certain",
            )


@rule_check("no-distributed-sampler")
def no_distributed_sampler(trace: Trace) -> Iterator[Found]:
    if not trace.any("wrap"):
        return
    for loader, event in trained_loaders(trace):
        dataset = loader.fields.get("dataset", NONE)
        if "escaped" in loader.labels | dataset.labels or dataset.may_vary or _shards_itself(trace, loader):
            continue
        if event.on_some_ranks or dealt_out(trace, event):  # a teacher, or whatever else one rank trains
            continue
        samplers = [loader.fields[name] for name in ("sampler", "batch_sampler") if name in loader.fields]
        given = [sampler for sampler in samplers if not sampler.is_none]
        drawn = next((batch.arguments for batch in trace.of("batch") if batch.subject is loader), {})
        if all(_draws_from_all(sampler, drawn.values()) for sampler in given) and (
            given or _goes_through_all(loader, dataset)
        ):
            what = "a sampler that draws from all of it" if given else "no sampler"
            yield Found(
                event,
                "each rank trains on the whole dataset: the loader has no sampler that deals it out",
                evidence=f"DataLoader made at line {loader.line} with {what}",
                at=making(trace, "loader", loader),
            )


_OF_THE_WHOLE = ("torch.utils.data.RandomSampler", "torch.utils.data.SequentialSampler")


def _draws_from_all(sampler: Value, drawn: Collection[Value] = ()) -> bool:
    """Whether it surely is one of torch's samplers that know nothing of ranks, or batches of one; or the script's
    own, which has ``drawn`` its indices without asking for the rank."""
    if sampler.kind != "sampler" or "escaped" in sampler.labels or sampler.may_vary:
        return False
    if sampler.code is not None:
        held = [part for name, part in sampler.fields.items() if name != "__class__"]
        return bool(drawn) and all(map(_knows_no_ranks, [*held, *drawn]))
    if sampler.name == "torch.utils.data.BatchSampler":
        return _draws_from_all(sampler.fields.get("sampler", NONE))
    source, generator = sampler.fields.get("data_source", NONE), sampler.fields.get("generator", NONE)
    return sampler.name in _OF_THE_WHOLE and not source.may_vary and not generator.may_vary


def _knows_no_ranks(value: Value) -> bool:
    """Whether it surely is the same on all ranks: numbers, lists and data sets of which it is known what they are made
    of, and nothing that may ask for the rank by itself."""
    made = labels_of((value,))
    if made & (VARYING | {"partly", "escaped", "shard"}) or "sampler" in {part.kind for part in value.each()}:
        return False
    of_a_library = "." in value.name and not value.name.startswith("--")
    return value.kind != "unknown" or (not of_a_library and bool(made or value.name))


def _goes_through_all(loader: Value, dataset: Value) -> bool:
    shuffled = loader.fields.get("shuffle", NONE).only is True
    return shuffled or (dataset.kind in ("dataset", "list") and not dataset.options)


def _shards_itself(trace: Trace, loader: Value) -> bool:
    """Whether what is trained on is this rank's share all the same: its dataset or the loop picks it."""
    return any(
        event.subject.labels & {"shard", "rank"}
        for event in trace.of("backward")
        for loop in event.loops
        if loader in loaders_in(loop.over)
    )


@rule_check("sampler-seed-differs")
def sampler_seed_differs(trace: Trace) -> Iterator[Found]:
    for event in trace.of("sampler"):
        seed = event.argument("seed")
        if seed is not None and differs(seed) and event.arguments.get("shuffle", Value()).default is not False:
            yield Found(event, "this DistributedSampler's seed is not the same on all ranks")


@rule_check("dataset-order-differs")
def dataset_order_differs(trace: Trace) -> Iterator[Found]:
    for event in trace.of("sampler"):
        dataset = event.argument("dataset")
        if dataset is None:
            continue
        labels = dataset.labels
        if _is_drawn_subset(dataset):
            continue
        if dataset.length is not None and len(set(dataset.length.points)) > 1:
            sizes = " and ".join(str(size) for size in dataset.length.points)
            yield Found(event, f"ranks hold different numbers of samples: {sizes}")
        elif "shuffled" in labels and "rng" in labels:
            yield Found(event, "the samples were shuffled with a generator that each rank seeds differently")
        elif "hash-order" in labels:
            yield Found(event, "the samples come out of a set, whose order differs by process")
        elif "listing" in labels:
            yield Found(
                event,
                "the samples are in the order in which the file system lists them",
                severity="advice",
                confidence="possible",
            )


@rule_check("random-split-differs")
def random_split_differs(trace: Trace) -> Iterator[Found]:
    if not trace.any("init"):
        return
    for event in trace.of("split"):
        if "drawn-apart" in event.result.labels:
            yield Found(event, "the split is drawn from numbers that differ between ranks")
    for event in trace.of("sampler"):
        if (dataset := event.argument("dataset")) is not None and _is_drawn_subset(dataset):
            yield Found(
                event,
                "what this goes through is a part of the samples that each rank draws for itself",
                evidence=f"Subset made at line {dataset.line}",
            )


def _is_drawn_subset(dataset: Value) -> bool:
    return dataset.name == "torch.utils.data.Subset" and {"shuffled", "rng"} <= dataset.labels


@rule_check("iterable-not-sharded")
def iterable_not_sharded(trace: Trace) -> Iterator[Found]:
    if not trace.any("init") or not trace.any("wrap", "collective"):
        return
    for event in trace.of("iterate"):
        for loader in event.subject.each():
            stream = loader.fields.get("dataset", NONE).of_kind("stream")
            if stream is None or stream.code is None or "escaped" in loader.labels | stream.labels:
                continue
            batch = next((e.result for e in trace.of("batch") if e.subject is loader), None)
            if batch is not None and not batch.may_vary:
                yield Found(
                    event,
                    "every rank iterates the whole stream: nothing in its `__iter__` depends on the rank",
                    evidence=f"dataset made at line {stream.line}",
                )


@rule_check("stale-epoch-in-workers")
def stale_epoch_in_workers(trace: Trace) -> Iterator[Found]:
    for loader in {id(event.subject): event.subject for event in trace.of("iterate")}.values():
        workers = loader.fields.get("num_workers", NONE).default
        dataset = loader.fields.get("dataset")
        keeps_them = loader.fields.get("persistent_workers", NONE).default is True and workers not in (None, 0)
        if dataset is None or not keeps_them:
            continue
        for event in trace.of("store", "dataset_epoch"):
            if event.subject in dataset.each() and any(loop.repeats for loop in event.loops):
                yield Found(
                    event,
                    "the dataset is told the epoch here, and persistent workers keep their copy of it",
                    evidence=f"persistent_workers=True at line {loader.line}",
                )


@rule_check("worker-seed-identical")
def worker_seed_identical(trace: Trace) -> Iterator[Found]:
    for event in trace.of("worker_seed"):
        seed = next(iter(event.arguments.values()), NONE)
        if "worker-seed" in seed.labels or seed.varies:
            continue
        by_worker = "worker" in seed.labels
        message = "loader workers are seeded the same on every rank"
        yield Found(
            event,
            message if by_worker else f"{message}, and each worker the same as the next",
            severity="warning" if by_worker else None,
        )


@rule_check("rng-identical-across-ranks")
def rng_identical_across_ranks(trace: Trace) -> Iterator[Found]:
    seeds = [event for event in trace.of("seed") if event.name in ("torch.manual_seed", "transformers.set_seed")]
    if not seeds or not trace.any("backward") or any(_seeds_apart(event) for event in seeds):
        return
    models = [wrap.argument("module") for wrap in trace.of("wrap")]
    if any(_drops(module) for model in models for module in modules_in(model)):
        yield Found(seeds[-1], "all ranks are seeded alike and stay so: dropout drops the same units on each")
    elif models and trace.names & _NOISE:
        yield Found(seeds[-1], "all ranks are seeded alike and stay so: the noise in training is the same on each")


_NOISE = words(
    "torch.randn_like torch.rand_like torch.bernoulli torch.nn.functional.dropout torch.nn.functional.gumbel_softmax"
)
"""What is drawn for each batch as a rule; `torch.randn` makes data as well."""


def _drops(module: Value) -> bool:
    return module.name == "torch.nn.Dropout" and module.fields.get("p", Value()).default != 0


def _seeds_apart(event: Event) -> bool:
    seed = next(iter(event.arguments.values()), NONE)
    return seed.varies or any(condition.value.labels & VARYING for condition in event.under)
