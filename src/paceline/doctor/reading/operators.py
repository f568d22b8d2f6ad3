"""Operators, comparisons and choices: what is known of their results, on each rank and in each iteration."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from paceline.doctor.reading.arithmetic import calculated, named
from paceline.doctor.reading.flows import joined, labels_of, part_labels, picked, tested
from paceline.doctor.reading.knowledge import LAUNCHED
from paceline.doctor.reading.trace import MAX_NESTED, Condition
from paceline.doctor.reading.values import RANKS, STEPS, UNKNOWN, VARYING, Known, Value, combined, constant
from paceline.doctor.reading.walker import Walker

__all__ = ["Operators"]


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


class Operators(Walker):
    """Evaluates operators."""

    def _binop(self, node: ast.BinOp) -> Value:
        return self.binary(self.evaluate(node.left), node.op, self.evaluate(node.right), node)

    def binary(self, left: Value, op: ast.operator, right: Value, node: ast.AST) -> Value:
        if isinstance(op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor) and "set" in (left.kind, right.kind):
            return Value("set", labels_of((left, right)), items=[*(left.items or ()), *(right.items or ())])
        calculation = named(type(op).__name__)
        assert calculation is not None
        return calculated(calculation, left, right, getattr(node, "lineno", 0))

    def changed_in_place(self, value: Value, made: Value, node: ast.AST) -> None:
        """``x /= n``, ``x.div_(n)``: the object itself is now what was made of it."""
        added = made.labels | self.implied()
        if value.kind == "buffer":
            given = Value(labels=added - value.labels)
            self.event("buffer", node, name=value.name, subject=value, arguments={"value": given})
        elif value.kind == "grad":
            self.event("grad", node, subject=value, arguments={"value": made})
        elif value.kind == "parameter":
            self.event("weights", node, subject=value, arguments={"value": Value(labels=added)})
            value.labels |= added - VARYING | ({"drawn"} if added & VARYING else frozenset())
        else:
            value.labels = (value.labels | added) - _undone(value.labels, made.labels)
            if (whole := value.fields.get("whole")) is not None:
                self.changed_in_place(whole, made, node)

    def _unaryop(self, node: ast.UnaryOp) -> Value:
        inner = self.evaluate(node.operand)
        if isinstance(node.op, ast.Not):
            truths = [inner.truth(rank) for rank in range(RANKS)]
            known = combined(operator.not_, inner.known)
            if known is None and None not in truths:
                known = Known(tuple(not truth for truth in truths))
            return Value("scalar" if known else "unknown", tested((inner,)), "not", known, items=[inner])
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
                level.append(self.condition(values[-1], is_and, part))
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
        if isinstance(op, ast.Is | ast.IsNot | ast.Eq | ast.NotEq) and (left.is_none or right.is_none):
            asked = right if left.is_none else left
            is_none = replace(_whether_none(asked), fields={"of": asked})
            return is_none if isinstance(op, ast.Is | ast.Eq) else replace(_opposite(is_none), fields={"of": asked})
        if isinstance(right.only, bool) and isinstance(op, ast.Is | ast.IsNot | ast.Eq | ast.NotEq) and not left.known:
            return left if right.only is isinstance(op, ast.Is | ast.Eq) else _opposite(left)
        labels = tested((left, right))
        if isinstance(op, ast.Is | ast.IsNot | ast.Eq | ast.NotEq) and {left.kind, right.kind} <= {"api", "class"}:
            return constant(_is_same_class(left, right) is isinstance(op, ast.Is | ast.Eq))
        known = combined(_COMPARED[type(op)], left.known, right.known)
        if known is None and isinstance(op, ast.In | ast.NotIn):
            known = self._contained(op, left, right)
            if isinstance(left.default, str) and right.kind not in ("scalar", "list", "tuple", "set"):
                labels = tested((left, Value(right.kind, part_labels(right)))) - {"data"}  # a key is there for all
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
        elif left.kind in ("api", "class") and right.items and all(i.kind in ("api", "class") for i in right.items):
            inside = any(_is_same_class(left, item) for item in right.items)
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

        self.branch(test, node, (arm(node.body), arm(node.orelse)))
        if (decided := test.decided()) is not None:  # taken for decided meanwhile
            return found[not decided]
        return picked(test, found[0], found[1])


def _undone(before: frozenset[str], after: frozenset[str]) -> frozenset[str]:
    """What a loss was scaled by, and is no more."""
    return (before - after) & {"times-world", "divided-by-world"}


def _is_same_class(one: Value, other: Value) -> bool:
    return one.code is other.code if one.code is not None or other.code is not None else one.name == other.name


def _is_rank(value: Value) -> bool:
    """Whether it is made of ranks and sizes only, and not known exactly: ``args.rank % ngpus``."""
    alone = labels_of((value,)) <= {
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


def _opposite(truth: Value) -> Value:
    known = combined(operator.not_, truth.known)
    return Value("scalar" if known else "unknown", truth.labels, "not", known, items=[truth])


def _whether_none(value: Value, depth: int = MAX_NESTED) -> Value:
    """``value is None``: for what was chosen by a test, that test says it, and not what there was to choose from."""
    if value.known is not None and (value.kind == "scalar" or value.is_none):
        known = combined(lambda point: point is None, value.known)
        return Value("scalar" if known else "unknown", tested((value,)), known=known)
    test = value.fields.get("test")
    if test is not None and depth and {"if", "else"} <= value.fields.keys():
        sides = [_whether_none(value.fields[side], depth - 1) for side in ("if", "else")]
        truths = [side.decided() for side in sides]
        match truths:
            case [True, False]:
                return Value(test.kind, tested((test,)), test.name, test.known, items=test.items)
            case [False, True]:
                return _opposite(test)
            case [True, True] | [False, False]:
                return sides[0]
        return Value("unknown", tested([test, *sides]))
    if test is not None:
        return Value("unknown", tested((test,)))
    if value.options:
        return Value("unknown", tested((value,)) - VARYING)
    if value.kind not in ("unknown", "scalar"):
        return Value("scalar", known=Known((False,)))
    return Value("unknown", tested((value,)) - VARYING)  # what is there does not hang on the numbers in it


def _folded(known: list[Known | None], decided: list[bool | None], is_and: bool) -> Known | None:
    """``and`` or ``or`` of what may be unknown: one operand can decide it on one rank and not on another."""
    filled = [
        k if k is not None else Known((UNKNOWN if d is None else d,)) for k, d in zip(known, decided, strict=True)
    ]
    loops = {k.loop for k in filled if k.loop is not None}
    if len(loops) > 1:
        return None
    steps = range(STEPS) if loops else range(1)
    points = tuple(_decide((k.at(rank, step) for k in filled), is_and) for rank in range(RANKS) for step in steps)
    if all(point is UNKNOWN for point in points):
        return None
    return Known(points, next(iter(loops), None), any(k.assumed for k in filled))


def _decide(points: Iterator[Any], is_and: bool) -> Any:
    values = list(points)
    if any(point is not UNKNOWN and bool(point) is not is_and for point in values):
        return not is_and
    return UNKNOWN if any(point is UNKNOWN for point in values) else is_and
