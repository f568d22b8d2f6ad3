"""What objects of the script have: methods and fields of their classes, modules within modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath

from paceline.doctor.reading.machine import Class, Function
from paceline.doctor.reading.values import Value, combined

__all__ = ["bound", "class_field", "method_of", "of_path", "submodules"]


def bound(method: Value, owner: Value) -> Value:
    """A method of ``owner``."""
    code: Function = method.code
    return Value("function", name=method.name, code=replace(code, owner=owner))


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


def of_path(value: Value, name: str) -> Value | None:
    """What ``pathlib`` tells of a path by its text alone."""
    if name == "parents":
        return Value("path", value.labels, "parents", value.known)
    if name in ("parent", "name", "stem", "suffix"):
        known = combined(lambda text: str(getattr(PurePath(text), name)), value.known)
        return Value("path" if name == "parent" else "scalar", value.labels, known=known)
    return None
