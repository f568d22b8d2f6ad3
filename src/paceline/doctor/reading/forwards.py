"""What calling a module gives: what its forward does, and which call a loss came from."""

from __future__ import annotations

import ast

from paceline.doctor.reading.flows import labels_of
from paceline.doctor.reading.knowledge import MEAN_LOSSES
from paceline.doctor.reading.lookup import bound, method_of, submodules
from paceline.doctor.reading.values import Value, numbered
from paceline.doctor.reading.walker import Walker

__all__ = ["forward", "loss_of"]


def forward(reader: Walker, module: Value, arguments: list[Value], keywords: dict[str, Value], node: ast.AST) -> Value:
    """Calls a module. Its result carries which call it came from, to be found again in a loss."""
    if module.name.rpartition(".")[2] in MEAN_LOSSES:
        return loss_of(module.fields, [*arguments, *keywords.values()])
    if not reader.spend():
        return Value("tensor", labels_of([*arguments, *keywords.values()]))
    event = reader.event("forward", node, subject=module, arguments={**numbered(arguments), **keywords})
    graph = frozenset({"graph"}) if event.with_grad else frozenset({"eval"})
    labels = labels_of([*arguments, *keywords.values()]) | graph
    if not reader.inside:
        labels |= {f"forward:{event.number}"}
        reader.forward_from = len(event.under)
    elif len(reader.inside) == 2:  # a part of what DDP wraps
        labels |= {f"part:{reader.trace.identity(module)}"}
    reader.inside.append(module)
    try:
        result = _run_forward(reader, module, arguments, keywords, node)
    finally:
        reader.inside.pop()
    if result is None:
        result = Value("tensor", length=arguments[0].length if arguments else None)
    event.result = _relabelled(result, labels, without=frozenset({"divided", "sum", "count", "own-mean"}))
    return event.result


def _run_forward(
    reader: Walker, module: Value, arguments: list[Value], keywords: dict[str, Value], node: ast.AST
) -> Value | None:
    if module.kind == "ddp":
        inner = module.fields.get("module", Value("module"))
        return forward(reader, inner.of_kind("module", "ddp") or Value("module"), arguments, keywords, node)
    if (method := method_of(module, "forward")) is not None:
        return reader.call(bound(method, module), arguments, keywords, node)
    if module.name == "torch.nn.Sequential":
        result = arguments[0] if arguments else Value("tensor")
        for part in submodules(module):
            result = forward(reader, part, [result], {}, node)
        return result
    return None


def loss_of(options: dict[str, Value], parts: list[Value]) -> Value:
    reduction, ignores = options.get("reduction"), "ignore_index" in options
    how = reduction.only if reduction is not None else "mean"
    labels = labels_of(parts) - {"sum", "mean"}
    if how in ("mean", "sum"):
        labels |= {how}
    if how == "mean" and ignores:
        labels |= {"mean-of-some"}
    return Value("tensor", labels)


def _relabelled(value: Value, labels: frozenset[str], without: frozenset[str], depth: int = 3) -> Value:
    """The same tensor, or tuple or dict of tensors, with other labels."""
    if value.kind in ("module", "ddp", "function", "class") or depth == 0:
        return value
    items = None
    if value.items is not None:
        items = [_relabelled(item, labels, without, depth - 1) for item in value.items[:64]]
    fields = value.fields
    if value.kind == "dict":
        fields = {name: _relabelled(held, labels, without, depth - 1) for name, held in fields.items()}
    options = tuple(_relabelled(option, labels, without, depth - 1) for option in value.options)
    if value.is_none:
        return value
    kind = "tensor" if value.kind in ("unknown", "scalar") else value.kind
    made = (value.labels - without) | (labels - without)
    return Value(kind, made, value.name, None, fields, items, options, value.code, value.length, value.line)
