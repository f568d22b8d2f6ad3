"""What lists, dicts, texts and paths do."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any, Final

from paceline.doctor.reading.expressions import order_of
from paceline.doctor.reading.flows import bounded, joined, labels_of, part_labels, tested
from paceline.doctor.reading.machine import Machine
from paceline.doctor.reading.values import NONE, UNKNOWN, Value, combined, words

__all__ = ["container_method"]

_OF_TEXT: Final = words("strip rstrip lstrip lower upper startswith endswith replace format")


def container_method(
    machine: Machine, value: Value, name: str, arguments: list[Value], keywords: dict[str, Value]
) -> Value | None:
    """Of a list, dict or string; ``None`` if it is no such method."""
    first = arguments[0] if arguments else None
    if value.kind in ("list", "set") and name in (
        "append",
        "add",
        "insert",
        "extend",
        "update",
        "remove",
        "sort",
        "reverse",
    ):
        _changed(machine, value, name, arguments)
        return NONE
    if value.kind in ("dict", "namespace", "state_dict"):
        return _of_dict(machine, value, name, first, arguments)
    if value.kind == "path" and name in ("resolve", "absolute", "expanduser", "as_posix"):
        return value
    if value.kind == "path" and name == "joinpath":
        known = combined(lambda *parts: str(PurePath(*parts)), value.known, *(part.known for part in arguments))
        return Value("path", labels_of([value, *arguments]), known=known)
    if value.kind in ("scalar", "path") and isinstance(value.default, str) and name in _OF_TEXT:
        function = _formatted if name == "format" else lambda text, *rest: getattr(text, name)(*rest)
        known = combined(function, value.known, *(a.known for a in arguments))
        labels = tested((value, *arguments, *keywords.values()))
        return Value("scalar", labels, known=None if keywords else known)
    return None


def _changed(machine: Machine, value: Value, name: str, arguments: list[Value]) -> None:
    value.labels |= machine.implied()
    if name == "sort":
        value.labels -= {"listing", "hash-order"}
    elif name in ("extend", "update"):
        value.labels |= labels_of(arguments)
        given = [item for x in arguments for item in (x.items or [Value(labels=labels_of((x,)))])]
        value.items, _ = bounded([*(value.items or []), *given])
        value.length = None
    elif name not in ("remove", "reverse") and arguments:
        value.items = [*(value.items or [])[-32:], arguments[-1]]
        value.labels |= {"some"} if machine.loops else set()
        value.length = None if machine.loops else combined(lambda size: size + 1, value.length)


def _of_dict(machine: Machine, value: Value, name: str, first: Value | None, arguments: list[Value]) -> Value | None:
    key = first.only if first is not None else UNKNOWN
    held = list(value.fields.values()) if value.kind == "dict" else []
    match name:
        case "get" | "pop" | "setdefault" if isinstance(key, str):
            if key in value.fields:
                return value.fields[key]
            if value.kind == "dict" and "open" not in value.labels:
                return arguments[1] if len(arguments) > 1 else NONE
            return joined([Value(labels=part_labels(value)), *(arguments[1:] or [NONE])])
        case "items":
            if value.kind == "state_dict":
                pair = Value("tuple", items=[Value(), Value("parameter", value.labels, fields=dict(value.fields))])
                return Value("list", frozenset({"some"}), items=[pair])
            pair = Value("tuple", items=[Value("scalar"), joined(held) if held else Value(labels=part_labels(value))])
            return Value("list", order_of(value) | {"some"}, items=[pair])
        case "values":
            if value.kind == "state_dict":
                return Value("state_dict", value.labels, fields=value.fields)
            return Value("list", value.labels | {"some"}, items=held or None)
        case "keys":
            return Value("list", order_of(value) | {"some"})
        case "update" if first is not None and value.kind == "dict":
            for field, held_value in first.fields.items():
                machine.write(value.fields, field, held_value)
            return NONE
        case "copy" | "clone" | "deepcopy":
            return Value(value.kind, value.labels, fields=dict(value.fields))
    return None


def _formatted(text: str, *values: Any) -> Any:
    """``text.format(...)``, unless that asks for a width: it may be any."""
    return UNKNOWN if re.search(r"\d{3}|{[^}]*{", text) else text.format(*values)
