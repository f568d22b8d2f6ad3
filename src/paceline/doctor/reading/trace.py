"""What the script does, as far as it can be read: events in order, each with the loops and conditions around it."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from paceline.doctor.reading.values import RANKS, STEPS, Value

__all__ = ["MAX_NESTED", "Call", "Condition", "Event", "Loop", "Trace", "loaders_in"]

MAX_NESTED: Final = 8
"""How deeply `and`, `or` and `not` are looked into: a condition that is made of itself in a loop nests for ever."""


@dataclass(eq=False, slots=True)
class Loop:
    """A loop of the script.

    Args:
        path: the file, and ``node`` the place in it: of a ``for`` or ``while`` all of the statement.
        over: what it iterates; of a ``while``: its test.
        count: how many iterations, on each rank.
    """

    number: int
    path: str
    node: ast.AST
    over: Value
    is_while: bool = False
    count: Value | None = None

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 0)

    @property
    def last_line(self) -> int:
        return getattr(self.node, "end_lineno", None) or self.line

    @property
    def repeats(self) -> bool:
        """Whether it may go round more than once."""
        return self.count is None or self.count.default not in (0, 1)


def loaders_in(over: Value, depth: int = 6) -> Iterator[Value]:
    """The loaders that a loop goes through: itself, or what is counted or zipped."""
    for option in over.each():
        if option.kind == "loader":
            yield option
        elif option.kind == "enumerate" and depth:
            yield from loaders_in(option.fields["of"], depth - 1)
        elif option.kind == "zip" and depth:
            for part in (option.items or [])[:8]:
                yield from loaders_in(part, depth - 1)


@dataclass(frozen=True, slots=True)
class Condition:
    """What must hold for an event to happen: ``value`` is true, or it is false; written in ``path`` at ``node``."""

    value: Value
    holds: bool
    path: str
    node: ast.AST

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 0)

    @property
    def text(self) -> str:
        """The test as it is written; of what has none, its first line."""
        test = getattr(self.node, "test", None) or getattr(self.node, "type", None) or self.node
        return ast.unparse(test).splitlines()[0]

    @property
    def ranks(self) -> frozenset[int]:
        """Where it may hold; of ``step % 10 == 0 and rank == 0`` each part tells, whichever iteration it is."""
        return _ranks(self.value, self.holds, MAX_NESTED)

    def at(self, rank: int, step: int) -> bool | None:
        """Whether it holds in that iteration; ``None``: not known."""
        if self.value.known is None:
            return None
        point = self.value.known.at(rank, step)
        return bool(point) is self.holds if isinstance(point, bool | int | float | str | None) else None


def _ranks(value: Value, holds: bool, depth: int) -> frozenset[int]:
    """Where a value may be true, or false."""
    parts = value.items or [] if depth else []
    match value.name, parts:
        case "not", [inner]:
            return _ranks(inner, not holds, depth - 1)
        case (("and" | "or" as name), [_, *_]) if (name == "and") is holds:
            return frozenset.intersection(*(_ranks(part, holds, depth - 1) for part in parts))
        case "and" | "or", [_, *_]:
            return frozenset.union(*(_ranks(part, holds, depth - 1) for part in parts))
    return frozenset(rank for rank in range(RANKS) if value.truth(rank) is not (not holds))


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """A line of the script that calls a function of its own; ``owner``: of a method."""

    path: str
    node: ast.AST
    owner: Value | None


@dataclass(eq=False, slots=True)
class Event:
    """Something that the script does.

    Args:
        role: what that is to training: ``init``, ``collective``, ``forward``, ``backward``, ``step``, ``save``, ...
        name: of the API: ``torch.distributed.all_reduce``.
        subject: what a method was called on.
        arguments: by name of the parameter.
        loops: around it, outermost first.
        under: what must hold.
        within: context managers around it: ``no_sync``, ``no_grad``, ``join``.
        inside: modules whose ``forward`` is running.
        calls: of the functions that are running, outermost first.
        labels: what went into the subject by then.
        spawned: in a process that the script itself started.
        asked: of what a generator of the script's does: the loops around the `next()` that asked it to.
        result: what it gave.
    """

    number: int
    role: str
    name: str
    path: str
    line: int
    subject: Value
    arguments: dict[str, Value]
    loops: tuple[Loop, ...]
    under: tuple[Condition, ...]
    within: tuple[Value, ...]
    inside: tuple[Value, ...]
    calls: tuple[Call, ...]
    spawned: bool
    node: ast.AST
    labels: frozenset[str]
    result: Value = field(default_factory=Value)
    asked: tuple[Loop, ...] = ()

    @property
    def source(self) -> str:
        """The piece of script that does it, on one line."""
        text = " ".join(ast.unparse(self.node).split())
        return text if len(text) <= 100 else f"{text[:97]}..."

    @property
    def ranks(self) -> frozenset[int]:
        """Which may come here: in some iteration, if that can be told."""
        ranks = frozenset(range(RANKS))
        for condition in self.under:
            ranks &= condition.ranks
        return frozenset(rank for rank in ranks if self._in_some_iteration(rank)) or ranks

    def _in_some_iteration(self, rank: int) -> bool:
        by_loop: dict[int, list[Condition]] = {}
        for condition in self.under:
            if (known := condition.value.known) is not None and known.loop is not None and not known.assumed:
                by_loop.setdefault(known.loop, []).append(condition)
        return all(
            any(all(condition.at(rank, step) is not False for condition in those) for step in range(STEPS))
            for those in by_loop.values()
        )

    @property
    def everywhere(self) -> bool:
        """Whether nothing keeps one away that depends on the rank, or may."""
        return not any(condition.value.labels & {"rank", "partly"} for condition in self.under)

    @property
    def on_some_ranks(self) -> bool:
        return len(self.ranks) == 1

    def argument(self, *names: str) -> Value | None:
        """The first of these that was given."""
        return next((self.arguments[name] for name in names if name in self.arguments), None)

    def in_context(self, name: str) -> bool:
        return any(option.name == name for context in self.within for option in context.each())

    @property
    def with_grad(self) -> bool:
        return not self.in_context("no_grad")


@dataclass(slots=True)
class Trace:
    """All events, and what was mentioned anywhere in the source.

    Args:
        names: full dotted names of APIs that the script looks up.
        variables: environment variables that it reads.
        whole: whether all of the script was read, or as good as that.
        reads: by identity of a module its fields that a forward looked at, and whether it always does.
        until_s: when, by this thread's own CPU clock, there is no more time for questions; ``None``: never.
    """

    events: list[Event] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)
    whole: bool = True
    reads: dict[int, dict[str, bool]] = field(default_factory=dict)
    until_s: float | None = None
    _kept: dict[int, Value] = field(default_factory=dict)

    def identity(self, value: Value) -> int:
        """Its own for as long as the trace is there: no value made later gets the same."""
        self._kept[id(value)] = value
        return id(value)

    def of(self, *roles: str) -> Iterator[Event]:
        """Events of these roles, in order.

        Raises:
            TimeoutError: rules have asked for too long: a trace may hold tens of thousands of events.
        """
        if self.until_s is not None and time.thread_time() > self.until_s:
            raise TimeoutError("too much to look at")
        return (event for event in self.events if event.role in roles)

    def any(self, *roles: str) -> bool:
        return next(self.of(*roles), None) is not None

    def between(self, first: Event, last: Event, *roles: str) -> Iterator[Event]:
        return (event for event in self.of(*roles) if first.number < event.number < last.number)

    @property
    def distributed(self) -> bool:
        """Whether there are several ranks."""
        return self.any("init", "wrap")

    @property
    def uses_cuda(self) -> bool:
        return self.any("cuda") or any(
            event.name == "torch.distributed.init_process_group"
            and (backend := event.argument("backend")) is not None
            and "nccl" in str(backend.default)
            for event in self.of("init")
        )
