"""What Python's own functions give, and the standard library's where it matters."""

from __future__ import annotations

import ast
import math
import operator
import os.path
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from paceline.doctor.reading.arithmetic import calculated, named
from paceline.doctor.reading.expressions import order_of
from paceline.doctor.reading.flows import detached, joined, labels_of, part_labels, tested
from paceline.doctor.reading.lookup import bound, method_of
from paceline.doctor.reading.machine import Class
from paceline.doctor.reading.values import FACTORS, NONE, UNKNOWN, VARYING, Known, Value, combined, constant, words
from paceline.doctor.reading.walker import Walker

__all__ = ["builtin"]

_FOLDED: Final[dict[str, Callable[..., Any]]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "divmod": divmod,
    "len": lambda text: len(text) if isinstance(text, str) else UNKNOWN,
    "operator.not_": operator.not_,
    "os.path.join": os.path.join,
    "os.path.dirname": os.path.dirname,
    "os.path.basename": os.path.basename,
    "os.path.abspath": os.path.abspath,
    "os.path.realpath": os.path.abspath,
    "os.path.normpath": os.path.normpath,
    "pathlib.Path": os.path.join,
    "pathlib.PurePath": os.path.join,
}
_OPERATORS: Final = frozenset(f"operator.{name}" for name in dir(operator)) | {"math.fmod", "math.pow"}
_EVEN: Final = "torch.utils.data.DistributedSampler"
"""Deals out as many samples to each rank as to the others."""
_PER_PROCESS: Final = words(
    "time.time time.perf_counter time.monotonic os.getpid datetime.datetime.now uuid.uuid4 socket.gethostname "
    "tempfile.mkdtemp tempfile.TemporaryDirectory tempfile.NamedTemporaryFile tempfile.mkstemp time.strftime"
)
_DEVICES: Final = words("npu xpu mps hpu mlu musa xla hip")
"""Parts of torch that not every build has."""
_EXISTS: Final = words("os.path.exists os.path.lexists os.path.isfile os.path.isdir os.path.ismount os.access")
_LISTING: Final = words("os.listdir os.scandir glob.glob glob.iglob os.walk")
_CORES: Final = words("os.cpu_count multiprocessing.cpu_count torch.multiprocessing.cpu_count psutil.cpu_count")


def builtin(
    reader: Walker, name: str, arguments: list[Value], keywords: dict[str, Value], node: ast.AST
) -> Value | None:
    """``None``: it is no such call."""
    short = "range" if name.endswith(".trange") else name.removeprefix("builtins.")
    labels = detached(labels_of([*arguments, *keywords.values()]))
    if (told := _told_by_name(name, labels)) is not None:
        return told
    if short == "dict" and not arguments:
        return Value("dict", frozenset({"open"}) if "**" in keywords else frozenset(), fields=dict(keywords))
    if not arguments:
        return _without_arguments(short)
    if short in _OPERATORS and len(arguments) == 2 and (calculation := named(short.rpartition(".")[2])) is not None:
        return calculated(calculation, arguments[0], arguments[1])
    if short in _FOLDED and short != "len" and not keywords:
        return _folded(reader, short, arguments, labels, node)
    known = _KNOWN.get(short)
    return known(reader, arguments, keywords, node) if known is not None else None


def _folded(reader: Walker, name: str, arguments: list[Value], labels: frozenset[str], node: ast.AST) -> Value:
    """A function of numbers, texts or paths."""
    first = arguments[0]
    if name == "str" and (text := reader.text_of(first, node)) is not first:
        return text
    if name == "min" and len(arguments) == 1 and first.items:
        arguments = first.items  # `min([a, b])`
    if name == "min" and any(isinstance(limit.default, int) for limit in arguments):
        labels -= {"cores"}  # there may be fewer, but not as many as there are cores
    labels |= first.labels & FACTORS
    known = combined(_FOLDED[name], *(argument.known for argument in arguments))
    if name.startswith(("os.path.", "pathlib.")):
        return Value("path", labels, known=known)
    alone = len(arguments) == 1 or (known is None and name in ("max", "min"))
    return Value("scalar" if known else "unknown", labels, first.name if alone else "", known)


def _without_arguments(name: str) -> Value | None:
    match name:
        case "list" | "tuple":
            return Value("list", items=[], length=Known((0,)))
        case "set":
            return Value("set", items=[], length=Known((0,)))
    return None


def _len(reader: Walker, arguments: list[Value], _: dict[str, Value], node: ast.AST) -> Value:
    value = arguments[0].of_kind("loader", "dataset", "sampler", "list", "tensor") or arguments[0]
    if isinstance(value.code, Class) and (method := method_of(value, "__len__")) is not None:
        size = reader.call(bound(method, value), [], {}, node)
        own = frozenset({"size", f"count-of-{value.kind}"})
        return Value("scalar" if size.known else "unknown", size.labels | own, known=size.known)
    if value.kind == "scalar":
        known = combined(_FOLDED["len"], value.known)
        return Value("scalar" if known else "unknown", value.labels, known=known)
    own = frozenset({"size", "count-of-" + value.kind}) | (value.labels & {"world", "shard"})
    samplers = [value.fields.get(name, NONE).of_kind("sampler") for name in ("sampler", "batch_sampler")]
    if value.kind == "loader":
        own |= {"count-of-shard" if any(samplers) else "count-of-dataset"}
    alike = all(option.length == value.length for option in arguments[0].each() if option.kind == value.kind)
    known = value.length if alike else None
    even = any(sampler is not None and sampler.name == _EVEN for sampler in (value, *samplers))
    if (known is None and not even) or (known is not None and len(set(known.points)) > 1):
        own |= value.labels & {"rank"}
    if value.labels & {"unique", "own-size"} or value.name == "sample":  # one of a batch: they may differ in length
        own |= labels_of((value,)) & (VARYING | {"own-size"})
    return Value("scalar" if known else "unknown", own, known=known)


def _range(reader: Walker, arguments: list[Value], _: dict[str, Value], __: ast.AST) -> Value:
    bounds = [bound.known for bound in arguments[:3]]
    changing = any(bound is None or bound.loop is not None for bound in bounds)
    length = None if changing else combined(lambda *parts: len(range(*parts)), *bounds)
    return Value("range", labels_of(arguments), items=arguments[:3], length=length)


def _enumerate(reader: Walker, arguments: list[Value], keywords: dict[str, Value], _: ast.AST) -> Value:
    over = arguments[0]
    start = keywords.get("start") or (arguments[1] if len(arguments) > 1 else constant(0))
    return Value("enumerate", labels_of((over,)), fields={"of": over}, items=[start], length=over.length)


def _zip(reader: Walker, arguments: list[Value], _: dict[str, Value], __: ast.AST) -> Value:
    return Value("zip", labels_of(arguments), items=arguments, length=arguments[0].length)


def _sorted(reader: Walker, arguments: list[Value], _: dict[str, Value], __: ast.AST) -> Value:
    return _freshened(arguments[0], remove={"listing", "hash-order"})


def _reversed(reader: Walker, arguments: list[Value], _: dict[str, Value], __: ast.AST) -> Value:
    value = _freshened(arguments[0], remove=set())
    value.items = value.items[::-1] if value.items is not None else None
    return value


def _set(reader: Walker, arguments: list[Value], _: dict[str, Value], __: ast.AST) -> Value:
    value = _freshened(arguments[0], remove={"listing", "hash-order", "shuffled"})
    return Value("set", value.labels | {"unique"}, items=value.items)


def _list(reader: Walker, arguments: list[Value], _: dict[str, Value], node: ast.AST) -> Value:
    value = arguments[0]
    if value.kind in ("loader", "lazy", "enumerate", "zip"):
        return Value("list", labels_of((value,)) | {"some"}, items=[reader.element(value, node)], length=value.length)
    if value.items is not None and value.kind != "range":
        return _freshened(value, remove=set())
    return Value("list", labels_of((value,)), length=value.length) if value.kind == "range" else value


def _iter(reader: Walker, arguments: list[Value], _: dict[str, Value], node: ast.AST) -> Value:
    value = arguments[0]
    if (loader := value.of_kind("loader")) is not None:
        reader.event("iterate", node, subject=loader)
    if isinstance(value.code, Class) and (method := method_of(value, "__iter__")) is not None:
        return reader.call(bound(method, value), [], {}, node)
    return value


def _next(reader: Walker, arguments: list[Value], _: dict[str, Value], node: ast.AST) -> Value:
    value = arguments[0]
    if value.kind != "instance":
        mark = len(reader.trace.events)
        element = reader.element(value, node)
        for event in reader.trace.events[mark:]:  # of a generator of the script's that goes through a loader
            event.asked = tuple(reader.loops)
            event.name = "drawn" if event.role == "iterate" else event.name
        return element
    return reader.call_method(value, "__next__", [], {}, node)


def _map(reader: Walker, arguments: list[Value], _: dict[str, Value], node: ast.AST) -> Value:
    given = [reader.element(part, node) for part in arguments[1:]]
    made = reader.call(arguments[0], given, {}, node)
    return Value("list", labels_of([made]) | {"some"}, items=[made])


def _filter(reader: Walker, arguments: list[Value], _: dict[str, Value], __: ast.AST) -> Value:
    return _freshened(arguments[-1], remove=set(), add={"some"})


def _sum(reader: Walker, arguments: list[Value], _: dict[str, Value], node: ast.AST) -> Value:
    inner = reader.element(arguments[0], node)
    return Value("tensor" if inner.kind == "tensor" else "unknown", labels_of((inner, arguments[0])) | {"sum"})


def _type(reader: Walker, arguments: list[Value], _: dict[str, Value], __: ast.AST) -> Value:
    value = arguments[0]
    if value.options:
        return Value()
    if value.kind == "ddp":
        return Value("api", name="torch.nn.parallel.DistributedDataParallel")
    cls = value.fields.get("__class__")
    known = value.kind == "module" and value.name.startswith("torch.nn.")
    return cls if cls is not None else Value("api", name=value.name) if known else Value()


def _isinstance(reader: Walker, arguments: list[Value], _: dict[str, Value], __: ast.AST) -> Value:
    value = arguments[0]
    name = arguments[1].name if len(arguments) > 1 else ""
    if name == "torch.nn.parallel.DistributedDataParallel" and not value.options:
        if value.kind in ("ddp", "module"):
            return constant(value.kind == "ddp")
    elif name == "torch.utils.data.DistributedSampler" and value.kind == "sampler":
        return constant(value.name == name)
    return Value(labels=value.labels & {"config"})


def _hasattr(reader: Walker, arguments: list[Value], _: dict[str, Value], __: ast.AST) -> Value:
    value, name = arguments[0], arguments[1].only if len(arguments) > 1 else UNKNOWN
    if value.kind == "api" and value.name.split(".")[0] == "torch" and isinstance(name, str):
        return constant(True) if name not in _DEVICES else Value()
    if name == "module" and value.kind in ("ddp", "module") and "module" not in value.fields:
        return constant(value.kind == "ddp")
    if name == "module" and value.kind == "ddp":
        return constant(True)
    if name == "set_epoch" and value.kind == "sampler":
        return constant(value.name == "torch.utils.data.DistributedSampler")
    return Value()


def _getattr(reader: Walker, arguments: list[Value], _: dict[str, Value], node: ast.AST) -> Value:
    value, name = arguments[0], arguments[1].only if len(arguments) > 1 else UNKNOWN
    if isinstance(name, str):
        if len(arguments) > 2 and value.kind not in ("instance", "module", "ddp", "api", "python_module"):
            return joined([reader.attribute(value, name, node), arguments[2]])
        if len(arguments) > 2 and value.kind == "module" and name == "module":
            return arguments[2]
        return reader.attribute(value, name, node)
    for field in value.fields:
        reader.on_read(value, field, sure=False)
    return Value(labels=part_labels(value))


def _setattr(reader: Walker, arguments: list[Value], _: dict[str, Value], __: ast.AST) -> Value:
    if len(arguments) == 3 and isinstance(name := arguments[1].only, str):
        reader.write(arguments[0].fields, name, arguments[2])
    return NONE


def _vars(reader: Walker, arguments: list[Value], _: dict[str, Value], __: ast.AST) -> Value:
    value = arguments[0]
    return Value("dict", part_labels(value) | {"open"}, fields=value.fields)


def _defaultdict(reader: Walker, arguments: list[Value], keywords: dict[str, Value], node: ast.AST) -> Value:
    first = reader.call(arguments[0], [], {}, node) if not arguments[0].is_none else Value()
    return Value("dict", frozenset({"open"}), fields={"*": first, **keywords})


def _replace(reader: Walker, arguments: list[Value], keywords: dict[str, Value], _: ast.AST) -> Value:
    value = arguments[0]
    return replace(value, fields={**value.fields, **keywords})


def _print(reader: Walker, arguments: list[Value], keywords: dict[str, Value], node: ast.AST) -> Value:
    for argument in arguments:
        reader.text_of(argument, node)
    return NONE


def _dict(reader: Walker, arguments: list[Value], keywords: dict[str, Value], _: ast.AST) -> Value:
    value = arguments[0]
    own = frozenset() if value.kind == "dict" and "open" not in value.labels else frozenset({"open"})
    return Value("dict", part_labels(value) | own, fields={**value.fields, **keywords})


def _any(reader: Walker, arguments: list[Value], _: dict[str, Value], node: ast.AST) -> Value:
    return Value("unknown", tested([reader.element(arguments[0], node)]))


def _islice(reader: Walker, arguments: list[Value], _: dict[str, Value], __: ast.AST) -> Value:
    value = arguments[0]
    bounds = [a.known for a in arguments[1:]]
    length = combined(lambda size, *b: len(range(*slice(*b).indices(size))), value.length, *bounds)
    return Value(
        value.kind if value.kind in ("list", "loader", "lazy") else "unknown",
        labels_of(arguments),
        value.name,
        fields=value.fields,
        items=value.items,
        code=value.code,
        length=length,
    )


def _cycle(reader: Walker, arguments: list[Value], _: dict[str, Value], node: ast.AST) -> Value:
    return _iter(reader, arguments, {}, node)


_KNOWN: Final[dict[str, Callable[[Walker, list[Value], dict[str, Value], ast.AST], Value]]] = {
    "len": _len,
    "range": _range,
    "enumerate": _enumerate,
    "zip": _zip,
    "sorted": _sorted,
    "reversed": _reversed,
    "set": _set,
    "list": _list,
    "iter": _iter,
    "next": _next,
    "map": _map,
    "filter": _filter,
    "sum": _sum,
    "type": _type,
    "isinstance": _isinstance,
    "hasattr": _hasattr,
    "getattr": _getattr,
    "setattr": _setattr,
    "vars": _vars,
    "collections.defaultdict": _defaultdict,
    "dataclasses.replace": _replace,
    "print": _print,
    "dict": _dict,
    "any": _any,
    "itertools.islice": _islice,
    "itertools.cycle": _cycle,
    "frozenset": _set,
    "tuple": _list,
    "all": _any,
}
"""By name, what gives the result of a call that has arguments."""


def _freshened(value: Value, *, remove: set[str], add: set[str] | None = None) -> Value:
    """A list of the same elements."""
    own = value.labels & {"some"} | order_of(value) | (add or set())
    labels = (labels_of((value,)) | own) - remove
    items = value.items
    if items is not None and remove:
        items = [
            Value(i.kind, i.labels - remove, i.name, i.known, i.fields, i.items, code=i.code)
            if i.labels & remove
            else i
            for i in items
        ]
    kind = "list" if value.kind in ("range", "unknown", "zip", "enumerate", "set") else value.kind
    return Value(
        kind,
        labels,
        value.name,
        fields=value.fields,
        items=items if value.kind != "range" else None,
        code=value.code,
        length=value.length,
    )


def _told_by_name(name: str, labels: frozenset[str]) -> Value | None:
    """What the machine tells about itself."""
    if name in _PER_PROCESS:
        return Value("unknown", labels | {"clock"})
    if name in _EXISTS:
        return Value("unknown", labels | {"exists"})
    if name in _CORES:
        return Value("unknown", frozenset({"cores"}))
    if name in _LISTING:
        return Value("list", labels | {"listing", "some"}, items=[Value("path", labels | {"listing"})])
    if name == "tempfile.gettempdir":
        return Value("path", frozenset({"own-disk"}))
    if name == "os.getcwd":
        return Value("path", known=Known((str(Path.cwd()),)))
    return None
