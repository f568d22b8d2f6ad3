"""Rules about who waits for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from paceline.doctor.findings import Finding
from paceline.doctor.reading.evidence import found, local, modules_in, synchronising
from paceline.doctor.reading.trace import Event, Trace
from paceline.doctor.reading.values import NONE

__all__ = ["CHECKS"]


def unmatched(events: list[Event]) -> tuple[list[Event], tuple[Event, Event] | None]:
    """Of events that only one rank comes to, in the same loops: those that no other rank matches; and the first two
    that match but in another order."""
    alone: list[Event] = []
    crossed: tuple[Event, Event] | None = None
    for place in dict.fromkeys(event.loops for event in events):
        here = [event for event in events if event.loops == place and event.on_some_ranks]
        sides = [[event for event in here if rank in event.ranks] for rank in (0, 1)]
        names = [Counter(event.name for event in side) for side in sides]
        if names[0] == names[1]:
            for first, second in zip(*sides, strict=True):
                if crossed is None and (first.name != second.name or _swapped(first, second, sides[1])):
                    crossed = first, second
            continue
        for side, other in ((sides[0], names[1]), (sides[1], names[0])):
            left = Counter(other)
            for event in side:
                if left[event.name]:
                    left[event.name] -= 1
                elif not any(_otherwise(event, another) for another in events):
                    alone.append(event)
    return sorted(alone, key=lambda event: event.number), crossed


def _otherwise(event: Event, other: Event) -> bool:
    """Whether ranks come to one where they do not come to the other, as far as it is known who does."""
    if other.name != event.name or other.loops != event.loops or other.on_some_ranks:
        return False
    return any(
        one.value is another.value and one.holds is not another.holds for one in event.under for another in other.under
    )


def _swapped(first: Event, second: Event, others: list[Event]) -> bool:
    """Whether one rank reduces here what the other reduces at another place."""
    one, other = first.argument("tensor"), second.argument("tensor")
    return one is not other and one is not None and any(event.argument("tensor") is one for event in others)


def rank_conditional_collective(trace: Trace) -> Iterator[Finding]:
    events = [
        event
        for event in trace.of("collective", "wrap")
        if event.arguments.get("group", NONE).is_none and event.arguments.get("process_group", NONE).is_none
    ]
    alone, crossed = unmatched(events)
    for event in alone:
        (rank,) = event.ranks
        who = "only rank 0" if rank == 0 else "only the other ranks"
        yield found(
            "rank-conditional-collective",
            event,
            f"{who} of the group comes to this `{event.name.rpartition('.')[2]}`, and waits for the rest",
            evidence=f"{event.source}, under {_why(event)}",
        )
    if crossed is not None:
        first, second = crossed
        yield found(
            "collective-order-differs",
            first,
            "rank 0 comes to this collective while another rank comes to another one",
            evidence=f"{first.source}, and line {second.line}: {second.source}",
        )


def _last(event: Event) -> str:
    return f"`{event.name.rpartition('.')[2]}`"


def _why(event: Event) -> str:
    lines = [str(c.line) for c in event.under if "rank" in c.value.labels]
    return f"the condition of line {lines[-1]}" if lines else "a condition on the rank"


def rank_conditional_forward(trace: Trace) -> Iterator[Finding]:
    events = [e for e in trace.of("forward") if e.subject.of_kind("ddp") is not None and not e.inside]
    for event in unmatched(events)[0]:
        ddp = event.subject.of_kind("ddp")
        inner = ddp.fields.get("module") if ddp is not None else None
        parts = list(modules_in(inner))
        keeps = any(part.kind == "buffer" or "BatchNorm" in part.name for part in parts)
        unknown = inner is None or inner.of_kind("module") is None or any(not _plain(part.name) for part in parts)
        severity = None if keeps or event.with_grad else "warning" if unknown else "advice"
        yield found(
            "rank-conditional-ddp-forward",
            event,
            "only some ranks call the DDP model here, and its forward may wait for the others",
            evidence=f"{event.source}, under {_why(event)}",
            severity=severity,  # type: ignore[arg-type]
            confidence="certain" if keeps else "likely",
        )


def _plain(name: str) -> bool:
    return not name or name.startswith("torch.nn.") or "." not in name


def rank_local_early_stop(trace: Trace) -> Iterator[Finding]:
    busy = synchronising(trace)
    done: set[int] = set()
    for event in trace.of("break", "return"):
        loop = event.loops[-1] if event.loops else None
        if loop is None or not any(loop in other.loops for other in busy):
            continue
        before = {id(c) for other in busy for c in other.under if other.number < event.number and loop in other.loops}
        for condition in event.under:
            if local(condition) and id(condition) not in before and condition.line not in done:
                done.add(condition.line)
                yield found(
                    "rank-local-early-stop",
                    event,
                    "this rank leaves the loop for a reason that only it sees, and the others wait for it",
                    evidence=f"{event.source} under the condition of line {condition.line}",
                )
    for event in busy:
        for loop in event.loops:
            value = loop.over
            is_local = loop.is_while and value.labels & {"data", "rng", "clock"}
            if is_local and loop.line not in done and not event.in_context("join"):
                done.add(loop.line)
                yield found(
                    "rank-local-early-stop",
                    event,
                    "how long this loop goes on depends on what one rank sees",
                    evidence=f"{event.source} at line {event.line} waits for all",
                    line=loop.line,
                )


def data_dependent_collective(trace: Trace) -> Iterator[Finding]:
    left = {id(c.value) for event in trace.of("break", "return", "continue") for c in event.under}
    for event in trace.of("collective"):
        for condition in event.under:
            if local(condition) and id(condition.value) not in left:
                yield found(
                    "data-dependent-collective",
                    event,
                    f"whether this {_last(event)} is called depends on what one rank sees",
                    evidence=f"{event.source} under the condition of line {condition.line}",
                )
                break


CHECKS = (
    rank_conditional_collective,
    rank_conditional_forward,
    rank_local_early_stop,
    data_dependent_collective,
)
