"""Expressions: what each gives, and what went into it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from typing import Any, Final

from paceline.doctor.reading.knowledge import canonical
from paceline.doctor.reading.machine import Function, Machine, Scope
from paceline.doctor.reading.trace import Condition, Loop
from paceline.doctor.reading.values import (
    NONE,
    RANKS,
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
)

__all__ = ["Expressions"]

MAX_DEPTH: Final = 400
MAX_ITEMS: Final = 256


def _times(a: Any, b: Any) -> Any:
    if isinstance(a, str | tuple) or isinstance(b, str | tuple):
        return UNKNOWN
    return a * b


def _power(a: Any, b: Any) -> Any:
    return a**b if abs(a) < 1 << 16 and 0 <= b < 32 else UNKNOWN


def _modulo(a: Any, b: Any) -> Any:
    return UNKNOWN if isinstance(a, str) else a % b


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _times,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: _modulo,
    ast.Pow: _power,
}

_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: lambda a, b: a is b if a is None or b is None else a == b,
    ast.IsNot: lambda a, b: a is not b if a is None or b is None else a != b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


class Expressions(Machine):
    """Evaluates expressions."""

    _depth = 0

    def evaluate(self, node: ast.expr) -> Value:
        if self.steps_left <= 0 or self._depth > MAX_DEPTH:
            return Value()
        self.steps_left -= 1
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
        return self.named(f"builtins.{node.id}")

    def named(self, name: str, *, used: bool = True) -> Value:
        """An API by its full name; ``used``: not only imported."""
        name = canonical(name)
        if (value := self.overrides.get(name)) is not None:
            return value
        if used:
            self.trace.names.add(name)
        return Value("api", name=name)

    def _attribute(self, node: ast.Attribute) -> Value:
        return self.attribute(self.evaluate(node.value), node.attr, node)

    def _namedexpr(self, node: ast.NamedExpr) -> Value:
        value = self.evaluate(node.value)
        self.write(self.frame.scope.holder(node.target.id), node.target.id, value)
        return value

    def _starred(self, node: ast.Starred) -> Value:
        return self.evaluate(node.value)

    # --- arithmetic and choices

    def _binop(self, node: ast.BinOp) -> Value:
        return self.binary(self.evaluate(node.left), node.op, self.evaluate(node.right), node)

    def binary(self, left: Value, op: ast.operator, right: Value, node: ast.AST) -> Value:
        function = _BINARY.get(type(op))
        known = combined(function, left.known, right.known) if function else None
        labels = labels_of((left, right))
        if isinstance(op, ast.Add) and left.items is not None and right.items is not None:
            return Value(left.kind, labels, items=[*left.items, *right.items], length=_sum(left.length, right.length))
        if isinstance(op, ast.Add) and left.kind in ("parameters", "buffers"):
            return left
        if isinstance(op, ast.Mult) and left.items is not None:
            return Value(left.kind, labels, items=left.items, length=combined(operator.mul, left.length, right.known))
        if isinstance(op, ast.Div) and isinstance(left.default, str):
            return Value("scalar", labels, known=known)
        if isinstance(op, ast.Div | ast.FloorDiv):
            labels |= {"divided"} if "graph" in left.labels else frozenset()
            labels = _scaled(labels, left, right, "divided-by-world")
            if "reduced" in right.labels:
                labels |= {"over-global-count"}
            counted = "count" in right.labels and right.varies and "reduced" not in right.labels
            if counted and {"sum", "graph"} <= left.labels:
                labels |= {"own-mean"}
        elif isinstance(op, ast.Mult):
            for one, other in ((left, right), (right, left)):
                labels = _scaled(labels, one, other, "times-world")
                if "graph" in one.labels and "graph" not in other.labels:
                    labels |= {"divided"}
        elif isinstance(op, ast.Mod):
            labels |= {"modulo-devices"} if "devices" in right.labels else frozenset()
            counts = "counter" in left.labels or (left.known is not None and left.known.loop is not None)
            labels |= {"every-nth"} if counts else frozenset()
        kinds = {left.kind, right.kind}
        kind = "tensor" if kinds & {"tensor", "grad", "parameter", "buffer", "batch"} else "unknown"
        if isinstance(op, ast.Div) and "path" in (left.kind, right.kind):
            kind = "path"
        value = Value("scalar" if known else kind, labels, known=known, line=getattr(node, "lineno", 0))
        if kind == "tensor":
            value.length = left.length if left.kind == "tensor" else right.length
        return value

    def _unaryop(self, node: ast.UnaryOp) -> Value:
        inner = self.evaluate(node.operand)
        if isinstance(node.op, ast.Not):
            truths = [inner.truth(rank) for rank in range(RANKS)]
            known = combined(operator.not_, inner.known)
            if known is None and None not in truths:
                known = Known(tuple(not truth for truth in truths))
            return Value("scalar" if known else "unknown", inner.labels, "not", known, items=[inner])
        if isinstance(node.op, ast.USub):
            known = combined(operator.neg, inner.known)
            return Value("scalar" if known else inner.kind, inner.labels, known=known)
        return Value(inner.kind, inner.labels, known=None)

    def _boolop(self, node: ast.BoolOp) -> Value:
        """All operands are looked at, as far as the first ones leave it open."""
        is_and = isinstance(node.op, ast.And)
        values: list[Value] = []
        level: list[Condition] = []
        self.levels.append(level)
        for part in node.values:
            values.append(self.evaluate(part))
            if (decided := values[-1].decided()) is (not is_and):
                break
            if decided is None:
                level.append(Condition(values[-1], is_and, node.lineno))
        self.levels.pop()
        if len(values) == 1 or (values[-1].decided() is (not is_and) and all(v.decided() is not None for v in values)):
            return values[-1]
        open_ = [value for value in values if value.decided() is not is_and]
        if not open_:
            return values[-1]
        if len(open_) == 1 and open_[0] is values[-1]:
            return open_[0]
        known = _folded([value.known for value in values], [value.decided() for value in values], is_and)
        labels = labels_of(values)
        if known is None and any(value.kind in ("module", "function", "list") for value in values):
            return joined(values)
        return Value("scalar" if known else "unknown", labels, "and" if is_and else "or", known, items=open_)

    def _compare(self, node: ast.Compare) -> Value:
        values = [self.evaluate(part) for part in (node.left, *node.comparators)]
        results = [
            self._compared(op, left, right) for op, left, right in zip(node.ops, values[:-1], values[1:], strict=True)
        ]
        if len(results) == 1:
            return results[0]
        known = _folded([result.known for result in results], [None] * len(results), True)
        return Value("scalar" if known else "unknown", labels_of(results), "and", known, items=results)

    def _compared(self, op: ast.cmpop, left: Value, right: Value) -> Value:
        labels = labels_of((left, right)) - {"graph"}
        known = combined(_COMPARED[type(op)], left.known, right.known)
        if known is None and isinstance(op, ast.In | ast.NotIn):
            known = self._contained(op, left, right)
        if known is None and isinstance(op, ast.Is | ast.IsNot | ast.Eq | ast.NotEq):
            known = _identity(op, left, right)
        if known is None and (_is_rank(left) or _is_rank(right)):
            # Which rank cannot be told, but that it is not all of them.
            others = isinstance(op, ast.NotEq | ast.Gt | ast.IsNot | ast.NotIn)
            known = Known((False, True) if others else (True, False))
        return Value("scalar" if known else "unknown", labels, known=known)

    def _contained(self, op: ast.cmpop, left: Value, right: Value) -> Known | None:
        key = left.only
        inside: bool | None = None
        if right.name == "os.environ" and isinstance(key, str):
            self.trace.variables.add(key)
            inside = True if key in LAUNCHED else False if key.startswith(("SLURM_", "OMPI_", "PMI_")) else None
        elif right.kind == "dict" and isinstance(key, str) and right.fields and "open" not in right.labels:
            inside = key in right.fields
        elif right.items is not None and left.known is not None and all(item.known for item in right.items):
            return combined(
                lambda a, *rest: (a in rest) is isinstance(op, ast.In), left.known, *(i.known for i in right.items)
            )
        return None if inside is None else Known((inside is isinstance(op, ast.In),))

    def _ifexp(self, node: ast.IfExp) -> Value:
        test = self.evaluate(node.test)
        if (decided := test.decided()) is not None:
            return self.evaluate(node.body if decided else node.orelse)
        found: list[Value] = []

        def arm(expression: ast.expr) -> Callable[[], None]:
            return lambda: found.append(self.evaluate(expression))

        self.branch(test, node.lineno, (arm(node.body), arm(node.orelse)))
        if (decided := test.decided()) is not None:  # taken for decided meanwhile
            return found[not decided]
        return picked(test, found[0], found[1])

    # --- containers

    def _list(self, node: ast.List) -> Value:
        return self._sequence("list", node.elts)

    def _tuple(self, node: ast.Tuple) -> Value:
        return self._sequence("tuple", node.elts)

    def _set(self, node: ast.Set) -> Value:
        value = self._sequence("list", node.elts)
        return Value("set", value.labels | {"hash-order"}, items=value.items, length=value.length)

    def _sequence(self, kind: str, parts: list[ast.expr]) -> Value:
        items: list[Value] = []
        whole = True
        for part in parts[:MAX_ITEMS]:
            value = self.evaluate(part)
            if isinstance(part, ast.Starred):
                whole = whole and value.items is not None
                items += value.items if value.items is not None else [self.element(value, part)]
            else:
                items.append(value)
        known = None
        if kind == "tuple" and whole and all(item.known for item in items):
            known = combined(lambda *points: points, *(item.known for item in items))
        return Value(kind, items=items, known=known, length=Known((len(items),)) if whole else None)

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
                labels |= labels_of((value,)) | {"open"}
        return Value("dict", labels, fields=fields)

    def _subscript(self, node: ast.Subscript) -> Value:
        return self.item(self.evaluate(node.value), self.evaluate(node.slice), node)

    def _slice(self, node: ast.Slice) -> Value:
        parts = [self.evaluate(part) if part else NONE for part in (node.lower, node.upper, node.step)]
        return Value("slice", labels_of(parts), items=parts)

    def _joinedstr(self, node: ast.JoinedStr) -> Value:
        parts = [self.evaluate(part) for part in node.values]
        known = combined(lambda *points: "".join(str(point) for point in points), *(part.known for part in parts))
        return Value("scalar", labels_of(parts) - {"graph"}, known=known)

    def _formattedvalue(self, node: ast.FormattedValue) -> Value:
        value = self.evaluate(node.value)
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
        lengths: list[Known | None] = []
        tests: list[Value] = []
        self._comprehend(node.generators, lambda: found.append(self.evaluate(node.elt)), lengths, tests)
        kind = "set" if isinstance(node, ast.SetComp) else "list"
        filtered = any(part.ifs for part in node.generators) or len(node.generators) > 1
        return Value(
            kind,
            (labels_of(tests) & VARYING) | ({"some"} if kind == "list" else {"some", "hash-order"}),
            items=found,
            length=None if filtered else lengths[0],
        )

    _setcomp = _generatorexp = _listcomp

    def _dictcomp(self, node: ast.DictComp) -> Value:
        found: list[Value] = []
        self._comprehend(node.generators, lambda: found.append(self.evaluate(node.value)), [], [])
        return Value("dict", labels_of(found) | {"open"}, fields={"*": found[0]} if found else {})

    def _comprehend(
        self,
        generators: list[ast.comprehension],
        body: Callable[[], None],
        lengths: list[Known | None],
        tests: list[Value],
    ) -> None:
        if not generators:
            body()
            return
        first, *rest = generators
        over = self.evaluate(first.iter)
        lengths.append(over.length)
        for loader in self.loaders(over):
            self.event("iterate", first.iter, subject=loader)
        outer = self.frame.scope
        self.frame.scope = Scope({}, outer.module, outer)
        loop = Loop(self.number(), first.iter.lineno, over, count=_count(over))
        try:
            with self.looping(loop):
                for element in self.elements(over, loop, first.iter)[:1]:
                    self.assign(first.target, element)
                    tests += [self.evaluate(test) for test in first.ifs]
                    self._comprehend(rest, body, lengths, tests)
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
        loop = Loop(self.number(), node.lineno, over, count=_count(over))
        for loader in self.loaders(over):
            self.event("iterate", node, subject=loader)
        with self.looping(loop):
            value = self.element(over, node)
            self.frame.yielded.append(value)
            if self.frame.on_yield is not None:
                self.frame.on_yield(value)
        return Value()


LAUNCHED: Final = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID".split()
)
"""Variables that a launcher sets."""


def _scaled(labels: frozenset[str], value: Value, factor: Value, label: str) -> frozenset[str]:
    is_size = factor.name == "world size"
    return labels | {label} if is_size and "graph" in value.labels else labels


def _sum(left: Known | None, right: Known | None) -> Known | None:
    return combined(operator.add, left, right)


def _count(over: Value) -> Value | None:
    return Value("scalar", over.labels, known=over.length) if over.length is not None else None


def _is_rank(value: Value) -> bool:
    """Whether it is made of ranks and sizes only, and not known exactly: ``args.rank % ngpus``."""
    alone = value.labels <= {
        "rank",
        "local_rank",
        "global_rank",
        "world",
        "devices",
        "modulo-devices",
        "environment",
        "config",
    }
    return "rank" in value.labels and value.kind in ("unknown", "scalar") and alone


def _identity(op: ast.cmpop, left: Value, right: Value) -> Known | None:
    """``x is None`` of something that is surely not, or that may be either."""
    value, other = (left, right) if right.is_none else (right, left)
    if not other.is_none:
        return None
    if value.options:
        return None
    certain = value.kind not in ("unknown", "scalar", "either") or (value.kind == "scalar" and value.known is not None)
    return Known((isinstance(op, ast.IsNot | ast.NotEq),)) if certain and not value.is_none else None


def _folded(known: list[Known | None], decided: list[bool | None], is_and: bool) -> Known | None:
    """``and`` or ``or`` of what may be unknown: one operand can decide it on one rank and not on another."""
    filled = [
        k if k is not None else Known((UNKNOWN if d is None else d,)) for k, d in zip(known, decided, strict=True)
    ]
    loops = {k.loop for k in filled if k.loop is not None}
    if len(loops) > 1:
        return None
    steps = range(48) if loops else range(1)
    points = tuple(_decide((k.at(rank, step) for k in filled), is_and) for rank in range(RANKS) for step in steps)
    if all(point is UNKNOWN for point in points):
        return None
    return Known(points, next(iter(loops), None), any(k.assumed for k in filled))


def _decide(points: Iterator[Any], is_and: bool) -> Any:
    values = list(points)
    if any(point is not UNKNOWN and bool(point) is not is_and for point in values):
        return not is_and
    return UNKNOWN if any(point is UNKNOWN for point in values) else is_and
