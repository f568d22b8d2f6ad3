"""Rules about who waits for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from paceline.doctor.reading.checks_buffers import syncs_buffers
from paceline.doctor.reading.evidence import Found, local, modules_in, opposite, rule_check, synchronising
from paceline.doctor.reading.trace import Event, Loop, Trace
from paceline.doctor.reading.values import NONE, Value
from paceline.doctor.rules import Severity

__all__: list[str] = []


# --- what only some ranks come to


@rule_check("rank-conditional-collective", by_absence=True)
def rank_conditional_collective(trace: Trace) -> Iterator[Found]:
    alone, _ = _unmatched(_of_the_whole_group(trace))
    for event in alone:
        (rank,) = event.ranks
        who = "only rank 0 comes" if rank == 0 else "only the other ranks come"
        yield Found(
            event,
            f"{who} to this {_short(event)}, which waits for all of the group",
            evidence=f"{event.source}, under {_why(event)}",
        )


@rule_check("collective-order-differs", by_absence=True)
def collective_order_differs(trace: Trace) -> Iterator[Found]:
    _, crossed = _unmatched(_of_the_whole_group(trace))
    if crossed is not None:
        first, second = crossed
        yield Found(
            first,
            "rank 0 comes to this collective while another rank comes to another one",
            evidence=f"{first.source}, and line {second.line}: {second.source}",
        )
    done: set[int] = set()
    for event in trace.of("collective"):
        for loop in event.loops:
            if _goes_through_a_set(loop) and loop.line not in done:
                done.add(loop.line)
                yield Found(
                    event,
                    f"this loop goes through a set, whose order differs by process, and calls {_short(event)} for each",
                    evidence=f"{event.source}, in the loop of line {loop.line}",
                )


def _goes_through_a_set(loop: Loop) -> bool:
    over = loop.over.fields.get("of", loop.over)
    if over.kind == "set":
        return not all(isinstance(item.only, int) for item in over.items or ())  # numbers hash the same in each process
    return over.kind in ("list", "dict") and "hash-order" in over.labels


@rule_check("rank-conditional-ddp-forward", by_absence=True)
def rank_conditional_ddp_forward(trace: Trace) -> Iterator[Found]:
    wraps = {id(wrap.result): wrap for wrap in trace.of("wrap")}
    calls = [e for e in trace.of("forward") if e.subject.of_kind("ddp") is not None and not e.inside]
    for event in _unmatched(calls)[0]:
        ddp = event.subject.of_kind("ddp")
        inner = ddp.fields.get("module") if ddp is not None else None
        wrap = wraps.get(id(ddp))
        yield Found(
            event,
            "only some ranks call the DDP model here, and its forward may wait for the others",
            evidence=f"{event.source}, under {_why(event)}",
            severity=_how_bad(event, inner, synced=wrap is None or syncs_buffers(wrap)),
        )


def _how_bad(event: Event, inner: Value | None, *, synced: bool) -> Severity | None:
    """Without a backward DDP's forward waits for others only to send them its buffers."""
    if event.with_grad:
        return None
    parts = list(modules_in(inner))
    has_buffers = any(part.kind == "buffer" and "maybe" not in part.labels for part in parts)
    if synced and (has_buffers or any("BatchNorm" in part.name for part in parts)):
        return None
    known = inner is not None and inner.of_kind("module") is not None
    return "advice" if not synced or (known and all(_is_plain(part) for part in parts)) else "warning"


def _is_plain(part: Value) -> bool:
    """Whether it is known what it holds: a module of torch's or the script's."""
    return not part.name or part.name.startswith("torch.nn.") or "." not in part.name


def _of_the_whole_group(trace: Trace) -> list[Event]:
    return [
        event
        for event in trace.of("collective", "wrap")
        if event.arguments.get("group", NONE).is_none and event.arguments.get("process_group", NONE).is_none
    ]


def _unmatched(events: list[Event]) -> tuple[list[Event], tuple[Event, Event] | None]:
    """Of events that only one rank comes to, in the same loops: those that no other rank matches; and the first two
    that match but in another order."""
    ranks = _ranks_in(events)
    alone: list[Event] = []
    crossed: tuple[Event, Event] | None = None
    for place in dict.fromkeys(_place(event, ranks) for event in events):
        here = [event for event in events if _place(event, ranks) == place and event.on_some_ranks]
        sides = [[event for event in here if rank in event.ranks] for rank in (0, 1)]
        if None in place:
            sides = [_once(side) for side in sides]
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


def _ranks_in(events: list[Event]) -> dict[int, set[int]]:
    """By number of a loop the ranks that come to anything in it."""
    ranks: dict[int, set[int]] = {}
    for event in events:
        for loop in event.loops:
            ranks.setdefault(loop.number, set()).update(event.ranks)
    return ranks


def _place(event: Event, ranks: dict[int, set[int]]) -> tuple[int | None, ...]:
    """The loops around it. One that a single rank goes through counts as the same as that of another rank: rank 0 sends
    one by one what the others receive one by one."""
    return tuple(loop.number if len(ranks[loop.number]) > 1 else None for loop in event.loops)


def _once(events: list[Event]) -> list[Event]:
    """Each line once, however often the loop of the one rank goes round it."""
    return list({(event.name, event.path, event.line): event for event in events}.values())


def _otherwise(event: Event, other: Event) -> bool:
    """Whether ranks come to one where they do not come to the other, as far as it is known who does."""
    return (
        other.name == event.name and other.loops == event.loops and not other.on_some_ranks and opposite(event, other)
    )


def _swapped(first: Event, second: Event, others: list[Event]) -> bool:
    """Whether one rank reduces here what the other reduces at another place."""
    one, other = first.argument("tensor"), second.argument("tensor")
    return one is not other and one is not None and any(event.argument("tensor") is one for event in others)


def _short(event: Event) -> str:
    return f"`{event.name.rpartition('.')[2]}`"


def _why(event: Event) -> str:
    lines = [str(condition.line) for condition in event.under if "rank" in condition.value.labels]
    return f"the condition of line {lines[-1]}" if lines else "a condition on the rank"


# --- what depends on one rank's data


@rule_check("rank-local-early-stop")
def rank_local_early_stop(trace: Trace) -> Iterator[Found]:
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
                yield Found(
                    event,
                    "this rank leaves the loop for a reason that only it sees, and the others wait for it",
                    evidence=f"{event.source} under the condition of line {condition.line}",
                )
    for event in busy:
        for loop in event.loops:
            is_local = loop.is_while and loop.over.labels & {"data", "rng", "clock"}
            if is_local and loop.line not in done and not event.in_context("join"):
                done.add(loop.line)
                yield Found(
                    event,
                    "how long this loop goes on depends on what one rank sees",
                    evidence=f"{event.source} at line {event.line} waits for all",
                    at=loop,
                )


@rule_check("data-dependent-collective")
def data_dependent_collective(trace: Trace) -> Iterator[Found]:
    leaves = {id(c.value) for event in trace.of("break", "return", "continue") for c in event.under}
    for event in trace.of("collective"):
        condition = next((c for c in event.under if local(c) and id(c.value) not in leaves), None)
        if condition is not None:
            yield Found(
                event,
                f"whether this {_short(event)} is called depends on what one rank sees",
                evidence=f"{event.source} under the condition of line {condition.line}",
            )
