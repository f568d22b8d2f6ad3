"""What calls by name give: torch's functions and methods, what a collective makes the same, and a few others."""

from __future__ import annotations

import ast
import operator
from dataclasses import replace
from typing import Final

from paceline.doctor.reading.arithmetic import TENSORS, Calculation, calculated, computed, content, named
from paceline.doctor.reading.flows import carried, detached, joined, labels_of, part_labels
from paceline.doctor.reading.forwards import loss_of
from paceline.doctor.reading.knowledge import MEAN_LOSSES, Api, speaks_of_ranks
from paceline.doctor.reading.samples import number_of, split
from paceline.doctor.reading.seeds import drawn, drawn_from, picks, seed, seed_workers, seeded
from paceline.doctor.reading.values import (
    NONE,
    ORDERS,
    RANKS,
    UNKNOWN,
    VARYING,
    Known,
    Value,
    combined,
    constant,
    numbered,
    words,
)
from paceline.doctor.reading.walker import Walker

__all__ = ["agreed", "known_call", "tensor_call", "tensor_method"]

_DRAWS: Final = words(
    "rand randn randint randperm normal bernoulli multinomial rand_like randn_like randint_like poisson"
)
_COPIED: Final = words("module ddp parameter buffer list tuple dict namespace instance")
_FILLED: Final = ("tensor", "tensors", "tensor_list", "output_tensor", "object_list", "output", "gather_list")
"""Of collectives: what holds the same on all ranks afterwards."""
_SIZED: Final = _DRAWS | words("zeros ones empty full")
_DRAWS_INTO: Final = words("uniform_ normal_ bernoulli_ random_ exponential_ log_normal_ cauchy_ geometric_")
_FIXED: Final = words("zeros_ ones_ constant_ eye_ dirac_")
_ELEMENTWISE: Final = words(
    "clone detach float double half bfloat16 long int bool cpu contiguous type_as square abs neg sqrt exp log sin cos "
    "tan tanh relu sigmoid sign floor ceil round clamp clip masked_fill logical_not softmax log_softmax pin_memory"
)
_BY_DIMENSION: Final = words(
    "sum mean prod std var norm max min amax amin argmax argmin all any unsqueeze squeeze flip flatten cumsum sort "
    "argsort topk softmax log_softmax"
)
"""As long as before, along any dimension but the first."""


def known_call(
    reader: Walker, name: str, known: Api, arguments: dict[str, Value], positional: list[Value], node: ast.AST
) -> Value:
    """A call of which the tables know something."""
    labels = labels_of(content((), arguments))
    if known.role == "checkpoint" and positional:
        reader.event(known.role, node, name=name, arguments=arguments)
        return reader.call(positional[0], positional[1:], {}, node)
    result = _made(reader, name, known, arguments, positional, labels)
    if not result.line:
        result.line, result.path = getattr(node, "lineno", 0), reader.path
    if known.role:
        reader.event(known.role, node, name=name, arguments=arguments, result=result)
    if known.role == "scheduler" and (curve := arguments.get("lr_lambda")) is not None and curve.kind == "function":
        arguments["rates"] = reader.call(curve, [Value()], {}, node)
    elif known.role == "loader":
        seed_workers(reader, arguments)
    elif known.role == "collective":
        _agree(reader, name, arguments)
    elif known.role == "seed":
        seed(reader, name, next(iter(arguments.values()), NONE))
    elif known.role == "shuffle" and positional:
        stream = "numpy" if name.startswith("numpy") else "python"
        positional[0].labels |= reader.seeds.get(stream, frozenset()) | {"shuffled"}
    return result


def _made(
    reader: Walker, name: str, known: Api, arguments: dict[str, Value], positional: list[Value], labels: frozenset[str]
) -> Value:
    match name:
        case "torch.distributed.get_rank" if not arguments.get("group", NONE).is_none:
            return Value("unknown", frozenset({"rank"}))
        case "torch.distributed.get_rank":
            return Value("scalar", frozenset({"rank", "global_rank"}), known=Known((0, 1)))
        case "torch.distributed.get_world_size":
            return Value("scalar", frozenset({"world", "world-multiple"}), "world size", Known((RANKS,)))
        case "torch.distributed.is_initialized":
            return constant(reader.trace.any("init") or reader.spawned)
        case "torch.distributed.is_available":
            return constant(True)
        case "torch.cuda.is_available":
            return reader.overrides.setdefault("has cuda", Value("unknown", name=name))
        case "torch.cuda.device_count":
            return Value("unknown", frozenset({"devices"}), name)
        case "torch.initial_seed" | "torch.utils.data.get_worker_info":
            return Value("unknown", frozenset({"worker-seed"}), name)
        case "torch.nn.Sequential":
            return _module(reader, name, numbered(positional))
        case "torch.nn.ModuleList" | "torch.nn.ModuleDict":
            held = arguments.get("modules", Value())
            fields = dict(held.fields) if held.items is None else numbered(held.items)
            module = _module(reader, name, fields)
            module.length, module.labels = held.length, module.labels | (held.labels & {"some", "open"})
            return module
        case "copy.deepcopy":
            return _copied(arguments.get("x", Value()), {})
        case "copy.copy":
            value = arguments.get("x", Value())
            return replace(value, fields=dict(value.fields))
        case "torch.utils.data.random_split" | "sklearn.model_selection.train_test_split":
            return split(reader, name, arguments)
        case "torch.set_grad_enabled":
            return Value("context", name="no_grad" if arguments.get("mode", NONE).only is False else "grad_mode")
    if known.makes == "first":
        return next(iter(arguments.values()), Value())
    if known.makes == "context":
        short = {"no_grad": "no_grad", "inference_mode": "no_grad", "Join": "join"}
        last = name.rpartition(".")[2]
        return Value("context", name=short.get(last, last), fields=dict(arguments))
    if known.makes == "module":
        return _module(reader, name, dict(arguments))
    if known.makes == "generator":
        unseeded = not arguments and not name.startswith("torch")
        return Value("generator", frozenset({"rng"}) if unseeded else seeded(labels), name)
    if known.makes in ("dataset", "sampler", "loader"):
        length = number_of(name, arguments, positional)
        return Value(
            known.makes,
            labels & (VARYING | ORDERS),
            name,
            fields=dict(arguments),
            length=length,
        )
    if known.makes == "parameter":
        return Value("parameter", frozenset({"drawn"}) if labels & VARYING else frozenset(), fields=dict(arguments))
    if not known.makes:
        return Value("unknown", labels, name, fields=dict(arguments))
    return Value(known.makes, labels & VARYING, name, fields=dict(arguments))


def _module(reader: Walker, name: str, fields: dict[str, Value]) -> Value:
    return Value("module", drawn(reader), name, fields=fields)


def tensor_call(reader: Walker, name: str, positional: list[Value], keywords: dict[str, Value], node: ast.AST) -> Value:
    """Any other function of torch or numpy: a tensor made of its arguments."""
    parent, _, last = name.rpartition(".")
    operands = content(positional, keywords)
    if parent == "torch.nn.functional" and last in MEAN_LOSSES:
        return loss_of(keywords, operands)
    if (calculation := named(last)) is not None and len(operands) >= 2:
        return _calculated(reader, calculation, last, operands, node)
    labels = computed(last, operands)
    if parent == "torch.nn.init" and positional:
        drawn = drawn_from(reader, keywords) if last not in _FIXED else frozenset()
        reader.changed_in_place(positional[0], Value(labels=labels | drawn), node)
        return positional[0]
    if last in _DRAWS and parent == "torch":
        labels |= drawn_from(reader, keywords)
    elif parent in ("numpy.random", "random"):
        stream = "numpy" if parent.startswith("numpy") else "python"
        return picks(last, labels | reader.seeds[stream]) or Value("unknown", labels | reader.seeds[stream], name)
    return Value("tensor", labels, length=_length_of(parent, last, positional))


def _calculated(reader: Walker, calculation: Calculation, name: str, operands: list[Value], node: ast.AST) -> Value:
    """``torch.div(a, b)``, ``a.div(b)``; ``a.div_(b)`` and ``torch._foreach_div_(all, b)`` change the first."""
    left, right = operands[:2]
    made = calculated(calculation, left, right, getattr(node, "lineno", 0))
    if not name.endswith("_") or name.endswith("__"):
        return made
    for part in (left, *(left.items or ())) if left.kind in ("list", "tuple") else (left,):
        reader.changed_in_place(part, made, node)
    return left


def tensor_method(
    reader: Walker, value: Value, name: str, arguments: list[Value], keywords: dict[str, Value], node: ast.AST
) -> Value:
    """Any method of a tensor, or of something unknown."""
    operands = [value, *content(arguments, keywords)]
    is_tensor = value.kind in TENSORS or bool(value.labels & {"graph", "eval", "gradient"})
    if is_tensor and (calculation := named(name)) is not None and len(operands) >= 2:
        return _calculated(reader, calculation, name, operands, node)
    if name in ("size", "numel", "dim"):
        return _size(value, name, arguments)
    labels = computed(name, operands) if is_tensor else computed(name, [Value(labels=part_labels(value))])
    if not is_tensor:
        labels |= carried(operands[1:]) | speaks_of_ranks(name)
        labels |= {"exists"} if name in ("exists", "is_file", "is_dir") else frozenset()
    if name in _DRAWS_INTO:
        labels |= drawn_from(reader, keywords)
    if name.endswith("_") and not name.startswith("_") and (is_tensor or value.kind == "unknown"):
        if value.kind != "grad" or name not in ("zero_", "detach_", "requires_grad_"):
            reader.changed_in_place(value, Value(labels=detached(labels)), node)
        return value
    if name in ("item", "tolist"):
        return Value("unknown", labels)
    if name in ("chunk", "split", "tensor_split") and arguments and (is_tensor or "own-size" in value.labels):
        count = _chunks if name == "chunk" else lambda n, k: -(-n // k)
        parts = combined(count, value.length, arguments[0].known)
        piece = Value("tensor", labels - {"own-size"})  # they are of one size, but for what is left over
        return Value("list", labels | {"some"}, items=[piece], length=parts)
    kind = "tensor" if value.kind in TENSORS else "unknown"
    along = arguments[0].default if arguments else keywords.get("dim", NONE).default
    keeps = name in _ELEMENTWISE or (name in _BY_DIMENSION and isinstance(along, int) and along > 0)
    return Value(kind, labels, length=value.length if keeps else None)


def _size(value: Value, name: str, arguments: list[Value]) -> Value:
    where = arguments[0].default if arguments else UNKNOWN
    length = value.length if where == 0 or (name == "numel" and value.kind == "tensor") else None
    if length is not None and length.only is not UNKNOWN:
        own = frozenset({"size"})
    else:
        own = value.labels & {"rank"} | {"size"}
    known = length if name == "size" else None
    return Value("scalar" if known else "unknown", own, known=known)


def _agree(reader: Walker, name: str, arguments: dict[str, Value]) -> None:
    source = next((arguments[n] for n in ("tensor", "input_tensor", "obj") if n in arguments), None)
    for parameter in _FILLED:
        if (value := arguments.get(parameter)) is None:
            continue
        if parameter == "tensor" and name.rpartition(".")[2] in ("all_gather", "gather", "scatter"):
            continue
        has_graph = source is not None and "graph" in source.labels and ".nn." not in name and not _no_grad(reader)
        is_gathered = "gather" in name and has_graph
        for part in (value, *(value.items or ())):
            agreed(part, {"reduced", "gathered"} if is_gathered else {"reduced"})


def _no_grad(reader: Walker) -> bool:
    return any(context.name == "no_grad" for context in reader.within)


def agreed(value: Value, labels: set[str]) -> None:
    """It is the same on all ranks from now on."""
    if value is NONE or value.is_none:
        return
    value.labels = (value.labels - VARYING - {"shard"}) | labels
    for chosen in ("if", "else"):
        if (part := value.fields.get(chosen)) is not None and part.kind in ("scalar", "unknown", "tensor"):
            agreed(part, labels)
    if value.known is not None:
        value.known, value.kind = None, "unknown"


def _copied(value: Value, copies: dict[int, Value]) -> Value:
    """A deep copy: modules and their parameters, and what holds them; each once, however often it is held."""
    if (made := copies.get(id(value))) is not None:
        return made
    if value.options:
        return joined([_copied(option, copies) for option in value.options])
    if value.kind not in _COPIED:
        return value
    made = copies[id(value)] = replace(value)
    made.fields = {n: held if n == "__class__" else _copied(held, copies) for n, held in value.fields.items()}
    made.items = [_copied(item, copies) for item in value.items] if value.items is not None else None
    return made


def _length_of(parent: str, name: str, arguments: list[Value]) -> Known | None:
    """How many rows a new tensor has."""
    if not arguments:
        return None
    first = arguments[0]
    if parent in ("torch", "numpy") and name == "arange":
        bounds = [bound.known for bound in arguments[:3]]
        return combined(lambda *parts: len(range(*parts)), *bounds)
    if parent in ("torch", "numpy") and name in ("linspace", "logspace"):
        return combined(operator.index, arguments[2].known) if len(arguments) > 2 else None
    if parent in ("torch", "numpy") and name in _SIZED:
        shape = next((a for a in arguments if a.items), first) if name == "randint" else first
        return combined(operator.index, shape.items[0].known if shape.items else shape.known)
    made_of = first.kind == "tensor" or name in ("tensor", "as_tensor", "stack", "from_numpy")
    return first.length if made_of and name not in ("cat", "concat", "unique") else None


def _chunks(length: int, parts: int) -> int:
    return -(-length // -(-length // parts))
