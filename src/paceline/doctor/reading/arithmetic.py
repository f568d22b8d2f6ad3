"""What arithmetic on tensors and numbers gives, whoever writes it: ``loss / n``, ``loss.div(n)``, ``loss.div_(n)``,
``torch.div(loss, n)`` and ``np.true_divide(loss, n)`` are one thing.

Pure functions of values. `named` finds a calculation by the name of an operator, method or function; of all others
`computed` says what goes over, by tables of names.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from paceline.doctor.reading.flows import bounded, detached, labels_of
from paceline.doctor.reading.values import FACTORS, UNKNOWN, Value, combined, words

__all__ = ["TENSORS", "Calculation", "calculated", "computed", "content", "named"]

TENSORS: Final = ("tensor", "grad", "parameter", "buffer", "batch")


# --- of two operands


@dataclass(frozen=True, slots=True)
class Calculation:
    """One of the four, or a remainder, power or matrix product.

    Args:
        points: what it is of two numbers.
        labels: what a result is made of, from both operands.
    """

    points: Callable[[Any, Any], Any] | None
    labels: Callable[[Value, Value], frozenset[str]]


def _plain(left: Value, right: Value) -> frozenset[str]:
    return labels_of((left, right))


def _difference(left: Value, right: Value) -> frozenset[str]:
    labels = labels_of((left, right))
    same = combined(operator.sub, left.known, right.known) is None and "rank" in left.labels & right.labels
    return labels - {"rank", "local_rank", "global_rank"} if same else labels  # seed + rank - rank


def _product(left: Value, right: Value) -> frozenset[str]:
    labels = labels_of((left, right))
    for loss, factor in ((left, right), (right, left)):
        if "graph" in loss.labels and "graph" not in factor.labels:
            labels |= {"divided"}
            if any(label == "size" or label.startswith("count-of-") for label in factor.labels):
                labels |= {"times-count"}
            if "world-multiple" in factor.labels:
                labels = _scaled(labels, "times-world", "divided-by-world")
            elif "world-share" in factor.labels and "reduced" not in factor.labels and "count" not in factor.labels:
                labels = _scaled(labels, "divided-by-world", "times-world")
    return labels | _multiplied(left.labels & FACTORS, right.labels & FACTORS)


def _quotient(left: Value, right: Value) -> frozenset[str]:
    labels = labels_of((left, right))
    if "graph" in left.labels:
        labels |= {"divided"}
        if "world-multiple" in right.labels:
            labels = _scaled(labels, "divided-by-world", "times-world")
    if "reduced" in right.labels:
        labels |= {"over-global-count"}
    if "size" in right.labels:
        labels -= {"own-mean"}  # a mean over so many of them: of samples, of which each has its own mean
    counted = "count" in right.labels and right.varies and not right.labels & {"reduced", "graph"}
    if counted and {"sum", "graph"} <= left.labels:
        labels |= {"own-mean"}
    inverse = {"world-multiple": "world-share", "world-share": "world-multiple"}
    return labels | _multiplied(left.labels & FACTORS, frozenset(inverse[f] for f in right.labels & FACTORS))


def _scaled(labels: frozenset[str], label: str, opposite: str) -> frozenset[str]:
    """A loss times the world size, divided by it later on, is what it was."""
    return labels - {opposite} if opposite in labels else labels | {label}


def _multiplied(left: frozenset[str], right: frozenset[str]) -> frozenset[str]:
    both = left | right
    return frozenset() if len(both) > 1 else both


def _remainder(left: Value, right: Value) -> frozenset[str]:
    labels = labels_of((left, right)) - {"global_rank"}  # by the number of GPUs, say, on each machine
    if "devices" in right.labels:
        labels |= {"modulo-devices"}
    counts = "counter" in left.labels or (left.known is not None and left.known.loop is not None)
    return labels | {"every-nth"} if counts else labels


def _times(a: Any, b: Any) -> Any:
    return UNKNOWN if isinstance(a, str | tuple) or isinstance(b, str | tuple) else a * b


def _power(a: Any, b: Any) -> Any:
    return a**b if abs(a) < 1 << 16 and 0 <= b < 32 else UNKNOWN


def _modulo(a: Any, b: Any) -> Any:
    return UNKNOWN if isinstance(a, str) else a % b


_SUM, _DIFFERENCE = Calculation(operator.add, _plain), Calculation(operator.sub, _difference)
_PRODUCT, _QUOTIENT = Calculation(_times, _product), Calculation(operator.truediv, _quotient)
_WHOLE, _REMAINDER = Calculation(operator.floordiv, _quotient), Calculation(_modulo, _remainder)
_POWER, _OTHER = Calculation(_power, _plain), Calculation(None, _plain)

_BY_NAME: Final = {
    name: calculation
    for names, calculation in {
        "add iadd": _SUM,
        "sub subtract isub": _DIFFERENCE,
        "mul multiply mult imul": _PRODUCT,
        "div divide true_divide truediv itruediv": _QUOTIENT,
        "floor_divide floordiv": _WHOLE,
        "mod fmod remainder": _REMAINDER,
        "pow power": _POWER,
        "matmult bitand bitor bitxor lshift rshift": _OTHER,
    }.items()
    for name in names.split()
}


def named(name: str) -> Calculation | None:
    """By an operator's class, a method or a function: ``Div``, ``div_``, ``__truediv__``, ``_foreach_div_``."""
    return _BY_NAME.get(name.lower().removeprefix("_foreach_").strip("_"))


def calculated(calculation: Calculation, left: Value, right: Value, line: int = 0) -> Value:
    """The result of a calculation."""
    known = combined(calculation.points, left.known, right.known) if calculation.points is not None else None
    labels = calculation.labels(left, right)
    if calculation is _SUM and left.items is not None and right.items is not None:
        items, whole = bounded([*left.items, *right.items])
        length = combined(operator.add, left.length, right.length)
        own = frozenset() if whole and not (left.labels | right.labels) & {"some"} else frozenset({"some"})
        return Value(left.kind, labels | own, items=items, length=length)
    if calculation is _SUM and left.kind in ("parameters", "buffers"):
        return left
    if calculation is _PRODUCT and left.items is not None:
        length = combined(operator.mul, left.length, right.known)
        return Value(left.kind, labels | (left.labels & {"some"}), items=left.items, length=length)
    if calculation is _QUOTIENT and "path" in (left.kind, right.kind):
        return Value("path", labels, known=combined(lambda a, b: f"{a}/{b}" if a else b, left.known, right.known))
    if calculation is _QUOTIENT and isinstance(left.default, str):
        return Value("scalar", labels)
    if known is not None:
        return Value("scalar", labels, known=known, line=line)
    if left.kind in TENSORS or right.kind in TENSORS:
        return Value("tensor", labels, length=left.length if left.kind == "tensor" else right.length, line=line)
    return Value("unknown", labels, line=line)


# --- of one operand, or any number of them

_DETACHES: Final = words(
    "item tolist numpy detach data argmax argmin argsort eq ne lt gt le ge isfinite isnan isinf tensor as_tensor "
    "from_numpy bool int long any all nonzero bincount histc"
)
"""Nothing that these give has a gradient."""
_OVERALL: Final = words("norm vector_norm isfinite isnan isinf any all item max min mean sum amax amin numel size dim")
"""A number about gradients is no gradient."""
_WEIGHTS: Final = {"sum": "sum", "mean": "mean", "nansum": "sum", "nanmean": "mean", "average": "mean"}
_MARKS: Final = {
    "unique": "unique",
    "nonzero": "own-size",
    "masked_select": "own-size",
    "randperm": "shuffled",
    "permutation": "shuffled",
    "count_nonzero": "count",
}
_CONVERTS: Final = words(
    "item float int long double half bfloat16 to cpu cuda clone detach contiguous abs round max min tensor as_tensor "
    "numpy ceil floor neg data"
)
"""What these give is as large as what they are given."""


def computed(name: str, operands: list[Value]) -> frozenset[str]:
    """What the result of any other method or function of tensors is made of."""
    labels = labels_of(operands)
    if name in _DETACHES:
        labels = detached(labels)
    if name in _OVERALL:
        labels -= {"gradient"}
    if name in _WEIGHTS:
        labels = labels - {"sum", "mean"} | {_WEIGHTS[name]}
        if _WEIGHTS[name] == "sum" and "graph" not in labels:
            labels |= {"count"}
    if name in _MARKS:
        labels |= {_MARKS[name]}
    if name in _CONVERTS and operands:
        labels |= operands[0].labels & FACTORS
    if name == "reciprocal" and operands:
        labels |= _quotient(Value(), operands[0]) & FACTORS
    return labels


_PLACES: Final = words(
    "device dtype map_location device_ids output_device device_map torch_dtype non_blocking pin_memory"
)


def content(positional: Iterable[Value], named: dict[str, Value]) -> list[Value]:
    """Of arguments those that a result is made of. On which device it lies, a rank's own mostly, makes it no other."""
    given = [*positional, *(value for name, value in named.items() if name not in _PLACES)]
    return [value for value in given if value.kind != "device"]
