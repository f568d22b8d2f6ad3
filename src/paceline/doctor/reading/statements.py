"""Statements: how the script goes on, and what it leaves in its names. `Reader` walks a whole script."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Final

from paceline.doctor.reading.calls import Calls
from paceline.doctor.reading.machine import Class, Flow, Frame, Function, Scope
from paceline.doctor.reading.objects import bound, loaders_in, method_of
from paceline.doctor.reading.program import Module
from paceline.doctor.reading.trace import Loop
from paceline.doctor.reading.values import NONE, Value, combined, constant, labels_of

__all__ = ["Reader"]

MAX_BLOCKS: Final = 120
"""How deeply statements nest, all functions together."""


class Reader(Calls):
    """Walks a script from its top, as if it ran on several ranks."""

    _blocks = 0

    def walk(self) -> None:
        """The whole script."""
        self.program.main.names["__name__"] = constant("__main__")
        self.program.main.names["__file__"] = Value("scalar")
        self.execute(self.program.main.tree.body)

    def execute(self, body: list[ast.stmt]) -> Flow:
        if self._blocks >= MAX_BLOCKS:
            return None
        self._blocks += 1
        try:
            for statement in body:
                if self.steps_left <= 0:
                    return None
                self.steps_left -= 1
                method = getattr(self, f"_do_{type(statement).__name__.lower()}", None)
                if method is not None and (flow := method(statement)) is not None:
                    ended: Flow = flow
                    return ended
            return None
        finally:
            self._blocks -= 1

    # --- simple statements

    def _do_expr(self, node: ast.Expr) -> Flow:
        mark = len(self.trace.events)
        self.evaluate(node.value)
        ended = any(event.role == "exit" for event in self.trace.events[mark:])
        return "exit" if ended and isinstance(node.value, ast.Call) and not self._within_try else None

    _within_try = 0

    def _do_assign(self, node: ast.Assign) -> None:
        value = self.evaluate(node.value)
        for target in node.targets:
            self.assign(target, value)

    def _do_annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value))

    def _do_augassign(self, node: ast.AugAssign) -> None:
        old, value = self.evaluate(node.target), self.evaluate(node.value)
        if old.kind in ("tensor", "buffer", "grad") or (old.items is not None and isinstance(node.op, ast.Add)):
            added = labels_of((value,)) | self.implied()
            if old.kind == "buffer":
                self.event("buffer", node, name=old.name, subject=old, arguments={"value": Value(labels=added)})
                return
            if old.kind == "grad":
                self.event("grad", node, subject=old, arguments={"value": value})
                return
            made = self.binary(old, node.op, value, node)
            old.labels |= added | (made.labels & {"divided", "times-world", "divided-by-world", "over-global-count"})
            if old.items is not None:
                old.items, old.length = made.items, made.length if not self.loops else None
                old.labels |= {"some"} if self.loops else set()
            return
        made = self.binary(old, node.op, value, node)
        if isinstance(node.target, ast.Attribute) and not self.constructing:
            made.known, made.labels = None, made.labels | {"counter"}  # another value the next time
        self.assign(node.target, made)

    @property
    def constructing(self) -> bool:
        """Whether an object is being made."""
        return any(isinstance(frame.code, ast.FunctionDef) and frame.code.name == "__init__" for frame in self.frames)

    def assign(self, target: ast.expr, value: Value) -> None:
        match target:
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
                self.overrides[f"{owner.name}.{name}"] = value
            else:
                self.write(owner.code.names, name, value)
            return
        held = owner.fields.get(name)
        if held is not None and held.kind == "buffer":
            added = labels_of((value,)) | self.implied()
            self.event("buffer", node, name=held.name, subject=held, arguments={"value": Value(labels=added)})
            return
        if owner.kind in ("module", "ddp", "dataset", "stream", "parameter", "loader", "sampler"):
            if not self.constructing:
                self.event("store", node, name=name, subject=owner, arguments={"value": value})
        if owner.kind == "parameter" and name == "grad":
            self.event("grad", node, subject=Value("grad", fields={"of": owner}), arguments={"value": value})
        self.write(owner.fields, name, value)

    def _set_item(self, owner: Value, key: Value, value: Value, node: ast.AST) -> None:
        if owner.name == "os.environ":
            self.event("environment", node, name=str(key.only), arguments={"value": value})
            return
        for option in owner.each():
            if option.kind in ("dict", "namespace") and isinstance(name := key.only, str):
                self.write(option.fields, name, value)
            elif option.kind == "module":
                self.event("store", node, name=str(key.default), subject=option, arguments={"value": value})
                self.write(option.fields, str(key.default), value)
            else:
                option.labels |= (labels_of((value, key)) | self.implied()) - {"graph"}
                if "gathered" in option.labels and "rank" in key.labels:
                    for part in (option, *(option.items or ())):
                        part.labels -= {"gathered"}
                if option.items is not None and option.kind != "tensor":
                    self.write(option.fields, "*", value)
                    option.items = [*option.items, value]
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

    def _do_assert(self, node: ast.Assert) -> None:
        self.evaluate(node.test)

    # --- leaving

    def _do_return(self, node: ast.Return) -> Flow:
        value = self.evaluate(node.value) if node.value is not None else NONE
        own = tuple(condition for level in self.levels[self.frame.depth :] for condition in level)
        self.frame.returns.append((value, own))
        if self.frame.loops:
            self.event("return", node, loops=len(self.loops) - len(self.frame.loops) + 1)
        return "return"

    def _do_break(self, node: ast.Break) -> Flow:
        self.event("break", node)
        return "break"

    def _do_continue(self, node: ast.Continue) -> Flow:
        self.event("continue", node)
        return "continue"

    def _do_raise(self, node: ast.Raise) -> Flow:
        if node.exc is not None:
            self.evaluate(node.exc)
        return "raise"

    # --- branches

    def _do_if(self, node: ast.If) -> Flow:
        test = self.evaluate(node.test)
        return self.branch(test, node.lineno, (lambda: self.execute(node.body), lambda: self.execute(node.orelse)))

    def _do_match(self, node: ast.Match) -> Flow:
        subject = self.evaluate(node.subject)
        return self._cases(node.cases, subject)

    def _cases(self, cases: list[ast.match_case], subject: Value) -> Flow:
        if not cases:
            return None
        first, *rest = cases
        test = Value("unknown", labels_of((subject,)))
        if isinstance(first.pattern, ast.MatchValue):
            value = self.evaluate(first.pattern.value)
            known = combined(operator.eq, subject.known, value.known)
            test = Value("scalar" if known else "unknown", test.labels, known=known)
        elif isinstance(first.pattern, ast.MatchAs) and first.pattern.pattern is None and first.guard is None:
            test = constant(True)
            if first.pattern.name is not None:
                self.write(self.frame.scope.names, first.pattern.name, subject)
        line = first.pattern.lineno
        return self.branch(test, line, (lambda: self.execute(first.body), lambda: self._cases(rest, subject)))

    def _do_try(self, node: ast.Try) -> Flow:
        self._within_try += 1
        flow = self.execute([*node.body, *node.orelse])
        self._within_try -= 1
        raised = Value("unknown", frozenset({"exception"}))
        for handler in node.handlers:
            names = ast.unparse(handler.type) if handler.type is not None else ""
            if "ImportError" in names or "ModuleNotFoundError" in names:
                continue
            if handler.name is not None:
                self.write(self.frame.scope.names, handler.name, Value())

            def handled(body: list[ast.stmt] = handler.body) -> Flow:
                return self.execute(body)

            self.branch(raised, handler.lineno, (handled, lambda: None))
        ended = self.execute(node.finalbody)
        return ended or flow

    _do_trystar = _do_try

    # --- loops

    def _do_for(self, node: ast.For | ast.AsyncFor) -> Flow:
        over = self.evaluate(node.iter)
        for loader in loaders_in(over):
            self.event("iterate", node, subject=loader)
        count = Value("scalar", over.labels, known=over.length) if over.length is not None else None
        if count is None and over.kind == "range":
            count = Value("unknown", over.labels)
        loop = Loop(self.number(), node.lineno, over, count=count)

        def once() -> Flow:
            flow: Flow = None
            if (lazy := _lazy(over)) is not None:
                return self._driven(lazy, over.kind == "enumerate", node)
            for element in self.elements(over, loop, node):
                self.assign(node.target, element)
                flow = self.execute(node.body)
                if flow in ("break", "return", "exit", "raise"):
                    break
            return flow

        flow = self._around(loop, once)
        self.execute(node.orelse)
        return flow

    _do_asyncfor = _do_for

    def _driven(self, lazy: Value, counted: bool, node: ast.For | ast.AsyncFor) -> Flow:
        """Goes through a generator of the script: the loop's body runs where that yields."""
        outer = self.frame

        def body(given: Value) -> None:
            self.frames.append(outer)
            try:
                counter = self.counter(self.loops[-1], [constant(0)], frozenset())
                self.assign(node.target, Value("tuple", items=[counter, given]) if counted else given)
                self.execute(node.body)
            finally:
                self.frames.pop()

        code, scope = lazy.code
        if sum(frame.code is code.node for frame in self.frames) < 2:
            self._run(code, Scope(dict(scope.names), scope.module, scope.parent), body)
        return None

    def _do_while(self, node: ast.While) -> Flow:
        test = self.evaluate(node.test)
        if test.decided() is False:
            return self.execute(node.orelse)
        loop = Loop(self.number(), node.lineno, test, is_while=True)

        def once() -> Flow:
            loop.over = self.evaluate(node.test)
            return self.execute(node.body)

        flow = self._around(loop, once)
        self.execute(node.orelse)
        return flow

    def _around(self, loop: Loop, once: Callable[[], Flow]) -> Flow:
        """Goes round once, and once more if that changed what the first time started from: only this is kept."""
        mark, first = self.mark, len(self.trace.events)
        before = dict(self.frame.scope.names)
        with self.looping(loop):
            flow = once()
        changed = any(
            name in before
            and before[name] is not value
            and not value.labels <= before[name].labels | {"graph"}
            or (name in before and before[name] is not value and before[name].known != value.known)
            for name, value in self.frame.scope.names.items()
        ) or self._fields_changed(mark)
        if changed and flow is None:
            del self.trace.events[first:]
            self._forget(before, loop)
            with self.looping(loop):
                flow = once()
        return flow if flow in ("return", "exit") and not loop.is_while and loop.count is None else None

    def _fields_changed(self, mark: int) -> bool:
        names = self.frame.scope.names
        return any(
            holder is not names
            and old is not None
            and (new := holder.get(key)) is not None
            and not new.labels <= old.labels
            for holder, key, old in self._journal[mark:]
        )

    def _forget(self, before: dict[str, Value], loop: Loop) -> None:
        """Before the second time round: what changes in the loop is not what it was at first."""
        names = self.frame.scope.names
        for name, old in before.items():
            new = names.get(name)
            if new is None or new is old:
                continue
            if new.kind in ("scalar", "unknown", "tensor") and old.kind in ("scalar", "unknown", "tensor"):
                changes = old.known != new.known
                labels = old.labels | new.labels | ({"counter"} if changes else set())
                self.write(names, name, Value("unknown" if changes else new.kind, labels))

    # --- contexts

    def _do_with(self, node: ast.With | ast.AsyncWith) -> Flow:
        return self._enter(list(node.items), node)

    _do_asyncwith = _do_with

    def _enter(self, items: list[ast.withitem], node: ast.With | ast.AsyncWith) -> Flow:
        if not items:
            return self.execute(node.body)
        first, *rest = items
        value = self.evaluate(first.context_expr)
        flow: Flow = None
        if value.kind == "lazy" and isinstance(value.code, tuple):
            ends: list[Flow] = []
            outer = self.frame

            def body(given: Value) -> None:
                self.frames.append(outer)
                try:
                    if first.optional_vars is not None:
                        self.assign(first.optional_vars, given)
                    ends.append(self._enter(rest, node))
                finally:
                    self.frames.pop()

            code, scope = value.code
            self._run(code, scope, body)
            return ends[0] if ends else self._enter(rest, node)
        entered = value
        if isinstance(value.code, Class) and (method := method_of(value, "__enter__")) is not None:
            entered = self.call(bound(method, value), [], {}, node)
        if first.optional_vars is not None:
            self.assign(first.optional_vars, entered)
        self.within.append(value)
        try:
            flow = self._enter(rest, node)
        finally:
            self.within.pop()
        if isinstance(value.code, Class) and (method := method_of(value, "__exit__")) is not None:
            self.call(bound(method, value), [NONE, NONE, NONE], {}, node)
        return flow

    # --- definitions

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
        match decorator.name.rpartition(".")[2]:
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

    # --- imports

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
            here = self.frame.scope.module
            parts = here.name.split(".") if here.name != "__main__" else []
            parts = parts[: len(parts) - node.level + here.is_package]
            source = ".".join([*parts, *([node.module] if node.module else [])])
        found = self._import(source) if source else Value("unknown")
        for alias in node.names:
            if alias.name == "*":
                if found.kind == "python_module":
                    for name, value in found.code.names.items():
                        if not name.startswith("_"):
                            self.write(self.frame.scope.names, name, value)
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
        module = self.program.find(name)
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


def _lazy(over: Value) -> Value | None:
    """The script's own generator that a loop goes through."""
    inner = over.fields["of"] if over.kind == "enumerate" else over
    return inner if inner.kind == "lazy" and isinstance(inner.code, tuple) else None


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
