"""Objects of the script's own classes: how they come to be, and what they inherit."""

from __future__ import annotations

import ast
from typing import Final

from paceline.doctor.reading.flows import carried, doubted, labels_of
from paceline.doctor.reading.knowledge import METHODS, api
from paceline.doctor.reading.lookup import bound, class_field, method_of
from paceline.doctor.reading.machine import Class
from paceline.doctor.reading.seeds import drawn
from paceline.doctor.reading.values import ORDERS, VARYING, Value, numbered, words
from paceline.doctor.reading.walker import Walker

__all__ = ["call_super", "instantiate", "super_of"]

_KIND_OF_BASE: Final = {
    "torch.nn.Module": "module",
    "torch.utils.data.Dataset": "dataset",
    "torch.utils.data.IterableDataset": "stream",
    "torch.utils.data.DistributedSampler": "sampler",
    "torch.utils.data.Sampler": "sampler",
    "torch.utils.data.BatchSampler": "sampler",
    "torch.utils.data.DataLoader": "loader",
    "torch.nn.parallel.DistributedDataParallel": "ddp",
}
_DICTS: Final = words(
    "builtins.dict collections.OrderedDict collections.UserDict argparse.Namespace types.SimpleNamespace"
)


def instantiate(reader: Walker, cls: Value, arguments: list[Value], keywords: dict[str, Value], node: ast.AST) -> Value:
    kind, base = _kind_of(cls)
    made = Value(kind, name=base or cls.name, code=cls.code, line=getattr(node, "lineno", 0), path=reader.path)
    made.fields["__class__"] = cls
    if kind == "module":
        made.labels = drawn(reader)
    if (method := method_of(made, "__init__")) is not None:
        reader.call(bound(method, made), arguments, keywords, node)
    else:
        _without_init(cls, made, arguments, keywords)
    if kind in ("dataset", "stream", "sampler", "instance"):
        given = [*arguments, *keywords.values()]
        own = [v for name, v in made.fields.items() if name != "__class__"]
        if kind == "instance":
            made.labels |= carried(given) & {"rank", "partly"}
        else:
            labels = _held([*given, *own])
            made.labels |= (labels & (VARYING | {"partly"})) | (_order_of_samples(made, labels) & ORDERS)
    if kind in ("dataset", "sampler") and (method := method_of(made, "__len__")) is not None:
        mark = len(reader.trace.events)
        size = reader.call(bound(method, made), [], {}, node)
        del reader.trace.events[mark:]  # nobody has asked yet
        made.length = size.known if size.known is not None and size.known.loop is None else None
    if kind in ("dataset", "stream"):
        reader.event("dataset", node, name=cls.name, arguments={**numbered(arguments), **keywords}, result=made)
    elif "download" in keywords:
        reader.event("dataset", node, name=cls.name, arguments=keywords, result=made)
    return made


def _without_init(cls: Value, made: Value, arguments: list[Value], keywords: dict[str, Value]) -> None:
    """A dataclass or named tuple, or one whose base is an API: its arguments are its fields."""
    annotated = [
        line.target.id
        for line in cls.code.node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
    if arguments and any(base.name in _DICTS for base in cls.code.bases):
        made.fields.update(arguments[0].fields)
    known = api(made.name)
    parameters = annotated or list(known.parameters if known else ())
    made.fields.update({name: v for name in annotated if (v := class_field(cls, name)) is not None})
    made.fields.update(dict(zip(parameters, arguments, strict=False)))
    made.fields.update({name: value for name, value in keywords.items() if name != "**"})


def super_of(reader: Walker, arguments: list[Value]) -> dict[str, Value]:
    names = reader.frame.scope.names
    owner = arguments[1] if len(arguments) > 1 else next(iter(names.values()), Value())
    home = reader.frame.scope.names.get("__class__")
    return {"owner": owner, "home": arguments[0] if arguments else home or owner.fields.get("__class__", Value())}


def call_super(
    reader: Walker, receiver: Value, name: str, arguments: list[Value], keywords: dict[str, Value], node: ast.AST
) -> Value:
    owner, home = receiver.fields["owner"], receiver.fields["home"]
    for base in home.code.bases if isinstance(home.code, Class) else ():
        found = class_field(base, name) if base.kind == "class" else None
        if found is not None and found.kind == "function":
            return reader.call(bound(found, owner), arguments, keywords, node)
        if base.kind == "api" and name == "__init__" and (known := api(base.name)) is not None:
            owner.fields.update(dict(zip(known.parameters, arguments, strict=False)))
            owner.fields.update(keywords)
    if (known := METHODS.get(owner.kind, {}).get(name)) is not None:
        return reader.known_method(owner, name, known, arguments, keywords, node)
    return Value(labels=carried([*arguments, *keywords.values()]))


def _held(values: list[Value]) -> frozenset[str]:
    """What a data set or sampler is made of. Something unknown that differs between ranks may be settings of any kind;
    a number that is the rank's, or a share, is what deals out."""
    found: frozenset[str] = frozenset()
    for value in values:
        labels = carried((value,))
        sure = value.known is not None or "shard" in labels or value.kind not in ("unknown", "either")
        found |= labels if sure else doubted(labels)
    return found


def _kind_of(cls: Value, depth: int = 12) -> tuple[str, str]:
    """What an object of a class is, and the API that it descends from."""
    for base in cls.code.bases if isinstance(cls.code, Class) and depth else ():
        if base.kind == "api":
            if (kind := _KIND_OF_BASE.get(base.name)) is not None:
                return kind, "" if kind in ("module", "dataset", "stream") else base.name
            known = api(base.name)
            if known is not None and known.makes in ("module", "dataset", "sampler", "optimizer"):
                return known.makes, ""
        elif base.kind == "class" and (found := _kind_of(base, depth - 1))[0] != "instance":
            return found
    return "instance", ""


def _order_of_samples(made: Value, held: frozenset[str]) -> frozenset[str]:
    """What a data set holds where its samples and their number come from. A list of class names, say, or a set of
    extensions, may be in any order."""
    methods = [method_of(made, name) for name in ("__getitem__", "__len__")]
    used = {
        node.attr
        for method in methods
        if method is not None
        for node in ast.walk(method.code.node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    fields = [made.fields[name] for name in used if name in made.fields and "size" not in made.fields[name].labels]
    return labels_of(fields) if fields else held
