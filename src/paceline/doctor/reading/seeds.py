"""Random numbers: who seeds their generators, and whether ranks draw the same."""

from __future__ import annotations

import ast

from paceline.doctor.reading.flows import labels_of
from paceline.doctor.reading.values import NONE, VARYING, Value
from paceline.doctor.reading.walker import Walker

__all__ = ["drawn", "drawn_from", "picks", "seed", "seed_workers", "seeded"]


def seeded(labels: frozenset[str]) -> frozenset[str]:
    """Of the numbers of a generator whose seed is made of that."""
    return frozenset({"rng"} if labels & VARYING else ())


def seed(reader: Walker, name: str, value: Value) -> None:
    labels = seeded(labels_of((value,)) | reader.implied())
    own = {"torch": "torch", "numpy": "numpy", "random": "python"}.get(name.split(".")[0])
    reader.seeds.update(dict.fromkeys([own] if own is not None else reader.seeds, labels))


def drawn(reader: Walker) -> frozenset[str]:
    """Of weights that are drawn now. DDP makes them equal, so that the model itself does not differ."""
    return frozenset({"drawn"}) if reader.seeds.get("torch") else frozenset()


def drawn_from(reader: Walker, keywords: dict[str, Value]) -> frozenset[str]:
    """Of random numbers: by the generator that they are asked from."""
    generator = keywords.get("generator")
    return reader.seeds.get("torch", frozenset()) if generator is None else generator.labels & VARYING


def picks(name: str, labels: frozenset[str]) -> Value | None:
    """What a generator gives that puts what there is into an order, or picks some of it; ``None``: it does neither."""
    if name not in ("sample", "permutation", "choice", "choices", "permuted"):
        return None
    return Value("list" if name == "sample" else "tensor", labels | {"shuffled"})


def seed_workers(reader: Walker, arguments: dict[str, Value]) -> None:
    """What a loader's workers seed their generators with."""
    start = arguments.get("worker_init_fn", NONE)
    if start.kind not in ("function", "partial"):
        return
    mark, seeds = len(reader.trace.events), dict(reader.seeds)
    reader.call(start, [Value(labels=frozenset({"worker"}))], {}, ast.Pass())
    done = [event for event in reader.trace.events[mark:] if event.role == "seed"]
    del reader.trace.events[mark:]
    reader.seeds = seeds
    for event in done:
        reader.event("worker_seed", event.node, name=event.name, arguments=event.arguments).path = event.path
