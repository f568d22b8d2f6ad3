"""Statements: how the script goes on, and what it leaves in its names. `Reader` walks a whole script."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from paceline.doctor.reading.definitions import Definitions
from paceline.doctor.reading.expressions import count_of
from paceline.doctor.reading.flows import tested
from paceline.doctor.reading.lookup import bound, method_of
from paceline.doctor.reading.machine import HURRIED, Class, Flow, Started
from paceline.doctor.reading.program import Program
from paceline.doctor.reading.trace import Loop, loaders_in
from paceline.doctor.reading.values import NONE, Value, combined, constant

__all__ = ["Reader"]

MAX_BLOCKS: Final = 120
"""How deeply statements nest, all functions together."""

_PLAIN: Final = ("scalar", "unknown", "tensor")

_Changes = dict[str, tuple[str, frozenset[str]]]
"""By name, the kind and the labels that it has in any round of a loop."""


class Reader(Definitions):
    """Walks a script from its top, as if it ran on several ranks."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._blocks = 0
        self._within_try = 0
        self._again = 0
        """How many of the loops around are gone round for the second time."""
        self._changes: dict[tuple[int, ...], _Changes] = {}
        """By place, with the calls that lead there, what a loop changes."""

    def walk(self) -> None:
        """The whole script."""
        self.program.main.names["__name__"] = constant("__main__")
        self.program.main.names["__file__"] = constant(str(self.program.main.path))
        self.execute(self.program.main.tree.body)

    def execute(self, body: list[ast.stmt]) -> Flow:
        if self._blocks >= MAX_BLOCKS:
            return None
        self._blocks += 1
        try:
            for statement in body:
                if not self.spend():
                    return None
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
        ended = any(event.role == "exit" and event.node is node.value for event in self.trace.events[mark:])
        return "exit" if ended and not self._within_try else None

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
        return self.branch(test, node, (lambda: self.execute(node.body), lambda: self.execute(node.orelse)))

    def _do_match(self, node: ast.Match) -> Flow:
        subject = self.evaluate(node.subject)
        return self._cases(node.cases, subject)

    def _cases(self, cases: list[ast.match_case], subject: Value) -> Flow:
        if not cases:
            return None
        first, *rest = cases
        test = Value("unknown", tested((subject,)))
        if isinstance(first.pattern, ast.MatchValue):
            value = self.evaluate(first.pattern.value)
            known = combined(operator.eq, subject.known, value.known)
            test = Value("scalar" if known else "unknown", test.labels, known=known)
        elif isinstance(first.pattern, ast.MatchAs) and first.pattern.pattern is None and first.guard is None:
            test = constant(True)
            if first.pattern.name is not None:
                self.write(self.frame.scope.names, first.pattern.name, subject)
        return self.branch(test, first.pattern, (lambda: self.execute(first.body), lambda: self._cases(rest, subject)))

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

            self.branch(raised, handler, (handled, lambda: None))
        ended = self.execute(node.finalbody)
        return ended or flow

    _do_trystar = _do_try

    # --- loops

    def _do_for(self, node: ast.For | ast.AsyncFor) -> Flow:
        over = self._iterated(self.evaluate(node.iter), node)
        for loader in loaders_in(over):
            self.event("iterate", node, subject=loader)
        loop = self.loop(node, over, count=count_of(over))

        def once() -> Flow:
            flow: Flow = None
            if (lazy := _lazy(over)) is not None:
                return self._driven(lazy, over, node)
            elements = self.elements(over, loop, node)
            for element in elements:
                self.assign(node.target, element)
                flow = self.execute(node.body)
                if len(elements) > 1:
                    self._changes.clear()  # what loops in it change may be another thing with the next one
                if flow in ("break", "return", "exit", "raise"):
                    break
            return flow

        flow = self._around(loop, once)
        self.execute(node.orelse)
        return flow

    _do_asyncfor = _do_for

    def _iterated(self, over: Value, node: ast.AST) -> Value:
        """Of an object of the script's whose `__iter__` yields: that generator."""
        if over.kind == "enumerate":
            inner = self._iterated(over.fields["of"], node)
            return over if inner is over.fields["of"] else replace(over, fields={**over.fields, "of": inner})
        method = method_of(over, "__iter__") if over.kind == "instance" else None
        made = self.call(bound(method, over), [], {}, node) if method is not None and method.code.yields else over
        return made if made.kind == "lazy" else over

    def _driven(self, lazy: Value, over: Value, node: ast.For | ast.AsyncFor) -> Flow:
        """Goes through a generator of the script: the loop's body runs where that yields."""
        outer = self.frame

        def body(given: Value) -> None:
            self.frames.append(outer)
            try:
                if over.kind == "enumerate":
                    given = Value("tuple", items=[self.counter(self.loops[-1], over.items or [], frozenset()), given])
                self.assign(node.target, given)
                self.execute(node.body)
            finally:
                self.frames.pop()

        code = lazy.code.function
        if sum(frame.code is code.node for frame in self.frames) < 2:
            self._run(code, lazy.code.fresh(), body)
        return None

    def _do_while(self, node: ast.While) -> Flow:
        test = self.evaluate(node.test)
        if test.decided() is False:
            return self.execute(node.orelse)
        loop = self.loop(node, test, is_while=True)

        def once() -> Flow:
            loop.over = self.evaluate(node.test)
            return self.execute(node.body)

        flow = self._around(loop, once)
        self.execute(node.orelse)
        return flow

    def _around(self, loop: Loop, once: Callable[[], Flow]) -> Flow:
        """Goes round once, and once more if that changed what the first time started from: only this is kept.

        A loop within another one would be gone round four times so, and the innermost of five thirty-two times. But
        when the outer one goes round again, it is known what this one changes: it starts from that, and once is enough.
        """
        place = (id(loop.node), *(id(frame.call.node) for frame in self.frames if frame.call is not None))
        if self._again and (changes := self._changes.get(place)) is not None:
            self._forget(changes)
            with self.looping(loop):
                flow = once()
        else:
            flow = self._around_anew(loop, once, place)
        return flow if flow in ("return", "exit") and not loop.is_while and loop.count is None else None

    def _around_anew(self, loop: Loop, once: Callable[[], Flow], place: tuple[int, ...]) -> Flow:
        mark, first = self.mark, len(self.trace.events)
        before = dict(self.frame.scope.names)
        with self.looping(loop):
            flow = once()
        if (
            flow is not None
            or self.is_short(HURRIED)
            or not (self._names_changed(before) or self._fields_changed(mark))
        ):
            self._changes[place] = {}
            return flow
        del self.trace.events[first:]
        changes = self._changes[place] = self._changed_names(before)
        self._forget(changes)
        self._again += 1
        try:
            with self.looping(loop):
                return once()
        finally:
            self._again -= 1

    def _names_changed(self, before: dict[str, Value]) -> bool:
        return any(
            (old := before.get(name)) is not None
            and old is not value
            and (not value.labels <= old.labels | {"graph"} or old.known != value.known)
            for name, value in self.frame.scope.names.items()
        )

    def _fields_changed(self, mark: int) -> bool:
        names = self.frame.scope.names
        return any(
            holder is not names
            and old is not None
            and (new := holder.get(key)) is not None
            and not new.labels <= old.labels
            for holder, key, old in self._journal[mark:]
        )

    def _changed_names(self, before: dict[str, Value]) -> _Changes:
        """What is not after a round what it was before: of which kind it is in any round, and what went into it."""
        changes: _Changes = {}
        for name, old in before.items():
            new = self.frame.scope.names.get(name)
            if new is None or new is old:
                continue
            if new.kind in _PLAIN and old.kind in _PLAIN:
                counts = old.known != new.known
                labels = old.labels | new.labels | ({"counter"} if counts else set())
                changes[name] = ("unknown" if counts else new.kind, labels)
        return changes

    def _forget(self, changes: _Changes) -> None:
        """Before a round that stands for any: what changes in the loop is not what it was at first."""
        names = self.frame.scope.names
        for name, (kind, labels) in changes.items():
            if (old := names.get(name)) is not None and old.kind in _PLAIN:
                self.write(names, name, Value(kind, old.labels | labels))

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
        if value.kind == "lazy" and isinstance(value.code, Started):
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

            self.within.append(Value("context", name=f"{value.name}()"))  # one of the script's own
            try:
                self._run(value.code.function, value.code.fresh(), body)
            finally:
                self.within.pop()
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


def _lazy(over: Value) -> Value | None:
    """The script's own generator that a loop goes through."""
    inner = over.fields["of"] if over.kind == "enumerate" else over
    return inner if inner.kind == "lazy" and isinstance(inner.code, Started) else None
