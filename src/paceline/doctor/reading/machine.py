"""The state that the reader works on: names, a memory that can be taken back, conditions, loops, and the trace."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from paceline.doctor.reading.flows import joined, picked
from paceline.doctor.reading.program import Module, Program
from paceline.doctor.reading.trace import MAX_NESTED, Call, Condition, Event, Loop, Trace
from paceline.doctor.reading.values import VARYING, Known, Value

__all__ = ["Class", "Flow", "Frame", "Function", "Machine", "Scope", "Started"]

Flow = Literal["return", "break", "continue", "raise", "exit"] | None
"""How a block ends: ``None``, it goes on behind it."""

MAX_STEPS: Final = 240_000
"""How many expressions are evaluated, all together: 6 s. Of a thousand public scripts with their files a dozen would
take more; DETR's takes 134 thousand, YOLOv5's 540 thousand."""

HURRIED: Final = 0.5
"""Once less than this share of the steps is left, loops are gone round once only."""

HARD_PRESSED: Final = 0.25
"""And then functions that have been read `READ_ENOUGH` times are not read again: better a whole script in outline than
its beginning in detail."""

READ_ENOUGH: Final = 3

MAX_EVENTS: Final = 10_000
"""YOLOv5's has 436; each rule goes through all of them, some once for each."""

DEADLINE_S: Final = 20.0
"""What takes longer is no training script, and whoever asks waits for an answer. Of the reader's own CPU time: what is
told of a script must not hang on what else the machine does."""


_IMPLIED: Final = VARYING | {"partly"}
"""What a value has of the conditions under which it is set."""


@dataclass(eq=False, slots=True)
class Scope:
    """Names of a function, or of a class while it is defined."""

    names: dict[str, Value]
    module: Module
    parent: Scope | None = None
    elsewhere: dict[str, dict[str, Value]] = field(default_factory=dict)

    def holder(self, name: str) -> dict[str, Value]:
        """Where an assignment goes: here, unless declared ``global`` or ``nonlocal``."""
        return self.elsewhere.get(name, self.names)

    def find(self, name: str) -> Value | None:
        scope: Scope | None = self
        while scope is not None:
            if (value := scope.holder(name).get(name)) is not None:
                return value
            scope = scope.parent
        return self.module.names.get(name)


@dataclass(eq=False, slots=True)
class Function:
    """A function of the script, or a method bound to ``owner``; ``ranks``: where its body runs, if not everywhere."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    defaults: dict[str, Value]
    owner: Value | None = None
    home: Value | None = None
    flavour: Literal["plain", "property", "static", "class"] = "plain"
    contexts: tuple[Value, ...] = ()
    yields: bool = False
    ranks: Known | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Started:
    """A generator: a call of a function that yields, with the loops around it."""

    function: Function
    scope: Scope
    loops: tuple[Loop, ...]

    def fresh(self) -> Scope:
        """Its names, as they were when it started."""
        return Scope(dict(self.scope.names), self.scope.module, self.scope.parent)


@dataclass(eq=False, slots=True)
class Class:
    """A class of the script."""

    node: ast.ClassDef
    scope: Scope
    bases: tuple[Value, ...]


@dataclass(eq=False, slots=True)
class Frame:
    """A function while it is read."""

    scope: Scope
    code: Any = None
    returns: list[tuple[Value, tuple[Condition, ...]]] = field(default_factory=list)
    level: list[Condition] = field(default_factory=list)
    depth: int = 0
    loops: list[list[Condition]] = field(default_factory=list)
    yielded: list[Value] = field(default_factory=list)
    on_yield: Callable[[Value], None] | None = None
    call: Call | None = None


class Machine:
    """What the reader remembers, under which conditions, and the trace that it leaves."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.trace = Trace()
        self.frames = [Frame(Scope(program.main.names, program.main))]
        self.levels: list[list[Condition]] = [self.frames[0].level]
        self.loops: list[Loop] = []
        self.within: list[Value] = []
        self.inside: list[Value] = []
        self.spawned = False
        self.overrides: dict[str, Value] = {}
        self.forward_from = 0
        self.unknown_calls = 0
        self.seeds: dict[str, frozenset[str]] = {
            stream: frozenset({"rng"})
            for stream in ("torch", "numpy", "python")  # unseeded: another one each time
        }
        self.steps_left = MAX_STEPS
        self.until_s = time.thread_time() + DEADLINE_S
        self._journal: list[tuple[dict[Any, Value], Any, Value | None]] = []
        self._numbers = 0

    @property
    def frame(self) -> Frame:
        return self.frames[-1]

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def is_short(self, share: float) -> bool:
        """Whether less than that share of all steps is left."""
        return self.steps_left < share * MAX_STEPS

    def spend(self) -> bool:
        """Takes one step of those that are left; ``False``: none is, or the time is over."""
        self.steps_left -= 1
        if self.steps_left % 64 == 0:
            self.look_at_the_clock()
        if self.steps_left <= 0:
            self.trace.whole = False
        return self.steps_left > 0

    def look_at_the_clock(self) -> None:
        """No step is left once the time is over."""
        if time.thread_time() > self.until_s:
            self.steps_left = 0

    @property
    def path(self) -> str:
        """The file that is being read."""
        return str(self.frame.scope.module.path)

    def condition(self, value: Value, holds: bool, node: ast.AST) -> Condition:
        return Condition(value, holds, self.path, node)

    def loop(self, node: ast.AST, over: Value, *, is_while: bool = False, count: Value | None = None) -> Loop:
        return Loop(self.number(), self.path, node, over, is_while, count)

    def conditions(self) -> tuple[Condition, ...]:
        return tuple(condition for level in self.levels for condition in level)

    def implied(self, depth: int = 0) -> frozenset[str]:
        """What a value depends on because it is set here, under the present conditions; of those from ``depth`` on."""
        return frozenset(label for level in self.levels[depth:] for c in level for label in c.value.labels & _IMPLIED)

    def event(
        self,
        role: str,
        node: ast.AST,
        *,
        name: str = "",
        subject: Value | None = None,
        arguments: dict[str, Value] | None = None,
        result: Value | None = None,
        loops: int | None = None,
    ) -> Event:
        """Adds one to the trace; ``loops``: only so many of those around it count."""
        event = Event(
            number=self.number(),
            role=role,
            name=name or role,
            path=self.path,
            line=getattr(node, "lineno", 0),
            subject=subject or Value(),
            arguments=arguments or {},
            loops=tuple(self.loops[:loops]),
            under=self.conditions(),
            within=tuple(self.within),
            inside=tuple(self.inside),
            calls=tuple(frame.call for frame in self.frames if frame.call is not None),
            spawned=self.spawned,
            node=node,
            labels=subject.labels if subject is not None else frozenset(),
            result=result or Value(),
        )
        self.trace.events.append(event)
        if len(self.trace.events) >= MAX_EVENTS:
            self.steps_left = 0
        return event

    def on_read(self, value: Value, name: str, *, sure: bool = True) -> None:
        """A field of a module was looked at in some forward; ``sure``: in each one, if nothing stands above it."""
        if self.inside and value.kind == "module":
            always = sure and len(self.conditions()) <= self.forward_from
            fields = self.trace.reads.setdefault(self.trace.identity(value), {})
            fields[name] = fields.get(name, False) or always

    # --- a memory that can be taken back

    def write(self, holder: dict[Any, Value], key: Any, value: Value) -> None:
        self._journal.append((holder, key, holder.get(key)))
        holder[key] = value

    def taken_back(self, mark: int) -> dict[tuple[int, Any], tuple[dict[Any, Value], Any, Value]]:
        """Undoes what was written since ``mark``; gives what was there by then."""
        written: dict[tuple[int, Any], tuple[dict[Any, Value], Any, Value]] = {}
        while len(self._journal) > mark:
            holder, key, old = self._journal.pop()
            if key in holder:
                written.setdefault((id(holder), key), (holder, key, holder[key]))
            if old is None:
                holder.pop(key, None)
            else:
                holder[key] = old
        return written

    @property
    def mark(self) -> int:
        return len(self._journal)

    def branch(self, test: Value, node: ast.AST, arms: tuple[Callable[[], Flow], Callable[[], Flow]]) -> Flow:
        """Walks both arms of a choice, each from the state before it, and joins what they leave; ``node``: where the
        test is written."""
        if (decided := test.decided()) is not None:
            return arms[not decided]()
        conditions = (self.condition(test, True, node), self.condition(test, False, node))
        flows: list[Flow] = []
        written = []
        marks: list[tuple[int, int]] = []
        for condition, arm in zip(conditions, arms, strict=True):
            mark, first = self.mark, len(self.trace.events)
            self.levels.append([condition])
            flows.append(arm())
            self.levels.pop()
            written.append(self.taken_back(mark))
            marks.append((first, len(self.trace.events)))
        if (chosen := self._set_up_in(marks)) is not None:
            _assume(test, not chosen)
            other = marks[1 - chosen]
            del self.trace.events[other[0] : other[1]]
            for holder, key, value in written[chosen].values():
                self.write(holder, key, value)
            return flows[chosen]
        self._join(test, written, flows)
        return self._ended(conditions, flows)

    def _set_up_in(self, marks: list[tuple[int, int]]) -> int | None:
        """Of two arms the one that sets up several ranks, where the other does not: it is what is looked at here."""
        weights = []
        for first, last in marks:
            roles = {event.role for event in self.trace.events[first:last]}
            names = {event.name for event in self.trace.events[first:last] if event.role == "sampler"}
            weights.append(2 * ("spawn" in roles) + bool(roles & {"init", "wrap"} or names))
        if weights[0] == weights[1]:
            return None
        return int(weights[1] > weights[0])

    def _join(self, test: Value, written: list[dict[Any, Any]], flows: list[Flow]) -> None:
        labels = test.labels & _IMPLIED
        for place in {**written[0], **written[1]}:
            holder, key, _ = written[0].get(place) or written[1][place]
            old = holder.get(key)
            if old is None and holder is self.overrides:
                old = Value("api", name=key)
            elif old is None and self._is_made_elsewhere(holder):
                old = Value()  # not known, which is not absent
            sides = [
                arm[place][2] if place in arm else old
                for arm, flow in zip(written, flows, strict=True)
                if not (flow in ("return", "raise", "exit") and holder is self.frame.scope.names)
            ]
            present = [side for side in sides if side is not None]
            if not present:
                continue
            if len(sides) == 2 and len(present) == 2:
                self.write(holder, key, picked(test, present[0], present[1]))
            else:
                self.write(holder, key, joined(present, labels))

    def _is_made_elsewhere(self, holder: dict[Any, Value]) -> bool:
        """Whether these are the fields of a thing that is neither a scope nor the object whose method this is."""
        scope: Scope | None = self.frame.scope
        while scope is not None:
            own = scope.names.get("self")
            if holder is scope.names or holder is scope.module.names or (own is not None and holder is own.fields):
                return False
            scope = scope.parent
        return True

    def _ended(self, conditions: tuple[Condition, Condition], flows: list[Flow]) -> Flow:
        """What follows a branch of which one arm leaves stands under the other's condition."""
        if all(flows):
            return flows[0] if flows[0] == flows[1] else _sooner(flows[0], flows[1])
        for flow, condition in zip(flows, reversed(conditions), strict=True):
            if flow == "exit" and len(condition.ranks) == 1:  # else all ranks are ended by their launcher
                self.levels[0].append(condition)
            elif flow == "return":
                self.frame.level.append(condition)
            elif flow in ("break", "continue") and self.frame.loops:
                self.frame.loops[-1].append(condition)
        return None

    @contextmanager
    def looping(self, loop: Loop) -> Iterator[None]:
        level: list[Condition] = []
        self.loops.append(loop)
        self.levels.append(level)
        self.frame.loops.append(level)
        try:
            yield
        finally:
            self.frame.loops.pop()
            self.levels.pop()
            self.loops.pop()


def _sooner(first: Flow, second: Flow) -> Flow:
    order: tuple[Flow, ...] = ("continue", "break", "return", "raise", "exit")
    return min(first, second, key=order.index)


def _assume(test: Value, truth: bool, depth: int = MAX_NESTED) -> None:
    """Takes a condition for decided from now on: nothing but the command line decides it."""
    if test.kind in ("unknown", "scalar") and not test.varies and "loop" not in test.fields:
        test.known = Known((truth,))
    match test.name, test.items if depth else None:
        case "not", [inner]:
            _assume(inner, not truth, depth - 1)
        case "and", [*parts] if truth:
            for part in parts:
                _assume(part, True, depth - 1)
        case "or", [*parts] if not truth:
            for part in parts:
                _assume(part, False, depth - 1)
