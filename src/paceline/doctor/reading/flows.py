"""How what is known of values goes over into what is made of them: labels by their nature, and what a choice leaves
open.

`labels_of`, `tested`, `carried` and `part_labels` are the ways by which labels go from one value to another; `joined`
and `picked` make one value of several that it may be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from paceline.doctor.reading.values import (
    FACTORS,
    MAX_ITEMS,
    NATURES,
    ORDERS,
    RANKS,
    TRUE,
    VARYING,
    Known,
    Value,
    combined,
    words,
)

__all__ = [
    "bounded",
    "carried",
    "detached",
    "doubted",
    "joined",
    "labelled",
    "labels_of",
    "part_labels",
    "picked",
    "tested",
]

_STAYS: Final = FACTORS | frozenset(NATURES["own"])
_GRAPH: Final = frozenset(NATURES["graph"])
_WEIGHTING: Final = frozenset(NATURES["weighting"])

_OBJECTS: Final = TRUE | words("api dataset stream list tuple dict parameters state_dict lazy partial")
_OF_PARTS: Final = TRUE - {"device", "generator", "function"} | {"api", "dict", "dataset", "stream"}
"""Objects that hold all sorts of things, of which each may differ between ranks or not."""
_OF_ONE_PIECE: Final = words(
    "scalar tensor loaded batch parameter grad buffer path device generator size list tuple set bound slice"
)
"""What is the same everywhere, or nowhere."""


def labels_of(values: Iterable[Value], depth: int = 4) -> frozenset[str]:
    """What goes over into a tensor or number that is computed of these, and of what lists and dicts among them hold."""
    found: set[str] = set()
    seen: set[int] = set()
    level = list(values)
    kept: frozenset[str] = frozenset()
    while level and depth >= 0:
        inner: list[Value] = []
        for value in level:
            found |= value.labels - kept
            if (value.kind in ("list", "tuple", "dict") or value.options) and id(value) not in seen:
                seen.add(id(value))
                held = value.fields.values() if value.kind == "dict" else ()
                inner += [*(value.items or ()), *value.options, *held][:64]
        level, depth, kept = inner, depth - 1, ORDERS
    return frozenset(found) - _STAYS


def detached(labels: frozenset[str]) -> frozenset[str]:
    """Of something without a gradient: no backward goes from there to any forward."""
    return frozenset(label for label in labels if label not in _GRAPH and not label.startswith(("forward:", "part:")))


def tested(values: Iterable[Value]) -> frozenset[str]:
    """What goes over into a truth or a text that is made of these."""
    return detached(labels_of(values)) - _WEIGHTING - {"gradient"}


def carried(values: Iterable[Value]) -> frozenset[str]:
    """What goes over into the result of a call of which nothing is known. A number or tensor makes it what it is; of an
    object it may have taken this part or that."""
    found: frozenset[str] = frozenset()
    for value in values:
        if value.kind in _OF_PARTS:
            held = [part for name, part in value.fields.items() if name != "__class__"]
            found |= doubted(labels_of([value, *held[:64]])) | (value.labels & {"escaped"})
        else:
            found |= labels_of((value,))
    return found


def part_labels(value: Value) -> frozenset[str]:
    """What an attribute or element that is not known is made of: of a tensor, all that it is made of; but of an object
    of which some part differs between ranks nobody knows whether it is this one."""
    labels = labels_of((value,))
    if value.kind in _OF_PARTS:
        return doubted(labels)
    return labels if value.kind in _OF_ONE_PIECE else doubted(labels, VARYING - {"data"})


def doubted(labels: frozenset[str], which: frozenset[str] = VARYING) -> frozenset[str]:
    """Of something with parts, of which some have these labels."""
    return labels - which | {"partly"} if labels & which else labels


def labelled(value: Value, labels: frozenset[str]) -> Value:
    """It, with more labels; the object itself, if it has them already or is one that has an identity."""
    if labels <= value.labels or value.kind in ("module", "ddp", "loader", "sampler", "either", "function"):
        return value
    items = value.items
    if value.kind == "tuple" and items is not None:  # as a rule it is taken apart at once
        items = [labelled(item, labels) for item in items]
    return Value(value.kind, value.labels | labels, value.name, value.known, value.fields, items, length=value.length)


# --- choices


def joined(values: Iterable[Value], labels: Iterable[str] = ()) -> Value:
    """One of these values, nothing says which; ``labels`` is what it depends on which."""
    options = list({id(option): option for value in values for option in value.options or (value,)}.values())
    if not options:
        return Value(labels=frozenset(labels))
    extra = frozenset(labels)
    if len(options) == 1:
        return options[0]
    first = options[0]
    made_of = labels_of(options) | (frozenset.intersection(*(option.labels for option in options)) & FACTORS)
    if first.known is not None and all(option.known == first.known for option in options):
        return Value("scalar", made_of, known=first.known)
    if made_of & VARYING and not any("own-size" in option.labels and option.varies for option in options):
        made_of -= {"own-size"}  # of the one it is how many there are, of the other which
    all_labels = made_of | extra
    test = {"test": Value(labels=extra)}
    texts = all(isinstance(option.only, str) for option in options)
    if texts or any(option.kind in _OBJECTS for option in options):
        return Value("either", all_labels, options=tuple(options[:6]), fields=test)
    kinds = {option.kind for option in options if not option.is_none}
    kind = kinds.pop() if len(kinds) == 1 else "unknown"
    fields = {name: child for option in reversed(options) for name, child in option.fields.items()}
    if any(option.is_none for option in options):
        fields |= test  # `is None` asks for it
    return Value("unknown" if kind == "scalar" else kind, all_labels, fields=fields)


def picked(choice: Value, true: Value, false: Value, depth: int = 4) -> Value:
    """``true`` on ranks where ``choice`` is true, ``false`` on the others."""
    if true is false:
        return true
    truths = [choice.truth(rank) for rank in range(RANKS)]
    if (
        depth
        and true.items
        and false.items
        and true.kind == false.kind == "tuple"
        and len(true.items) == len(false.items)
    ):
        pairs = zip(true.items, false.items, strict=True)
        return Value("tuple", items=[picked(choice, one, other, depth - 1) for one, other in pairs], length=true.length)
    loopless = all(value.known is not None and value.known.loop is None for value in (true, false))
    if loopless and None not in truths and true.known and false.known:
        points = tuple((true if truth else false).known.at(rank) for rank, truth in enumerate(truths))  # type: ignore[union-attr]
        assumed = choice.known is not None and choice.known.assumed
        labels = labels_of((true, false, choice)) | (true.labels & false.labels & FACTORS)
        return Value("scalar", labels, known=Known(points, None, assumed))
    known = None
    if choice.known is not None and choice.known.loop is not None:
        known = combined(lambda c, a, b: a if c else b, choice.known, true.known, false.known)
    agreed = {"reduced"} <= true.labels & false.labels
    either = joined((true, false), () if agreed else choice.labels)
    if either is not true and either is not false:
        either.fields = {**either.fields, "test": choice, "if": true, "else": false}
    length = None
    if true.length and false.length and None not in truths:
        length = Known(tuple((true if t else false).length.at(r) for r, t in enumerate(truths)))  # type: ignore[union-attr]
    if (known or length) and not either.options and either is not true and either is not false:
        either.known, either.length = known, length
        if known is not None:
            either.kind = "scalar"
    return either


def bounded(items: list[Value]) -> tuple[list[Value], bool]:
    """As many of these as are told apart, and whether these are all."""
    return items[:MAX_ITEMS], len(items) <= MAX_ITEMS
