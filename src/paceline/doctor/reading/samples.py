"""What loaders, samplers and data sets give, and how many."""

from __future__ import annotations

import ast
import operator

from paceline.doctor.reading.flows import labels_of
from paceline.doctor.reading.lookup import bound, method_of
from paceline.doctor.reading.values import NONE, RANKS, VARYING, Known, Value, combined, numbered
from paceline.doctor.reading.walker import Walker

__all__ = ["batch", "number_of", "split"]


def batch(reader: Walker, loader: Value, node: ast.AST) -> Value:
    """What a loader gives; the same on all ranks if nothing shards or shuffles it differently."""
    dataset = loader.fields.get("dataset", Value())
    given = [loader.fields[name] for name in ("sampler", "batch_sampler") if name in loader.fields]
    samplers = [s for value in given if (s := value.of_kind("sampler", "unknown", "instance")) is not None]
    labels = set(labels_of((dataset,)) & VARYING)
    if _is_sharded(samplers) or "rank" in labels:
        labels |= {"data", "shard"}
    elif samplers or dataset.kind == "unknown":
        labels |= {"data"}
    shuffle = loader.fields.get("shuffle")
    if shuffle is not None and shuffle.default is not False and reader.seeds.get("torch"):
        labels |= {"data"}
    if "shard" not in labels and dataset.kind == "stream":
        labels |= labels_of([_drawn(reader, dataset, "__iter__", [], node)]) & (VARYING | {"shard"})
    labels |= _dataset_labels(reader, dataset, node)
    made = Value("batch", frozenset(labels))
    drawn = [_indices(reader, sampler, node) for sampler in samplers]
    reader.event("batch", node, subject=loader, arguments=numbered(drawn), result=made)
    return made


def _dataset_labels(reader: Walker, dataset: Value, node: ast.AST) -> frozenset[str]:
    """Of what it reads for one sample: a dataset may shard itself."""
    return labels_of([_drawn(reader, dataset, "__getitem__", [Value()], node)]) & {"rank"}


def _indices(reader: Walker, sampler: Value, node: ast.AST) -> Value:
    """What a sampler of the script's own gives; ``escaped`` if something went into it of which nothing is known."""
    before = reader.unknown_calls
    indices = _drawn(reader, sampler, "__iter__", [], node)
    return indices if reader.unknown_calls == before else Value(labels=indices.labels | {"escaped"})


def _drawn(reader: Walker, dataset: Value, name: str, arguments: list[Value], node: ast.AST) -> Value:
    method = method_of(dataset, name)
    if method is None:
        return Value()
    mark = len(reader.trace.events)
    made = reader.call(bound(method, dataset), arguments, {}, node)
    if made.kind == "lazy":
        made = reader.run_lazily(made, node)
    del reader.trace.events[mark:]  # in the loader's workers, not here
    return made


def _is_sharded(samplers: list[Value]) -> bool:
    """Whether one of these gives each rank samples of its own."""
    return any(
        sampler.name == "torch.utils.data.DistributedSampler"
        or "rank" in sampler.labels
        or _is_sharded([inner for inner in sampler.fields.get("sampler", NONE).each() if inner.kind == "sampler"])
        for sampler in samplers
    )


def number_of(name: str, arguments: dict[str, Value], positional: list[Value]) -> Known | None:
    first = positional[0].length if positional else None
    match name:
        case "torch.utils.data.TensorDataset":
            return first
        case "torch.utils.data.Subset":
            return arguments["indices"].length if "indices" in arguments else None
        case "torch.utils.data.DistributedSampler":
            drop = arguments.get("drop_last", NONE).default is True
            return combined(lambda n: n // RANKS if drop else -(-n // RANKS), first)
        case "torch.utils.data.DataLoader":
            if (batches := arguments.get("batch_sampler", NONE).of_kind("sampler")) is not None:
                return batches.length
            sampler = arguments.get("sampler", NONE).of_kind("sampler")
            dataset = arguments.get("dataset", NONE)
            count = sampler.length if sampler is not None else dataset.length
            return _batches(count, arguments)
        case "torch.utils.data.BatchSampler":
            return _batches(first, arguments)
    return first if name.startswith("torch.utils.data.") and "Sampler" in name else None


def _batches(count: Known | None, arguments: dict[str, Value]) -> Known | None:
    size = arguments["batch_size"].known if "batch_size" in arguments else Known((1,))
    drop = arguments.get("drop_last", NONE).default is True
    return combined(lambda n, b: n // operator.index(b) if drop else -(-n // operator.index(b)), count, size)


def split(reader: Walker, name: str, arguments: dict[str, Value]) -> Value:
    source = next(iter(arguments.values()), Value())
    if name.startswith("torch"):
        generator = arguments.get("generator")
        drawn = generator.labels & VARYING if generator else reader.seeds.get("torch", frozenset())
    else:
        state = arguments.get("random_state")
        drawn = state.labels & VARYING if state is not None and not state.is_none else reader.seeds["numpy"]
    labels = labels_of((source,)) & VARYING | drawn | ({"drawn-apart"} if drawn else set())
    sizes = arguments["lengths"].items if "lengths" in arguments else None
    whole = sizes is not None and "some" not in arguments["lengths"].labels
    lengths = [size.known if isinstance(size.only, int) else None for size in sizes or []] if whole else [None]
    parts = [Value("dataset", labels, name, fields={"dataset": source}, length=length) for length in lengths]
    return Value("list", labels if whole else labels | {"some"}, items=parts, length=None)
