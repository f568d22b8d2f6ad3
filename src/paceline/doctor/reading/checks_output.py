"""Rules about what is shown: metrics, prints, experiment trackers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from paceline.doctor.reading.evidence import Found, on_all_ranks, rule_check
from paceline.doctor.reading.trace import Event, Trace
from paceline.doctor.reading.values import Value

__all__: list[str] = []


@rule_check("metric-not-reduced")
def metric_not_reduced(trace: Trace) -> Iterator[Found]:
    seen: set[int] = set()
    levels = [event.argument("level") for event in trace.of("logging")]
    loud_on_one = any(level is not None and level.varies for level in levels)
    for event in map(_where_it_was_asked, trace.of("print", "log")) if trace.distributed else ():
        batchwise = any("shard" in loop.over.labels or loop.over.of_kind("loader", "enumerate") for loop in event.loops)
        on_one = not event.everywhere or (loud_on_one and event.subject.kind == "logger")
        if batchwise or not on_one or event.line in seen:
            continue
        if any(map(_is_of_one_shard, event.arguments.values())):
            seen.add(event.line)
            yield Found(event, "what is reported here was measured on one rank's samples only")


def _where_it_was_asked(event: Event) -> Event:
    """Of what a `print` of the script's own prints: the line that called that."""
    call = event.calls[-1] if event.calls else None
    if call is None or not isinstance(call.node, ast.Call) or ast.unparse(call.node.func) != "print":
        return event
    return replace(event, path=call.path, line=call.node.lineno, node=call.node)


def _is_of_one_shard(value: Value) -> bool:
    if value.kind == "dict" and value.fields:  # each of its values by itself
        return any(map(_is_of_one_shard, value.fields.values()))
    return (
        {"eval", "shard"} <= value.labels
        and not value.labels & {"graph", "reduced", "partly"}
        and value.kind != "batch"
    )


@rule_check("print-on-all-ranks")
def print_on_all_ranks(trace: Trace) -> Iterator[Found]:
    if not trace.any("init") or not trace.any("backward") or trace.any("stdout"):
        return  # who sets up the ranks elsewhere may silence the others there, too
    training = {loop.number for event in trace.of("backward", "step") for loop in event.loops}
    ending = {id(condition.value) for event in trace.of("exit") for condition in event.under[-1:]}
    by_file: dict[str, dict[int, tuple[Event, bool]]] = {}
    for event in trace.of("print"):
        exceptional = any("exception" in c.value.labels or id(c.value) in ending for c in event.under)
        if not on_all_ranks(event) or exceptional or _says_which_rank(event):
            continue
        each_time = any(loop.number in training for loop in event.loops)
        measured = any(value.labels & {"graph", "eval"} for value in event.arguments.values())
        if "file" not in event.arguments and (each_time or measured):
            by_file.setdefault(event.path, {}).setdefault(event.line, (event, each_time))
    for told in by_file.values():
        worst_first = sorted(told.values(), key=lambda one: not one[1])
        more = f", and {len(told) - 1} more lines of this file" if len(told) > _EACH_BY_ITSELF else ""
        for event, each_time in worst_first[:1] if more else told.values():
            yield Found(event, f"every rank prints this{more}", severity=None if each_time else "advice")


_EACH_BY_ITSELF = 3
"""Of more lines in a file one stands for all: it is one habit, and one cure."""


def _says_which_rank(event: Event) -> bool:
    return any("rank" in value.labels and value.kind == "scalar" for value in event.arguments.values())


@rule_check("tracker-on-all-ranks")
def tracker_on_all_ranks(trace: Trace) -> Iterator[Found]:
    for event in trace.of("tracker") if trace.distributed else ():
        told = any(value.labels & {"rank", "partly"} for value in event.arguments.values())
        if on_all_ranks(event) and not told:
            yield Found(event, "every rank starts a tracker run of its own")
