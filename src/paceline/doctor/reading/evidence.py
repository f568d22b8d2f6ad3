"""How a rule is checked, how a check tells what it has found, and questions that several of them ask of a trace."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Final

from paceline.doctor.findings import Confidence, Finding
from paceline.doctor.reading.trace import Condition, Event, Loop, Trace, loaders_in
from paceline.doctor.reading.values import NONE, RANKS, Value
from paceline.doctor.rules import Severity

__all__ = [
    "RULE_CHECKS",
    "Check",
    "Found",
    "Step",
    "backwards_through",
    "dealt_out",
    "differs",
    "forwards",
    "inner_module",
    "instead",
    "is_distributed_sampler",
    "is_weights",
    "local",
    "making",
    "may_follow",
    "modules_in",
    "on_all_ranks",
    "opposite",
    "rule_check",
    "samplers_of",
    "synchronising",
    "trained_loaders",
    "wrapped",
]


@dataclass(frozen=True, slots=True)
class Found:
    """What a check has found: an event, and what is wrong with it.

    Args:
        evidence: what says so; ``None``: the event's source.
        at: the place to name, if that is another one. The others are as in `Finding`.
    """

    event: Event
    message: str
    _: KW_ONLY
    evidence: str | None = None
    severity: Severity | None = None
    confidence: Confidence = "likely"
    at: Condition | Loop | Event | Value | None = None
    fix: str | None = None

    def told(self, rule: str) -> Finding:
        """As a finding of that rule."""
        place = self.at or self.event
        return Finding(
            id=rule,
            path=place.path,
            line=place.line,
            message=self.message,
            evidence=self.event.source if self.evidence is None else self.evidence,
            severity=self.severity,
            confidence=self.confidence,
            fix=self.fix,
        )


Check = Callable[[Trace], Iterator[Finding]]
RULE_CHECKS: Final[dict[str, Check]] = {}
"""By id of the rule: what looks for it in a trace."""


def rule_check(rule: str, *, by_absence: bool = False) -> Callable[[Callable[[Trace], Iterable[Found]]], Check]:
    """Makes a function the one that looks for a rule; it bears the rule's name. ``by_absence``: it speaks of what is
    missing, and so only if all of the script could be read."""

    def register(check: Callable[[Trace], Iterable[Found]]) -> Check:
        @functools.wraps(check)
        def findings(trace: Trace) -> Iterator[Finding]:
            return (found.told(rule) for found in (check(trace) if trace.whole or not by_absence else ()))

        RULE_CHECKS[rule] = findings
        return findings

    return register


# --- who comes to an event, and when


def on_all_ranks(event: Event) -> bool:
    """Whether every rank comes to it, and nothing that depends on the rank decides that."""
    return event.everywhere and len(event.ranks) == RANKS


def differs(value: Value) -> bool:
    """Whether it is not the same on all ranks, beyond doubt."""
    return value.varies and not value.labels & {"partly", "escaped"}


def local(condition: Condition) -> bool:
    """Whether it depends on what one rank sees, other than its number."""
    value = condition.value
    if _is_a_count(value):
        return False
    by_number = value.known is not None and value.known.loop is None
    of_its_batches = value.varies and "shard" in value.labels
    if by_number or not (of_its_batches or differs(value)):
        return False
    return bool(value.labels & {"data", "rng", "clock", "eval"})


def _is_a_count(value: Value) -> bool:
    """Of ``if not batches``: whether it asks how many there are, which does not depend on what is in them."""
    if value.name == "not" and value.items:
        return _is_a_count(value.items[0])
    if "of" in value.fields and "size" in value.labels:
        return True  # `is None`, of what is None where something is empty
    if value.options and any(True for _ in value.each()):
        return all(map(_is_a_count, value.each()))
    return value.kind in ("batch", "list", "tuple", "set", "dict") and "own-size" not in value.labels


def opposite(event: Event, other: Event) -> bool:
    """Whether one happens where the other does not: they stand in different arms of a choice."""
    return any(
        one.value is another.value and one.holds is not another.holds for one in event.under for another in other.under
    )


def instead(event: Event, condition: Condition, trace: Trace) -> bool:
    """Whether a rank that does not come to the event, for that reason, does the same thing in the other arm: either arm
    may call one function."""
    place = [loop.line for loop in event.loops]
    return any(
        place == [loop.line for loop in other.loops]
        and (event.role != "forward" or other.subject is event.subject)
        and any(c.value is condition.value and c.holds is not condition.holds for c in other.under)
        for other in trace.of(event.role)
    )


def may_follow(event: Event, later: Event) -> bool:
    """Whether the second can happen after the first: it stands below it, or in the same loop."""
    return later.number > event.number or any(loop.repeats and loop in event.loops for loop in later.loops)


def synchronising(trace: Trace) -> list[Event]:
    """Events at which ranks wait for each other, or after which they must be equal."""
    exchanged = trace.any("wrap", "collective")
    return [
        event
        for event in trace.of("collective", "backward", "step", "forward")
        if event.role == "collective"
        or (event.role == "forward" and event.subject.of_kind("ddp") is not None)
        or (event.role in ("backward", "step") and exchanged)
    ]


def dealt_out(trace: Trace, event: Event) -> bool:
    """Whether it is of a model that only this rank trains, its share of them: folds, seeds, parts of an ensemble."""
    around, asked = {loop.number for loop in event.loops}, {id(condition.value) for condition in event.under}

    def is_dealt(made: Event) -> bool:
        loops = {loop.number for loop in made.loops if loop.over.labels & {"rank", "shard"}}
        conditions = {id(c.value) for c in made.under if "rank" in c.value.labels and len(c.ranks) > 1}
        return bool(loops & around or conditions & asked)

    return any(map(is_dealt, trace.of("optimizer"))) and not any(map(is_dealt, trace.of("wrap")))


# --- loaders and samplers


def is_distributed_sampler(value: Value) -> bool:
    return value.kind == "sampler" and value.name == "torch.utils.data.DistributedSampler"


def samplers_of(value: Value | None) -> Iterator[Value]:
    """A loader's samplers, outermost first."""
    for option in value.each() if value is not None else ():
        if option.kind == "sampler":
            yield option
        if option.kind in ("loader", "sampler", "instance"):
            for name in ("sampler", "batch_sampler"):
                yield from samplers_of(option.fields.get(name))


def trained_loaders(trace: Trace) -> list[tuple[Value, Event]]:
    """Each loader that is trained on, with the event that starts going through it."""
    backwards = list(trace.of("backward"))
    looped = {id(loader) for event in backwards for loop in event.loops for loader in loaders_in(loop.over)}
    around = {loop.number for event in backwards for loop in event.loops}
    pairs: list[tuple[Value, Event]] = []
    for event in trace.of("iterate"):
        by_hand = isinstance(event.node, ast.Call)  # `iter(loader)`
        drawn = event.name == "drawn" and event.with_grad  # in a generator that `next()` drives
        if id(event.subject) in looped or (backwards and (by_hand or drawn) and _feeds(trace, event, around)):
            pairs.append((event.subject, event))
    return pairs


def _feeds(trace: Trace, start: Event, around: Container[int]) -> bool:
    """Of a loader that is asked for batches one by one: whether the innermost loop in which it is asked goes round a
    backward as well."""
    asked = [event.asked or event.loops for event in trace.of("batch", "iterate") if event.subject is start.subject]
    innermost = max(asked, key=len)
    return not innermost or innermost[-1].number in around


def making(trace: Trace, role: str, value: Value) -> Event | None:
    """Where a loader or optimizer was made."""
    return next((event for event in trace.of(role) if event.result is value), None)


# --- models


def modules_in(value: Value | None) -> Iterator[Value]:
    """A module and all that it holds, as far as that is known: modules, parameters and buffers, each once."""
    seen: set[int] = set()
    left = [value] if value is not None else []
    while left:
        held = left.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        inner: list[Value] = []
        for option in held.each():
            if option is not held:
                inner.append(option)
                continue
            if option.kind in ("module", "ddp", "parameter", "buffer"):
                yield option
            if option.kind in ("module", "ddp"):
                inner += [part for name, part in option.fields.items() if name not in ("__class__", "owner")]
            inner += option.items or ()
        left += reversed(inner)


def inner_module(wrap: Event) -> Value | None:
    """The module that a `wrap` event wraps, if that is one thing."""
    module = wrap.argument("module")
    return module.of_kind("module") if module is not None else None


def wrapped(trace: Trace) -> dict[int, Event]:
    """By identity, each module that DDP wraps, and where."""
    return {id(option): wrap for wrap in trace.of("wrap") for option in wrap.arguments.get("module", NONE).each()}


def is_weights(value: Value | None) -> bool:
    """Whether it is a parameter, or made of a model's parameters or state."""
    return value is not None and (value.kind == "parameter" or "owner" in value.fields)


def forwards(trace: Trace) -> dict[str, Event]:
    """By the label that its result carries, each call of a model."""
    return {f"forward:{event.number}": event for event in trace.of("forward")}


def backwards_through(trace: Trace, wrap: Event) -> list[Event]:
    """The backwards that reach a wrapped model, through the wrapper or around it."""
    parts = {id(part) for part in modules_in(inner_module(wrap))} | {id(wrap.result)}
    labels = {label for label, event in forwards(trace).items() if id(event.subject) in parts and event.with_grad}
    return [event for event in trace.of("backward") if event.labels & labels]


class Step:
    """Which of the events of a loop's body happen in one of its iterations, and how.

    Args:
        given: conditions that are taken to hold.
    """

    def __init__(self, loop: Loop, rank: int, index: int, given: Collection[tuple[int, bool]] = ()) -> None:
        self.loop, self.rank, self.index, self.given = loop, rank, index, given

    def happens(self, event: Event) -> bool | None:
        """``None``: not known."""
        certain: bool | None = True
        for condition in event.under:
            known = condition.value.known
            if (id(condition.value), condition.holds) in self.given:
                continue
            if known is None or known.loop not in (None, self.loop.number):
                if condition.value.labels & {"exception"}:
                    continue
                certain = None
            elif condition.at(self.rank, self.index) is False:
                return False
            elif condition.at(self.rank, self.index) is None:
                certain = None
        return certain

    def unsynced(self, event: Event) -> bool | None:
        """Whether it stands in `no_sync` then."""
        state: bool | None = False
        for context in event.within:
            options = list(context.each())
            if not any(option.name == "no_sync" for option in options):
                continue
            if len(options) == 1:
                return True
            test = context.fields.get("test")
            if test is None or test.known is None or test.known.loop not in (None, self.loop.number):
                state = None
                continue
            point = test.known.at(self.rank, self.index)
            if not isinstance(point, bool | int):
                state = None
            elif context.options[0 if point else 1].name == "no_sync":
                return True
        return state
