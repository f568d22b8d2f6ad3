"""Questions that several rules ask of a trace, and how a finding is made of an event."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.findings import Confidence, Finding
from paceline.doctor.reading.objects import loaders_in
from paceline.doctor.reading.trace import Condition, Event, Loop, Trace
from paceline.doctor.reading.values import Value
from paceline.doctor.rules import Severity

__all__ = [
    "Step",
    "found",
    "inner_module",
    "local",
    "modules_in",
    "samplers_of",
    "synchronising",
    "trained_loaders",
    "wrapped",
]


def found(
    rule: str,
    event: Event,
    message: str,
    *,
    evidence: str | None = None,
    severity: Severity | None = None,
    confidence: Confidence = "likely",
    line: int | None = None,
    fix: str | None = None,
) -> Finding:
    return Finding(
        id=rule,
        path=event.path,
        line=line or event.line,
        message=message,
        evidence=event.source if evidence is None else evidence,
        severity=severity,
        confidence=confidence,
        fix=fix,
    )


def local(condition: Condition) -> bool:
    """Whether it depends on what one rank sees, other than its number."""
    value = condition.value
    by_number = value.known is not None and value.known.loop is None
    return not by_number and bool(value.labels & {"data", "rng", "clock"} or (value.varies and "eval" in value.labels))


def modules_in(value: Value | None, depth: int = 12) -> Iterator[Value]:
    """A module and all that it holds, as far as that is known."""
    if value is None or depth == 0:
        return
    for option in value.each():
        if option.kind in ("module", "ddp", "parameter", "buffer"):
            yield option
        for name, held in option.fields.items():
            if name not in ("__class__", "owner") and option.kind in ("module", "ddp"):
                yield from modules_in(held, depth - 1)
        if option.items is not None:
            for item in option.items:
                yield from modules_in(item, depth - 1)


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
    looped = {id(loader) for event in trace.of("backward") for loop in event.loops for loader in loaders_in(loop.over)}
    by_hand = any(event.name == "iterate" for event in trace.of("iterate")) and trace.any("backward")
    pairs: list[tuple[Value, Event]] = []
    for event in trace.of("iterate"):
        started = getattr(event.node, "func", None) is not None  # `iter(loader)`
        if id(event.subject) in looped or (started and by_hand):
            pairs.append((event.subject, event))
    return pairs


def wrapped(trace: Trace) -> dict[int, Event]:
    """By identity, each module that DDP wraps, and where."""
    return {
        id(option): event
        for event in trace.of("wrap")
        if "module" in event.arguments
        for option in event.arguments["module"].each()
    }


def synchronising(trace: Trace) -> list[Event]:
    """Events at which ranks wait for each other, or after which they must be equal."""
    manual = any(event.role == "collective" for event in trace.events)
    return [
        event
        for event in trace.of("collective", "backward", "step", "forward")
        if event.role == "collective"
        or (event.role == "forward" and event.subject.of_kind("ddp") is not None)
        or (event.role in ("backward", "step") and (trace.any("wrap") or manual))
    ]


class Step:
    """Which of the events of a loop's body happen in one of its iterations, and how."""

    def __init__(self, loop: Loop, rank: int, index: int) -> None:
        self.loop, self.rank, self.index = loop, rank, index

    def happens(self, event: Event) -> bool | None:
        """``None``: not known."""
        certain: bool | None = True
        for condition in event.under:
            known = condition.value.known
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


def inner_module(event: Event) -> Value | None:
    """The module that a `wrap` event wraps, if that is one thing."""
    module = event.argument("module")
    return module.of_kind("module") if module is not None else None
