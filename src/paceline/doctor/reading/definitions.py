"""Definitions and imports: the script's functions and classes, its own files, and everybody else's by name."""

from __future__ import annotations

import ast
from typing import Final

from paceline.doctor.reading.assignments import Assignments
from paceline.doctor.reading.machine import Class, Frame, Function, Scope
from paceline.doctor.reading.program import Module
from paceline.doctor.reading.values import RANKS, Known, Value, constant, words

__all__ = ["Definitions"]


_ON_RANK_0: Final = words(
    "rank_zero_only rank_zero master_only main_process_only on_main_process main_process_first_only"
)
"""Decorators of well-known libraries: the other ranks do nothing there."""


class Definitions(Assignments):
    """Functions, classes and modules."""

    def _do_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        code = Function(node, self.frame.scope, self.defaults(node.args), yields=_yields(node))
        value = Value("function", name=node.name, code=code)
        for decorator in reversed(node.decorator_list):
            value = self._decorated(value, decorator)
        self.write(self.frame.scope.holder(node.name), node.name, value)

    _do_asyncfunctiondef = _do_functiondef

    def _decorated(self, value: Value, node: ast.expr) -> Value:
        decorator = self.evaluate(node)
        code = value.code
        if not isinstance(code, Function):
            return value
        short = decorator.name.rpartition(".")[2]
        if decorator.kind != "function" and short in _ON_RANK_0:
            code.ranks = Known((True, *[False] * (RANKS - 1)))
            return value
        match short:
            case "property" | "cached_property":
                code.flavour = "property"
            case "staticmethod":
                code.flavour = "static"
            case "classmethod":
                code.flavour = "class"
            case "no_grad" | "inference_mode":
                code.contexts = (*code.contexts, Value("context", name="no_grad"))
            case _ if decorator.kind == "context":
                code.contexts = (*code.contexts, decorator)
            case _ if decorator.kind == "function" and isinstance(node, ast.Name | ast.Call):
                made = self.call(decorator, [value], {}, node)
                return made if made.kind == "function" else value
        return value

    def _do_classdef(self, node: ast.ClassDef) -> None:
        bases = tuple(self.evaluate(base) for base in node.bases)
        cls = Value("class", name=node.name, code=Class(node, self.frame.scope, bases), line=node.lineno)
        outer = self.frame.scope
        inner = Scope(cls.fields, outer.module, outer)
        self.frames.append(Frame(inner, node, depth=len(self.levels)))
        try:
            self.execute(node.body)
        finally:
            self.frames.pop()
        for held in cls.fields.values():
            if held.kind == "function" and isinstance(held.code, Function):
                held.code.home = cls
                held.code.scope = outer
        self.write(outer.holder(node.name), node.name, cls)

    def _do_import(self, node: ast.Import) -> None:
        for alias in node.names:
            module = self._import(alias.name)
            if alias.asname is None and "." in alias.name:
                top = alias.name.split(".")[0]
                module = self._import(top)
                self.write(self.frame.scope.holder(top), top, module)
            else:
                name = alias.asname or alias.name
                self.write(self.frame.scope.holder(name), name, module)

    def _do_importfrom(self, node: ast.ImportFrom) -> None:
        source = node.module or ""
        if node.level:
            here = self.frame.scope.module.package
            parts = here[: len(here) - node.level + 1]
            source = ".".join([*parts, *([node.module] if node.module else [])])
        found = self._import(source) if source else Value("unknown")
        for alias in node.names:
            if alias.name == "*":
                if found.kind == "python_module":
                    for name, value in found.code.names.items():
                        if not name.startswith("_"):
                            self.write(self.frame.scope.names, name, value)
                elif source:
                    self.frame.scope.module.stars.append(source)
                continue
            name = alias.asname or alias.name
            if found.kind == "python_module":
                value = found.code.names.get(alias.name) or self._import(f"{source}.{alias.name}", only_local=True)
            elif source:
                value = self.named(f"{source}.{alias.name}", used=False)
            else:
                value = self._import(alias.name, only_local=True)
            self.write(self.frame.scope.holder(name), name, value)

    def _import(self, name: str, *, only_local: bool = False) -> Value:
        """A module: a local file is walked, once; anything else is known by its name."""
        if name.split(".")[0] in ("torch", "numpy", "os", "sys"):
            return self.named(name, used=False)
        known = name in self.program.modules
        self.look_at_the_clock()  # parsing takes no steps
        module = self.program.find(name) if known or self.steps_left > 0 else None
        if module is None:
            return Value() if only_local else self.named(name, used=False)
        if not known:
            self._walk_module(module)
        return Value("python_module", name=name, code=module)

    def _walk_module(self, module: Module) -> None:
        module.names["__name__"] = constant(module.name)
        outer = self.frames, self.loops, self.within
        self.frames, self.loops, self.within = [Frame(Scope(module.names, module), depth=len(self.levels))], [], []
        try:
            self.execute(module.tree.body)
        finally:
            self.frames, self.loops, self.within = outer


def _yields(node: ast.AST) -> bool:
    """Whether a function is a generator: its own body yields, not that of one inside."""
    stack = list(ast.iter_child_nodes(node))
    while stack:
        child = stack.pop()
        if isinstance(child, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            stack += ast.iter_child_nodes(child)
    return False
