"""Expressions: what each gives, and what went into it."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.doctor.reading.flows import bounded, labelled, labels_of, tested
from paceline.doctor.reading.knowledge import LIBRARIES, api, canonical, speaks_of_ranks
from paceline.doctor.reading.machine import Function, Scope
from paceline.doctor.reading.operators import Operators
from paceline.doctor.reading.trace import loaders_in
from paceline.doctor.reading.values import MAX_ITEMS, NONE, ORDERS, UNKNOWN, VARYING, Known, Value, combined, constant

__all__ = ["Expressions", "count_of", "order_of"]

MAX_DEPTH: Final = 400

MAX_COMPREHENDED: Final = 16
"""So many constants are told apart in a comprehension: it is short, unlike a loop."""


class Expressions(Operators):
    """Evaluates expressions."""

    _depth = 0

    def evaluate(self, node: ast.expr) -> Value:
        if self._depth > MAX_DEPTH or not self.spend():
            return Value()
        self._depth += 1
        try:
            method = getattr(self, f"_{type(node).__name__.lower()}", None)
            return method(node) if method is not None else self._other(node)
        finally:
            self._depth -= 1

    def _other(self, node: ast.AST) -> Value:
        """Of what has no meaning here: made of its parts."""
        parts = [self.evaluate(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return Value(labels=labels_of(parts))

    # --- names and attributes

    def _constant(self, node: ast.Constant) -> Value:
        return constant(node.value)

    def _name(self, node: ast.Name) -> Value:
        if (value := self.frame.scope.find(node.id)) is not None:
            if value.kind == "api":
                self.trace.names.add(value.name)
            return value
        return self.named(self._starred_name(node.id) or f"builtins.{node.id}")

    def _starred_name(self, name: str) -> str | None:
        """A name that nothing in the script binds, by `from torch.nn import *` if that may: its full name."""
        stars = self.frame.scope.module.stars
        if not stars or hasattr(builtins, name):
            return None
        names = [canonical(f"{star}.{name}") for star in reversed(stars)]
        return next((full for full in names if api(full) is not None), names[0])

    def named(self, name: str, *, used: bool = True) -> Value:
        """An API by its full name; ``used``: not only imported."""
        name = canonical(name)
        if (value := self.overrides.get(name)) is not None:
            return value
        if used:
            self.trace.names.add(name)
        parts = name.split(".")
        labels = speaks_of_ranks(parts[-1]) if parts[0] not in LIBRARIES else frozenset()
        return Value("api", labels, name)

    def _attribute(self, node: ast.Attribute) -> Value:
        return self.attribute(self.evaluate(node.value), node.attr, node)

    def _namedexpr(self, node: ast.NamedExpr) -> Value:
        value = self.evaluate(node.value)
        self.write(self.frame.scope.holder(node.target.id), node.target.id, value)
        return value

    def _starred(self, node: ast.Starred) -> Value:
        return self.evaluate(node.value)

    # --- containers

    def _list(self, node: ast.List) -> Value:
        return self._sequence("list", node.elts)

    def _tuple(self, node: ast.Tuple) -> Value:
        return self._sequence("tuple", node.elts)

    def _set(self, node: ast.Set) -> Value:
        value = self._sequence("list", node.elts)
        return Value("set", value.labels, items=value.items, length=value.length)

    def _sequence(self, kind: str, parts: list[ast.expr]) -> Value:
        items: list[Value] = []
        whole = True
        for part in parts[:MAX_ITEMS]:
            value = self.evaluate(part)
            if isinstance(part, ast.Starred):
                whole = whole and value.items is not None and "some" not in value.labels
                items += value.items if value.items is not None else [self.element(value, part)]
            else:
                items.append(value)
        items, all_kept = bounded(items)
        whole = whole and all_kept and len(parts) <= MAX_ITEMS
        known = None
        if kind == "tuple" and whole and all(item.known for item in items):
            known = combined(lambda *points: points, *(item.known for item in items))
        own = frozenset() if whole else frozenset({"some"})
        return Value(kind, own, items=items, known=known, length=Known((len(items),)) if whole else None)

    def _dict(self, node: ast.Dict) -> Value:
        fields: dict[str, Value] = {}
        labels: frozenset[str] = frozenset()
        for key, part in zip(node.keys, node.values, strict=True):
            value = self.evaluate(part)
            name = self.evaluate(key).only if key is not None else UNKNOWN
            if key is None and value.kind in ("dict", "namespace"):
                fields |= value.fields
            if isinstance(name, str):
                fields[name] = value
            else:
                labels |= labels_of((value,)) - ORDERS | {"open"}
        return Value("dict", labels, fields=fields)

    def _subscript(self, node: ast.Subscript) -> Value:
        return self.item(self.evaluate(node.value), self.evaluate(node.slice), node)

    def _slice(self, node: ast.Slice) -> Value:
        parts = [self.evaluate(part) if part else NONE for part in (node.lower, node.upper, node.step)]
        return Value("slice", labels_of(parts), items=parts)

    def _joinedstr(self, node: ast.JoinedStr) -> Value:
        parts = [self.evaluate(part) for part in node.values]
        known = combined(lambda *points: "".join(str(point) for point in points), *(part.known for part in parts))
        return Value("scalar", tested(parts), known=known)

    def _formattedvalue(self, node: ast.FormattedValue) -> Value:
        value = self.text_of(self.evaluate(node.value), node)
        return Value("scalar", labels_of((value,)), known=value.known if node.format_spec is None else None)

    # --- functions and comprehensions

    def _call(self, node: ast.Call) -> Value:
        receiver = self.evaluate(node.func.value) if isinstance(node.func, ast.Attribute) else None
        function = self.evaluate(node.func) if receiver is None else None
        arguments, keywords = self._arguments(node)
        if receiver is not None and isinstance(node.func, ast.Attribute):
            return self.call_method(receiver, node.func.attr, arguments, keywords, node)
        assert function is not None
        return self.call(function, arguments, keywords, node)

    def _arguments(self, node: ast.Call) -> tuple[list[Value], dict[str, Value]]:
        arguments: list[Value] = []
        for part in node.args:
            value = self.evaluate(part)
            if not isinstance(part, ast.Starred):
                arguments.append(value)
            else:
                arguments += value.items if value.items is not None else [self.element(value, part)]
        arguments, _ = bounded(arguments)
        keywords: dict[str, Value] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            elif value.kind in ("dict", "namespace"):
                keywords |= value.fields
            else:
                keywords["**"] = value
        return arguments, keywords

    def _lambda(self, node: ast.Lambda) -> Value:
        return Value("function", name="lambda", code=Function(node, self.frame.scope, self.defaults(node.args)))

    def defaults(self, arguments: ast.arguments) -> dict[str, Value]:
        """Of a function's parameters."""
        positional = [*arguments.posonlyargs, *arguments.args]
        given = zip(reversed(positional), reversed(arguments.defaults), strict=False)
        found = {parameter.arg: self.evaluate(default) for parameter, default in given}
        for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if default is not None:
                found[parameter.arg] = self.evaluate(default)
        return found

    def _listcomp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Value:
        found: list[Value] = []
        through = _Comprehended()
        self._comprehend(node.generators, lambda: found.append(self.evaluate(node.elt)), through)
        labels = labels_of(through.tests) & VARYING
        if through.ragged or labels:
            labels |= {"own-size"}
        if not through.is_whole(len(found)):
            labels |= {"some"}
        length = None if through.selects else through.lengths[0]
        if isinstance(node, ast.SetComp):
            return Value("set", labels | {"unique"}, items=found, length=None)
        return Value("list", labels | through.order, items=found, length=length)

    _setcomp = _generatorexp = _listcomp

    def _dictcomp(self, node: ast.DictComp) -> Value:
        found: list[tuple[Any, Value]] = []
        through = _Comprehended()

        def entry() -> None:
            found.append((self.evaluate(node.key).only, self.evaluate(node.value)))

        self._comprehend(node.generators, entry, through)
        if through.is_whole(len(found)) and all(isinstance(key, str) for key, _ in found):
            return Value("dict", through.order, fields=dict(found))
        labels = labels_of(value for _, value in found) - ORDERS | through.order | through.sizes | {"open"}
        return Value("dict", labels, fields={"*": found[0][1]} if found else {})

    def _comprehend(
        self,
        generators: list[ast.comprehension],
        body: Callable[[], None],
        through: _Comprehended,
    ) -> None:
        if not generators:
            body()
            return
        first, *rest = generators
        over = self.evaluate(first.iter)
        outermost = not through.lengths
        through.lengths.append(over.length)
        through.order |= order_of(over)
        if over.labels & {"unique", "own-size"}:
            through.sizes |= labels_of((over,)) & (VARYING | {"unique", "own-size"})
        through.ragged |= not outermost and over.length is None and over.kind in _RAGGED
        through.selects |= bool(first.ifs or rest)
        for loader in loaders_in(over):
            self.event("iterate", first.iter, subject=loader)
        outer = self.frame.scope
        self.frame.scope = Scope({}, outer.module, outer)
        loop = self.loop(first.iter, over, count=count_of(over))
        try:
            with self.looping(loop):
                for element in self.elements(over, loop, first.iter, MAX_COMPREHENDED):
                    self.assign(first.target, element)
                    tests = [(self.evaluate(test), test) for test in first.ifs]
                    through.tests += [test for test, _ in tests]
                    self.levels.append([self.condition(test, True, node) for test, node in tests])
                    self._comprehend(rest, body, through)
                    self.levels.pop()
        finally:
            self.frame.scope = outer

    def _await(self, node: ast.Await) -> Value:
        return self.evaluate(node.value)

    def _yield(self, node: ast.Yield) -> Value:
        value = self.evaluate(node.value) if node.value is not None else NONE
        self.frame.yielded.append(labelled(value, self.implied(self.frame.depth)))
        if self.frame.on_yield is not None:
            self.frame.on_yield(value)
        return Value()

    def _yieldfrom(self, node: ast.YieldFrom) -> Value:
        over = self.evaluate(node.value)
        loop = self.loop(node, over, count=count_of(over))
        for loader in loaders_in(over):
            self.event("iterate", node, subject=loader)
        with self.looping(loop):
            value = self.element(over, node)
            self.frame.yielded.append(value)
            if self.frame.on_yield is not None:
                self.frame.on_yield(value)
        return Value()


def count_of(over: Value) -> Value | None:
    """How often a loop goes round, as far as that is known, or what it depends on."""
    if over.length is not None:
        return Value("scalar", over.labels, known=over.length)
    labels = labels_of((over,))
    return Value("unknown", labels) if over.kind == "range" or "own-size" in labels else None


_RAGGED: Final = ("list", "unknown", "scalar", "lazy", "set")
"""What may be of any length, each another: documents, unlike the rows of a tensor or the parameters of a module."""


@dataclass(slots=True)
class _Comprehended:
    """What a comprehension went through: how long that is, what it asked of the elements, in which order they came, on
    what it depends how many there are, whether it leaves some out or takes several of each, and whether of each as many
    as that has."""

    lengths: list[Known | None] = field(default_factory=list)
    tests: list[Value] = field(default_factory=list)
    order: frozenset[str] = frozenset()
    sizes: frozenset[str] = frozenset()
    selects: bool = False
    ragged: bool = False

    def is_whole(self, count: int) -> bool:
        """Whether so many elements are all."""
        return not self.selects and self.lengths[0] is not None and self.lengths[0].only == count


def order_of(over: Value) -> frozenset[str]:
    """In which order its elements come, if processes may differ in that. A set has an order of its own in each process,
    as long as its elements are no numbers."""
    order = over.labels & {"hash-order", "listing"}
    numbers = bool(over.items) and all(isinstance(item.default, int | float) for item in over.items or ())
    return order | {"hash-order"} if over.kind == "set" and not numbers else order
