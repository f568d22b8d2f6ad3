"""Objects: their attributes and elements, and what lists, dicts and strings do."""

from __future__ import annotations

import ast
from pathlib import PurePath
from typing import Any, Final

from paceline.doctor.reading.arithmetic import TENSORS
from paceline.doctor.reading.expressions import Expressions, order_of
from paceline.doctor.reading.flows import detached, joined, labelled, labels_of, part_labels, picked
from paceline.doctor.reading.knowledge import METHODS, speaks_of_ranks
from paceline.doctor.reading.lookup import bound, class_field, method_of, of_path, submodules
from paceline.doctor.reading.machine import Class, Function
from paceline.doctor.reading.program import Module
from paceline.doctor.reading.samples import batch
from paceline.doctor.reading.surroundings import variable
from paceline.doctor.reading.trace import Loop
from paceline.doctor.reading.values import RANKS, STEPS, UNKNOWN, Known, Value, combined, constant, words
from paceline.doctor.reading.walker import MAX_UNROLLED

__all__ = ["Objects"]

_TENSOR_ATTRIBUTES: Final = words("T mT H real imag")
_SIZES: Final = words("shape ndim dtype device itemsize nbytes requires_grad is_cuda")
_OF_ALL: Final = frozenset({"own-size", "unique"})
"""How many elements there are says nothing about one of them."""


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
        if name == "data" and (value.kind == "buffer" or (value.kind == "unknown" and "owner" in value.fields)):
            return value  # a buffer's numbers, or those of what is a parameter or a buffer
        if value.kind == "path" and (path := of_path(value, name)) is not None:
            return path
        if value.kind in TENSORS:
            return self._of_tensor(value, name)
        if value.kind == "optimizer" and name == "param_groups":
            settings = Value("settings", name=name, fields={"owner": value})
            return Value("list", frozenset({"some"}), items=[settings])
        if name in METHODS.get(value.kind, {}):
            return Value("bound", value.labels, name, fields={"self": value})
        if value.kind == "module" and name in ("weight", "bias") and value.name.startswith("torch.nn."):
            parameter = Value("parameter", value.labels & {"drawn"}, fields={"owner": value})
            value.fields[name] = parameter
            return parameter
        child_value = Value(labels=part_labels(value) | speaks_of_ranks(name), line=getattr(node, "lineno", 0))
        if name == "loss":
            child_value.labels |= {"mean"}
        if value.kind != "scalar":
            value.fields[name] = child_value  # the same object the next time
        return child_value

    def _of_tensor(self, value: Value, name: str) -> Value:
        if name == "grad":
            child = Value("grad", labels_of((value,)) | {"gradient"}, fields={"of": value})
            value.fields[name] = child
            return child
        if name in _TENSOR_ATTRIBUTES or name == "data":
            if name == "data":
                return Value(value.kind, detached(value.labels), fields=value.fields, length=value.length)
            return Value(value.kind, value.labels, fields=value.fields)
        if name in _SIZES:
            return Value("unknown", (value.labels & {"rank"}) | {"size"}, fields={"of": value})
        child = Value("tensor", labels_of((value,)) | ({"mean"} if name == "loss" else set()))
        value.fields[name] = child
        return child

    def text_of(self, value: Value, node: ast.AST) -> Value:
        for name in ("__format__", "__str__", "__repr__"):
            if (method := method_of(value, name)) is not None:
                return self.call(bound(method, value), [constant("")] if name == "__format__" else [], {}, node)
        return value

    # --- subscripts

    def item(self, value: Value, key: Value, node: ast.AST) -> Value:
        if value.options:
            return joined([self.item(option, key, node) for option in value.each()] or [Value(labels=value.labels)])
        if value.name == "os.environ" and value.kind == "api":
            return variable(self, key)
        if value.kind == "path" and value.name == "parents":
            above = combined(lambda text, index: str(PurePath(text).parents[index]), value.known, key.known)
            return Value("path", value.labels, known=above)
        if value.kind == "loaded":
            return Value("loaded", value.labels | labels_of((key,)), fields=value.fields)
        if value.kind in ("dict", "namespace", "state_dict") and isinstance(name := key.only, str):
            if name not in value.fields:
                default = value.fields.get("*") or Value(labels=part_labels(value))
                value.fields[name] = default
            return value.fields[name]
        if value.kind == "dict" and (any_one := value.fields.get("*")) is not None and key.kind != "slice":
            return any_one
        if value.kind == "module":
            return self._submodule(value, key, node)
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
            return labelled(joined(value.items), labels_of((Value(labels=value.labels - _OF_ALL), key)))
        return self._unknown_item(value, key)

    def _submodule(self, value: Value, key: Value, node: ast.AST) -> Value:
        name = str(key.only)
        if isinstance(key.only, int | str) and name in value.fields:
            self.on_read(value, name)
            return value.fields[name]
        for field in value.fields:
            self.on_read(value, field, sure=False)
        if self.inside:
            self.event("choose", node, subject=value, arguments={"key": key})
        return joined(submodules(value)) if submodules(value) else Value("module")

    def _unknown_item(self, value: Value, key: Value) -> Value:
        """Of a tensor, or of whatever is not known element by element."""
        if "size" in value.labels and "of" in value.fields and key.only == 0:
            return Value("scalar", value.labels, known=value.fields["of"].length)
        by_name = isinstance(key.default, str) or value.kind == "dict"
        labels = part_labels(value) if by_name else labels_of((value,))
        labels |= labels_of((key,))
        if value.kind in ("tensor", "list") and "rank" in key.labels:
            labels |= {"data", "shard"}
        if key.name == "mask":
            labels |= {"own-size"}
        elif value.kind == key.kind == "tensor":
            labels = labels - {"own-size"} | (key.labels & {"own-size"})  # it is as long as the index
        kind = "tensor" if value.kind == "batch" else value.kind if value.kind in ("tensor", "parameter") else "unknown"
        name = value.name if value.name == "sample" else ""
        return Value(kind, labels, name, fields=_view_of(value), length=key.length if kind == "tensor" else None)

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
        if value.kind != "scalar" and "rank" in key.labels:
            labels |= {"data", "shard"}
        parts = key.items or []
        if len(parts) > 1 and not parts[1].is_none and not parts[1].may_vary:
            labels -= {"own-size"}  # cut to what all have
        bounds = [part.known for part in parts]
        length = combined(
            lambda size, start, stop, step: len(range(*slice(start, stop, step).indices(size))), value.length, *bounds
        )
        items = value.items
        places: list[Any] = [bound.only if bound is not None else UNKNOWN for bound in bounds]
        if items is not None and "some" not in value.labels and UNKNOWN not in places:
            start, stop, step = places
            items = items[start:stop:step]
        elif items is not None:
            labels |= {"some"}
        if value.kind == "scalar":
            return Value("scalar", labels)
        kind = value.kind if value.kind in ("list", "tuple", "tensor", "parameter") else "unknown"
        return Value(kind, labels, value.name, fields=_view_of(value), items=items, length=length)

    # --- iteration

    def elements(self, value: Value, loop: Loop, node: ast.AST, most: int = MAX_UNROLLED) -> list[Value]:
        """What the loop's variable is, in one iteration that stands for all; in each, for a few constants, at most so
        many."""
        if not self.spend():
            return [Value()]
        if value.options:
            return [joined([element for option in value.each() for element in self.elements(option, loop, node)[:1]])]
        match value.kind:
            case "range":
                bounds = value.items or []
                steps = [bounds[0] if len(bounds) > 1 else constant(0), *bounds[2:3]]
                return [self.counter(loop, steps, value.labels)]
            case "enumerate":
                counter = self.counter(loop, value.items or [], frozenset())
                inner = self.elements(value.fields["of"], loop, node)
                return [Value("tuple", items=[counter, element]) for element in inner[:1]]
            case "zip":
                parts = [self.elements(part, loop, node)[0] for part in value.items or []]
                return [Value("tuple", items=parts)]
        if value.items is not None and "some" not in value.labels and 0 < len(value.items) <= most:
            whole = value.length is not None and value.length.only == len(value.items)
            if whole and all(
                item.known is not None or item.kind in ("tuple", "class", "function") for item in value.items
            ):
                return list(value.items)
        return [self.element(value, node)]

    def counter(self, loop: Loop, steps: list[Value], labels: frozenset[str]) -> Value:
        """A loop's index: counts over and over, from a start (0) in steps (1)."""
        known = [bound.known.only if bound.known is not None else UNKNOWN for bound in steps]
        start = known[0] if known else 0
        step = known[1] if len(known) > 1 else 1
        if not isinstance(start, int) or not isinstance(step, int):
            return Value("unknown", labels, "counter", line=loop.line)
        count = loop.count.known if loop.count is not None else None
        sizes = [count.at(rank) if count is not None and count.loop is None else UNKNOWN for rank in range(RANKS)]
        rounds = [max(size, 1) if isinstance(size, int) else STEPS for size in sizes]
        points = tuple(start + step * (index % size) for size in rounds for index in range(STEPS))
        return Value("scalar", labels & {"clock"}, "counter", Known(points, loop.number), line=loop.line)

    def element(self, value: Value, node: ast.AST) -> Value:
        """Any one of its elements."""
        if not self.spend():
            return Value()
        if value.options:
            return joined([self.element(option, node) for option in value.each()] or [Value(labels=value.labels)])
        match value.kind:
            case "loader":
                return batch(self, value, node)
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
                return Value("scalar", part_labels(value))
            case "enumerate" | "zip" | "range":
                return self.elements(value, self.loop(node, value), node)[0]
        if value.items:
            own = Value(labels=value.labels - _OF_ALL)
            return labelled(joined(value.items), labels_of((own,)) | order_of(value))
        if isinstance(value.code, Class) and (method := method_of(value, "__iter__")) is not None:
            made = self.call(bound(method, value), [], {}, node)
            return self.element(made, node) if made is not value else Value(labels=labels_of((value,)))
        kind = value.kind if value.kind in ("tensor", "batch") else "unknown"
        return Value(kind, part_labels(value) | order_of(value), "sample" if kind != "unknown" else "")


def _view_of(value: Value) -> dict[str, Value]:
    """A part of a tensor is that tensor's: what changes it changes both."""
    return {"whole": value} if value.kind == "tensor" else dict(value.fields) if value.kind == "parameter" else {}
