"""Objects: their attributes and elements, and what lists, dicts and strings do."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Iterator
from typing import Final

from paceline.doctor.reading.expressions import Expressions
from paceline.doctor.reading.knowledge import LAUNCHED, METHODS
from paceline.doctor.reading.machine import Class, Function
from paceline.doctor.reading.program import Module
from paceline.doctor.reading.trace import Loop
from paceline.doctor.reading.values import (
    NONE,
    RANKS,
    STEPS,
    UNKNOWN,
    VARYING,
    Known,
    Value,
    combined,
    constant,
    joined,
    labelled,
    labels_of,
    picked,
    words,
)

__all__ = ["Objects", "bound", "loaders_in", "method_of", "submodules"]

_TENSOR_ATTRIBUTES: Final = words("T mT H real imag")
_OF_TEXT: Final = words("strip rstrip lstrip lower upper startswith endswith replace format")
_SIZES: Final = words("shape ndim dtype device itemsize nbytes requires_grad is_cuda")
MAX_UNROLLED: Final = 4


class Objects(Expressions):
    """Attributes, subscripts and iteration."""

    # --- attributes

    def attribute(self, value: Value, name: str, node: ast.AST) -> Value:
        if value.options:
            found = [self.attribute(option, name, node) for option in value.each()]
            return joined(found) if found else Value(labels=value.labels)
        if value.kind == "api":
            return self.named(f"{value.name}.{name}")
        if value.kind == "python_module":
            module: Module = value.code
            if (bound_there := module.names.get(name)) is not None:
                return bound_there
            child = self.program.find(f"{module.name}.{name}")
            return Value("python_module", name=name, code=child) if child is not None else Value()
        if (held := value.fields.get(name)) is not None:
            self.on_read(value, name)
            return held
        if (method := method_of(value, name)) is not None:
            code: Function = method.code
            if code.flavour == "property":
                return self.call(bound(method, value), [], {}, node)
            return method if code.flavour == "static" else bound(method, value)
        if value.kind == "class" and (held := class_field(value, name)) is not None:
            return held
        if value.code is not None and isinstance(value.code, Class) and (held := class_field(value, name)) is not None:
            return held
        if value.kind == "buffer" and name == "data":
            return value
        if value.kind in ("tensor", "parameter", "grad", "buffer"):
            return self._of_tensor(value, name)
        if name in METHODS.get(value.kind, {}):
            return Value("bound", value.labels, name, fields={"self": value})
        own = frozenset() if value.kind in ("module", "ddp") else value.labels - {"open", "some"}
        child_value = Value(labels=own, line=getattr(node, "lineno", 0))
        if name == "loss":
            child_value.labels |= {"mean"}
        if value.kind != "scalar":
            value.fields[name] = child_value  # the same object the next time
        return child_value

    def on_read(self, value: Value, name: str, *, sure: bool = True) -> None:
        """A field of a module was looked at in some forward; ``sure``: in each one, if nothing stands above it."""
        if self.inside and value.kind == "module":
            always = sure and len(self.conditions()) <= self.forward_from
            fields = self.trace.reads.setdefault(self.trace.identity(value), {})
            fields[name] = fields.get(name, False) or always

    def _of_tensor(self, value: Value, name: str) -> Value:
        if name == "grad":
            child = Value("grad", value.labels | {"gradient"}, fields={"of": value})
            value.fields[name] = child
            return child
        if name in _TENSOR_ATTRIBUTES or name == "data":
            return Value(value.kind, value.labels - ({"graph"} if name == "data" else set()), fields=value.fields)
        if name in _SIZES:
            return Value("unknown", (value.labels & {"rank"}) | {"size"}, fields={"of": value})
        child = Value("tensor", value.labels | ({"mean"} if name == "loss" else set()))
        value.fields[name] = child
        return child

    # --- subscripts

    def item(self, value: Value, key: Value, node: ast.AST) -> Value:
        if value.options:
            return joined([self.item(option, key, node) for option in value.each()] or [Value(labels=value.labels)])
        if value.name == "os.environ" and value.kind == "api":
            return self.variable(key, node)
        if value.kind == "loaded":
            return Value("loaded", value.labels, fields=value.fields)
        if value.kind in ("dict", "namespace", "state_dict") and isinstance(name := key.only, str):
            if name not in value.fields:
                default = value.fields.get("*") or Value(labels=value.labels - {"open"})
                value.fields[name] = default
            return value.fields[name]
        if value.kind == "module" and isinstance(key.only, int | str) and str(key.only) in value.fields:
            held = value.fields[str(key.only)]
            self.on_read(value, str(key.only))
            return held
        if value.kind == "module":
            for name in value.fields:
                self.on_read(value, name, sure=False)
            if self.inside:
                self.event("choose", node, subject=value, arguments={"key": key})
            return joined(submodules(value)) if any(True for _ in submodules(value)) else Value("module")
        if key.kind == "slice":
            return self._sliced(value, key)
        if value.items is not None and "some" not in value.labels and key.known is not None:
            index = key.only
            if isinstance(index, int) and -len(value.items) <= index < len(value.items):
                return value.items[index]
            if (known := self._by_index(value, key)) is not None:
                return known
            if (chosen := self._by_rank(value.items, key)) is not None:
                return chosen
        if value.items:
            return labelled(joined(value.items), key.labels)
        labels = labels_of((value, key)) - {"open"}
        if value.kind in ("tensor", "list") and "rank" in key.labels:
            labels |= {"data", "shard"}
        if key.name == "mask":
            labels |= {"own-size"}
        if "size" in value.labels and "of" in value.fields and key.only == 0:
            return Value("scalar", value.labels, known=value.fields["of"].length)
        kind = value.kind if value.kind in ("tensor", "parameter", "batch") else "unknown"
        length = key.length if kind == "tensor" else None
        return Value("tensor" if kind == "batch" else kind, labels, length=length)

    def _by_index(self, value: Value, key: Value) -> Value | None:
        """Of a list whose elements are known exactly, by an index that differs between ranks or iterations."""
        items = value.items or []
        if not all(item.known is not None and len(item.known.points) == 1 for item in items):
            return None
        known = combined(lambda index: items[index].known.points[0], key.known)  # type: ignore[union-attr]
        return Value("scalar", labels_of((value, key)), known=known) if known is not None else None

    def _by_rank(self, items: list[Value], key: Value) -> Value | None:
        """Of a list of anything, by an index that differs between ranks."""
        if key.known is None or key.known.loop is not None:
            return None
        places = [key.known.at(rank) for rank in range(RANKS)]
        if not all(isinstance(place, int) and -len(items) <= place < len(items) for place in places):
            return None
        first = Value("scalar", key.labels | {"data"}, known=Known(tuple(rank == 0 for rank in range(RANKS))))
        return picked(first, items[places[0]], items[places[1]])

    def _sliced(self, value: Value, key: Value) -> Value:
        labels = labels_of((value, key))
        if value.kind in ("tensor", "list") and "rank" in key.labels:
            labels |= {"data", "shard"}
        bounds = [part.known for part in key.items or []]
        length = combined(
            lambda size, start, stop, step: len(range(*slice(start, stop, step).indices(size))), value.length, *bounds
        )
        items = value.items
        if (
            items is not None
            and "some" not in value.labels
            and all(b is not None and b.only is not UNKNOWN for b in bounds)
        ):
            items = items[slice(*(bound.only for bound in bounds if bound is not None))]
        if value.kind == "scalar":
            return Value("scalar", labels)
        kind = value.kind if value.kind in ("list", "tuple", "tensor", "parameter") else "unknown"
        return Value(kind, labels, value.name, items=items, length=length)

    def variable(self, key: Value, node: ast.AST, default: Value | None = None) -> Value:
        """An environment variable."""
        name = key.only
        if isinstance(name, str):
            self.trace.variables.add(name)
        match name:
            case "RANK":
                labels = frozenset({"rank", "global_rank", "environment"})
                return Value("scalar", labels, known=Known(("0", "1")))
            case "LOCAL_RANK":
                labels = frozenset({"rank", "local_rank", "environment"})
                return Value("scalar", labels, known=Known(("0", "1")))
            case "WORLD_SIZE" | "LOCAL_WORLD_SIZE":
                return Value("scalar", frozenset({"world", "environment"}), "world size", Known((str(RANKS),)))
        if isinstance(name, str) and name.startswith(("SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK")):
            return Value(labels=frozenset({"rank"})) if default is None else default
        if isinstance(name, str) and name in LAUNCHED:
            return Value("unknown", name=f"os.environ[{name}]")
        return Value(labels=default.labels if default is not None else frozenset())

    # --- iteration

    def elements(self, value: Value, loop: Loop, node: ast.AST) -> list[Value]:
        """What the loop's variable is, in one iteration that stands for all; in each, for a few constants."""
        if value.options:
            return [joined([element for option in value.each() for element in self.elements(option, loop, node)[:1]])]
        match value.kind:
            case "range":
                return [self.counter(loop, value.items or [], value.labels)]
            case "enumerate":
                counter = self.counter(loop, [constant(0)], frozenset())
                inner = self.elements(value.fields["of"], loop, node)
                return [Value("tuple", items=[counter, element]) for element in inner[:1]]
            case "zip":
                parts = [self.elements(part, loop, node)[0] for part in value.items or []]
                return [Value("tuple", items=parts)]
        if value.items is not None and "some" not in value.labels and 0 < len(value.items) <= MAX_UNROLLED:
            whole = value.length is not None and value.length.only == len(value.items)
            if whole and all(
                item.known is not None or item.kind in ("tuple", "class", "function") for item in value.items
            ):
                return list(value.items)
        return [self.element(value, node)]

    def counter(self, loop: Loop, bounds: list[Value], labels: frozenset[str]) -> Value:
        """A loop's index: counts from its start, over and over."""
        known = [bound.known.only if bound.known is not None else UNKNOWN for bound in bounds]
        start, step = known[0] if len(known) > 1 else 0, known[2] if len(known) > 2 else 1
        if not isinstance(start, int) or not isinstance(step, int):
            return Value("unknown", labels, "counter", line=loop.line)
        count = loop.count.known if loop.count is not None else None
        sizes = [count.at(rank) if count is not None and count.loop is None else UNKNOWN for rank in range(RANKS)]
        rounds = [max(size, 1) if isinstance(size, int) else STEPS for size in sizes]
        points = tuple(start + step * (index % size) for size in rounds for index in range(STEPS))
        return Value("scalar", labels & VARYING & {"clock"}, "counter", Known(points, loop.number), line=loop.line)

    def element(self, value: Value, node: ast.AST) -> Value:
        """Any one of its elements."""
        if value.options:
            return joined([self.element(option, node) for option in value.each()] or [Value(labels=value.labels)])
        match value.kind:
            case "loader":
                return self.batch(value, node)
            case "lazy":
                return self.run_lazily(value, node)
            case "parameters":
                named = value.name.startswith("named_")
                item = Value("parameter", value.labels, fields=dict(value.fields))
                return Value("tuple", items=[Value(), item]) if named else item
            case "buffers":
                return Value("tensor", value.labels, fields=dict(value.fields))
            case "modules":
                return joined(submodules(value.fields["owner"])) if value.fields["owner"].fields else Value("module")
            case "state_dict":
                return Value("parameter", value.labels, fields=dict(value.fields))
            case "module":
                for name in value.fields:
                    self.on_read(value, name)
                return joined(submodules(value))
            case "dict":
                return Value("scalar", value.labels)
            case "enumerate" | "zip" | "range":
                return self.elements(value, Loop(self.number(), 0, value), node)[0]
        if value.items:
            return labelled(joined(value.items), value.labels - {"some", "open"})
        if isinstance(value.code, Class) and (method := method_of(value, "__iter__")) is not None:
            made = self.call(bound(method, value), [], {}, node)
            return self.element(made, node) if made is not value else Value(labels=labels_of((value,)))
        kind = value.kind if value.kind in ("tensor", "batch") else "unknown"
        return Value(kind, labels_of((value,)) - {"open", "some"})

    def loaders(self, over: Value) -> list[Value]:
        return list(loaders_in(over))

    @abstractmethod
    def batch(self, loader: Value, node: ast.AST) -> Value:
        """What a loader gives."""

    @abstractmethod
    def run_lazily(self, value: Value, node: ast.AST) -> Value:
        """What a generator gives."""

    # --- what containers and strings do

    def container_method(
        self, value: Value, name: str, arguments: list[Value], keywords: dict[str, Value]
    ) -> Value | None:
        """Of a list, dict or string; ``None`` if it is no such method."""
        first = arguments[0] if arguments else None
        if value.kind in ("list", "set") and name in ("append", "add", "insert", "extend", "update", "remove", "sort"):
            self._changed(value, name, arguments)
            return NONE
        if value.kind in ("dict", "namespace", "state_dict"):
            return self._of_dict(value, name, first, arguments)
        if value.kind == "scalar" and isinstance(value.default, str) and name in _OF_TEXT:
            known = combined(lambda text, *rest: getattr(text, name)(*rest), value.known, *(a.known for a in arguments))
            labels = labels_of((value, *arguments, *keywords.values()))
            return Value("scalar", labels, known=None if keywords else known)
        return None

    def _changed(self, value: Value, name: str, arguments: list[Value]) -> None:
        value.labels |= self.implied()
        if name == "sort":
            value.labels -= {"listing", "hash-order"}
        elif name in ("extend", "update"):
            value.labels |= labels_of(arguments)
            value.items = [*(value.items or []), *(a for x in arguments for a in (x.items or [Value(labels=x.labels)]))]
            value.length = None
        elif name != "remove" and arguments:
            value.items = [*(value.items or [])[-32:], arguments[-1]]
            value.labels |= {"some"} if self.loops else set()
            value.length = None if self.loops else combined(lambda size: size + 1, value.length)

    def _of_dict(self, value: Value, name: str, first: Value | None, arguments: list[Value]) -> Value | None:
        key = first.only if first is not None else UNKNOWN
        held = list(value.fields.values()) if value.kind == "dict" else []
        match name:
            case "get" | "pop" | "setdefault" if isinstance(key, str):
                if key in value.fields:
                    return value.fields[key]
                if value.kind == "dict" and "open" not in value.labels:
                    return arguments[1] if len(arguments) > 1 else NONE
                return joined([Value(labels=value.labels), *(arguments[1:] or [NONE])])
            case "items":
                if value.kind == "state_dict":
                    pair = Value("tuple", items=[Value(), Value("parameter", value.labels, fields=dict(value.fields))])
                    return Value("list", frozenset({"some"}), items=[pair])
                pair = Value("tuple", items=[Value("scalar"), joined(held) if held else Value(labels=value.labels)])
                return Value("list", frozenset({"some"}), items=[pair])
            case "values":
                if value.kind == "state_dict":
                    return Value("state_dict", value.labels, fields=value.fields)
                return Value("list", value.labels | {"some"}, items=held or None)
            case "keys":
                return Value("list", frozenset({"some"}))
            case "update" if first is not None and value.kind == "dict":
                for field, held_value in first.fields.items():
                    self.write(value.fields, field, held_value)
                return NONE
            case "copy":
                return Value(value.kind, value.labels, fields=dict(value.fields))
        return None


def bound(method: Value, owner: Value) -> Value:
    """A method of ``owner``."""
    code: Function = method.code
    held = Function(code.node, code.scope, code.defaults, owner, code.home, code.flavour, code.contexts, code.yields)
    return Value("function", name=method.name, code=held)


def class_field(value: Value, name: str, depth: int = 12) -> Value | None:
    """What a class, or its bases in the script, define under that name."""
    holder = value if value.kind == "class" else value.fields.get("__class__")
    if holder is None or not isinstance(holder.code, Class) or depth == 0:
        return None
    if (found := holder.fields.get(name)) is not None:
        return found
    for base in holder.code.bases:
        if base.kind == "class" and (found := class_field(base, name, depth - 1)) is not None:
            return found
    return None


def method_of(value: Value, name: str) -> Value | None:
    """A function that the class of an object defines."""
    found = class_field(value, name) if isinstance(value.code, Class) else None
    return found if found is not None and found.kind == "function" else None


def submodules(value: Value, depth: int = 6) -> list[Value]:
    """Modules held directly by one, in lists and tuples too."""
    found: list[Value] = []
    for name, held in value.fields.items():
        if name == "__class__":
            continue
        for option in held.each():
            if option.kind in ("module", "ddp", "parameter"):
                found.append(option)
            elif option.items is not None and depth:
                found += [item for part in option.items for item in part.each() if item.kind == "module"]
    return found


def loaders_in(over: Value) -> Iterator[Value]:
    """The loaders that a loop goes through: itself, or what is counted or zipped."""
    for option in over.each():
        if option.kind == "loader":
            yield option
        elif option.kind == "enumerate":
            yield from loaders_in(option.fields["of"])
        elif option.kind == "zip":
            for part in option.items or []:
                yield from loaders_in(part)
