"""Assignments: what names, attributes and elements hold from then on."""

from __future__ import annotations

import ast

from paceline.doctor.reading.calls import Calls, doubted_by_name
from paceline.doctor.reading.flows import bounded, detached, doubted, labels_of
from paceline.doctor.reading.machine import Frame
from paceline.doctor.reading.values import Value

__all__ = ["Assignments"]


class Assignments(Calls):
    """Assigns, in all of Python's ways."""

    def _do_assign(self, node: ast.Assign) -> None:
        value = self.evaluate(node.value)
        for target in node.targets:
            self.assign(target, value)

    def _do_annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value))

    def _do_augassign(self, node: ast.AugAssign) -> None:
        old, value = self.evaluate(node.target), self.evaluate(node.value)
        made = self.binary(old, node.op, value, node)
        if old.kind in ("tensor", "buffer", "grad", "parameter"):
            self.changed_in_place(old, made, node)
            if isinstance(node.target, ast.Subscript):
                self.assign(node.target, made)  # a part of a tensor is that tensor's
            return
        if old.items is not None and isinstance(node.op, ast.Add):
            old.labels |= labels_of((value,)) | self.implied() | (made.labels & {"some"})
            old.items, old.length = made.items, made.length if not self.loops else None
            old.labels |= {"some"} if self.loops else set()
            return
        if isinstance(node.target, ast.Attribute) and not self.constructing:
            made.known, made.labels = None, made.labels | {"counter"}  # another value the next time
        self.assign(node.target, made)

    @property
    def constructing(self) -> bool:
        """Whether an object is being made."""
        return any(_is_init(frame) for frame in self.frames)

    def _being_made(self, value: Value) -> bool:
        """Whether it is such an object itself, or a parameter of one."""
        owner = value.fields.get("owner", value) if value.kind == "parameter" else value
        made = (next(iter(frame.scope.names.values()), None) for frame in self.frames if _is_init(frame))
        return any(owner is other for other in made)

    def assign(self, target: ast.expr, value: Value) -> None:
        match target:
            case ast.Name() | ast.Attribute() if (called := doubted_by_name(_name_of(target), value)) is not value:
                self.assign(target, called)
            case ast.Name():
                self.write(self.frame.scope.holder(target.id), target.id, value)
            case ast.Tuple() | ast.List():
                self._unpack(target.elts, value)
            case ast.Starred():
                self.assign(target.value, Value("list", labels_of((value,)) | {"some"}, items=value.items))
            case ast.Attribute():
                for owner in (receiver := self.evaluate(target.value)).each():
                    self._set_attribute(owner, target.attr, value, target)
                if receiver.options and not any(True for _ in receiver.each()):
                    return
            case ast.Subscript():
                self._set_item(self.evaluate(target.value), self.evaluate(target.slice), value, target)

    def _unpack(self, targets: list[ast.expr], value: Value) -> None:
        if value.options:
            value = next((option for option in value.each() if option.items is not None), value)
        items = value.items
        starred = any(isinstance(target, ast.Starred) for target in targets)
        if items is not None and "some" not in value.labels and len(items) == len(targets) and not starred:
            for target, item in zip(targets, items, strict=True):
                self.assign(target, item)
            return
        for index, target in enumerate(targets):
            known_first = items is not None and "some" not in value.labels and starred and index < len(items)
            if items is not None and known_first and not any(isinstance(t, ast.Starred) for t in targets[: index + 1]):
                self.assign(target, items[index])
            else:
                self.assign(target, self.item(value, Value("unknown"), target) if value.kind != "lazy" else Value())

    def _set_attribute(self, owner: Value, name: str, value: Value, node: ast.AST) -> None:
        if owner.kind in ("api", "python_module"):
            if owner.kind == "api":
                self._override(f"{owner.name}.{name}", value, node)
            else:
                self.write(owner.code.names, name, value)
            return
        held = owner.fields.get(name)
        if held is not None and held.kind == "buffer":
            added = labels_of((value,)) | self.implied()
            self.event("buffer", node, name=held.name, subject=held, arguments={"value": Value(labels=added)})
            return
        minded = owner.kind in ("module", "ddp", "dataset", "stream", "parameter", "loader", "sampler")
        if minded and not self._being_made(owner):
            self.event("store", node, name=name, subject=owner, arguments={"value": value})
        if self.loops and held is not None and None not in (held.known, value.known) and held.known != value.known:
            value = Value("unknown", value.labels | {"counter"})  # another one the next time
        if owner.kind == "parameter" and name == "grad":
            self.event("grad", node, subject=Value("grad", fields={"of": owner}), arguments={"value": value})
        self.write(owner.fields, name, value)

    def _override(self, name: str, value: Value, node: ast.AST) -> None:
        """A name of a library that the script sets to something of its own."""
        if name in ("sys.stdout", "builtins.print"):
            self.event("stdout", node, name=name, arguments={"value": value})
        self.write(self.overrides, name, value)

    def _set_item(self, owner: Value, key: Value, value: Value, node: ast.AST) -> None:
        if owner.name == "os.environ":
            self.event("environment", node, name=str(key.only), arguments={"value": value})
            return
        for option in owner.each():
            if option.kind in ("dict", "namespace") and isinstance(name := key.only, str):
                self.write(option.fields, name, value)
            elif option.kind == "settings":
                self.event("rate", node, name=str(key.default), subject=option, arguments={"value": value})
            elif option.kind in ("parameter", "buffer"):
                self.changed_in_place(option, value, node)
            elif option.kind == "module":
                self.event("store", node, name=str(key.default), subject=option, arguments={"value": value})
                self.write(option.fields, str(key.default), value)
            else:
                added = labels_of((value,)) | detached(labels_of((key,))) | self.implied()
                option.labels |= doubted(added) if isinstance(key.default, str) else added
                if "gathered" in option.labels and "rank" in key.labels:
                    for part in (option, *(option.items or ())):
                        part.labels -= {"gathered"}
                if option.items is not None and option.kind != "tensor":
                    self.write(option.fields, "*", value)
                    option.items, _ = bounded([*option.items, value])
                    option.labels |= {"some"}

    def _do_global(self, node: ast.Global) -> None:
        for name in node.names:
            self.frame.scope.elsewhere[name] = self.frame.scope.module.names

    def _do_nonlocal(self, node: ast.Nonlocal) -> None:
        for name in node.names:
            scope = self.frame.scope.parent
            while scope is not None and name not in scope.names:
                scope = scope.parent
            if scope is not None:
                self.frame.scope.elsewhere[name] = scope.names

    def _do_delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                self.evaluate(target.value)


def _name_of(target: ast.Name | ast.Attribute) -> str:
    return target.id if isinstance(target, ast.Name) else target.attr


def _is_init(frame: Frame) -> bool:
    return isinstance(frame.code, ast.FunctionDef) and frame.code.name == "__init__"
