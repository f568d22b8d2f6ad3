"""Operators, comparisons and choices: what is known of their results, on each rank and in each iteration."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from typing import Any

from paceline.doctor.reading.knowledge import LAUNCHED
from paceline.doctor.reading.machine import Machine
from paceline.doctor.reading.trace import Condition
from paceline.doctor.reading.values import (
    RANKS,
    UNKNOWN,
    Known,
    Value,
    combined,
    joined,
    labels_of,
    picked,
)

__all__ = ["Arithmetic"]


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


class Arithmetic(Machine):
    """Evaluates operators."""

    def _binop(self, node: ast.BinOp) -> Value:
        return self.binary(self.evaluate(node.left), node.op, self.evaluate(node.right), node)

    def binary(self, left: Value, op: ast.operator, right: Value, node: ast.AST) -> Value:
        function = _BINARY.get(type(op))
        known = combined(function, left.known, right.known) if function else None
        labels = labels_of((left, right))
        if isinstance(op, ast.Sub) and known is None and "rank" in left.labels & right.labels:
            labels -= {"rank", "local_rank", "global_rank"}  # seed + rank - rank
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
        if known is None and "tensor" in (left.kind, right.kind):
            return Value("tensor", labels, "mask")
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


def _scaled(labels: frozenset[str], value: Value, factor: Value, label: str) -> frozenset[str]:
    is_size = factor.name == "world size"
    return labels | {label} if is_size and "graph" in value.labels else labels


def _sum(left: Known | None, right: Known | None) -> Known | None:
    return combined(operator.add, left, right)


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
