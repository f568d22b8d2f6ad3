"""What a run proves of rules that the script obeys: what was merely read of them there is dropped.

A function yields a rule where the run has exercised it, on every rank, and nothing else that another run would do could
break it. Silence in a short run is no proof: a branch that was not taken, a loader that was not reached, an order that
chance might have given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod

from paceline.doctor.findings import Obeyed
from paceline.doctor.watching.checks_collectives import meetings, parting
from paceline.doctor.watching.checks_data import Pass, passes
from paceline.doctor.watching.evidence import beside, intervals
from paceline.doctor.watching.records import Record, Run

__all__ = ["RULES_OBEYED"]

_SEVERAL = 3
"""So many forwards, or steps, of a kind are no coincidence."""
_SAMPLES = 8
"""Nor are so many samples that are alike, or not."""
_EXPECTED = 20.0
"""Of random draws that would have so many samples in common on average, none in common: that has a chance of e**-20."""


def _at(rule: str, obeying: Iterable[Record], breaking: Iterable[Record] = ()) -> Iterator[Obeyed]:
    """At the lines that led to some records, unless one of the others came from there too."""
    spoiled = {place for record in breaking for place in record.places}
    for place in dict.fromkeys(place for record in obeying for place in record.places):
        if place not in spoiled:
            yield Obeyed(id=rule, path=place.path, line=place.line)


def _alike(run: Run, rule: str, kind: str, fact: str) -> Iterator[Obeyed]:
    """Where all ranks tell the same fact of records of a kind."""
    obeying, breaking = list[Record](), list[Record]()
    for those in beside(run, kind):
        known = those[0][fact] is not None and all(record[fact] == those[0][fact] for record in those)
        (obeying if known else breaking).append(those[0])
    return _at(rule, obeying, breaking)


def sampler_seed_differs(run: Run) -> Iterator[Obeyed]:
    return _alike(run, "sampler-seed-differs", "sampler", "seed")


def random_split_differs(run: Run) -> Iterator[Obeyed]:
    return _alike(run, "random-split-differs", "subset", "digest")


def missing_set_epoch(run: Run) -> Iterator[Obeyed]:
    """The second epoch had another order than the first."""
    epochs: dict[int, list[Pass]] = {}
    for one in passes(run.accounts[0]):
        if one.trains and one.indices and one.loader["sampler"] is not None:
            epochs.setdefault(one.loader["loader"], []).append(one)
    moving = {loader for loader, those in epochs.items() if len(those) > 1 and those[0].indices != those[1].indices}
    records = [(loader in moving, one.begin) for loader, those in epochs.items() for one in those]
    return _at("missing-set-epoch", [r for moves, r in records if moves], [r for moves, r in records if not moves])


def dataset_order_differs(run: Run) -> Iterator[Obeyed]:
    """What two ranks have seen under the same number is the same."""
    samplers = {record["sampler"]: record for record in run.accounts[0].of("sampler")}
    held: list[dict[int, dict[int, str]]] = []
    for account in run.accounts:
        by_sampler: dict[int, dict[int, str]] = {}
        for one in passes(account):
            contents = dict(zip(one.indices, one.rows, strict=False)) if one.distinct else {}
            by_sampler.setdefault(one.loader["sampler"], {}).update(contents)
        held.append(by_sampler)
    obeying, breaking = list[Record](), list[Record]()
    for number, sampler in samplers.items():
        own = [by_sampler.get(number, {}) for by_sampler in held]
        common = set.intersection(*(set(contents) for contents in own))
        same = all(len({contents[index] for contents in own}) == 1 for index in common)
        (obeying if same and len(common) >= _SAMPLES else breaking).append(sampler)
    return _at("dataset-order-differs", obeying, breaking)


def no_distributed_sampler(run: Run) -> Iterator[Obeyed]:
    """Ranks train on samples of their own, though no sampler of torch's deals them out."""
    if any(record["where"] == "fetch" for record in run.all("draw")):
        return  # the same samples look different each time
    obeying, breaking = list[Record](), list[Record]()
    for those in zip(*(passes(account) for account in run.accounts), strict=False):
        if len({(one.loader["loader"], one.begin["number"]) for one in those}) == 1 and those[0].trains:
            (obeying if _own(those) else breaking).append(those[0].loader)
    yield from _at("no-distributed-sampler", obeying, breaking)


def _own(those: tuple[Pass, ...]) -> bool:
    """Whether no sample came to two ranks, and that is no chance."""
    rows = [set(one.rows) for one in those]
    indices = [set(one.indices) for one in those]
    if not all(one.distinct for one in those) or len(set.union(*rows)) < sum(map(len, rows)):
        return False
    size = those[0].loader["size"]
    expected = len(indices[0]) * len(indices[1]) / size if size else 0.0
    return len(set.intersection(*indices)) >= _SAMPLES or (expected >= _EXPECTED and None not in those[0].rows)


def model_differs_across_ranks(run: Run) -> Iterator[Obeyed]:
    """All ranks have wrapped the same models. What was read is told at a layer, which the run does not see."""
    wraps = [[(record["names"], record["shapes"]) for record in account.of("wrap")] for account in run.accounts]
    if wraps[0] and all(own == wraps[0] for own in wraps) and (None, None) not in wraps[0]:
        yield Obeyed(id="model-differs-across-ranks")


def replicas_start_different(run: Run) -> Iterator[Obeyed]:
    """Before the first step of each optimizer all ranks hold the same weights."""
    firsts: list[dict[int, object]] = []
    for account in run.accounts:
        values: dict[int, object] = {}
        for record in account.of("step"):
            values.setdefault(record["optimizer"], record["values"] if record["plain"] else None)
        firsts.append(values)
    made = {record["optimizer"] for record in run.all("optimizer")}
    whole = firsts[0] and None not in firsts[0].values() and made <= set(firsts[0])
    if whole and all(own == firsts[0] for own in firsts):
        yield Obeyed(id="replicas-start-different")


def rank_dependent_graph(run: Run) -> Iterator[Obeyed]:
    """The graph did change, and was the same on all ranks each time. One that never changed has shown nothing."""
    graphs = [[(record["ddp"], record["unused"]) for record in those] for those in beside(run, "graph")]
    changed = len({str(those[0]) for those in graphs}) > len({those[0][0] for those in graphs})
    if changed and len(graphs) >= _SEVERAL and all(own == those[0] for those in graphs for own in those):
        yield Obeyed(id="rank-dependent-graph")


def unused_parameters(run: Run) -> Iterator[Obeyed]:
    """DDP itself fails at the next forward if a parameter had no part in the last one."""
    obeying, breaking = list[Record](), list[Record]()
    backwards = [dict(record["reached"] or ()) for record in run.accounts[0].of("backward")]
    for wrap in run.accounts[0].of("wrap"):
        forwards = [r for r in run.accounts[0].of("forward") if r["ddp"] == wrap["ddp"] and r["grad"] and r["sync"]]
        passed = [r for r in forwards if r.over and not r.failed]
        strict = wrap["find_unused"] is False and wrap["static"] is False
        reduced = sum(reached.get(wrap["ddp"]) == "synced" for reached in backwards)
        (obeying if strict and reduced >= _SEVERAL and len(passed) == len(forwards) else breaking).append(wrap)
    return _at("unused-parameters", obeying, breaking)


def rank_conditional_collective(run: Run) -> Iterator[Obeyed]:
    """All ranks came to their end, and each met the others as often as they met it, in the same order."""
    met = [[record for record in meetings(account, run.world) if record.over] for account in run.accounts]
    ended = run.stopped == "ended" and all(account.code == 0 and not account.dropped for account in run.accounts)
    if ended and len({len(own) for own in met}) == 1 and parting(run) is None:
        yield from _at("rank-conditional-collective", [r for own in met for r in own if r.kind == "collective"])


def rank_conditional_ddp_forward(run: Run) -> Iterator[Obeyed]:
    """Without gradients, and with no buffer to broadcast, DDP's forward waits for nobody."""
    alone, meeting = list[Record](), list[Record]()
    for record in run.all("forward"):
        waits = record["grad"] is not False or record["communicates"] is not False or not record.over
        (meeting if waits else alone).append(record)
    return _at("rank-conditional-ddp-forward", alone, meeting)


def buffers_not_synced(run: Run) -> Iterator[Obeyed]:
    """Nobody makes buffers equal, and yet they are: at each step, whether they changed or the run came to its end."""
    steps = [[one.step["buffers"] for one in those] for those in zip(*map(intervals, run.accounts), strict=False)]
    changed = len({str(own[0]) for own in steps}) > 1
    shown = len(steps) >= _SEVERAL and (changed or run.stopped == "ended")
    if shown and all(own[0] and buffers == own[0] for own in steps for buffers in own):
        yield from _at("buffers-not-synced", run.accounts[0].of("wrap"))


def redundant_grad_allreduce(run: Run) -> Iterator[Obeyed]:
    """What is reduced there is one number, such as a norm, and no gradient."""
    numbers, gradients = list[Record](), list[Record]()
    for record in run.all("collective"):
        one = record["shape"] is not None and prod(record["shape"]) == 1
        (numbers if one and not record["grads"] and not record["copied"] else gradients).append(record)
    return _at("redundant-grad-allreduce", numbers, gradients)


def accumulation_not_normalised(run: Run) -> Iterator[Obeyed]:
    """Each of the backwards before a step is of a mean that was divided by their number."""
    divided, whole = list[Record](), list[Record]()
    for one in intervals(run.accounts[0]):
        backwards = one.of("backward")
        for record in backwards:
            (divided if _is_divided(record, len(backwards)) else whole).append(record)
    return _at("accumulation-not-normalised", divided, whole)


def _is_divided(backward: Record, times: int) -> bool:
    functions = [function for root in backward["roots"] or () for function in root]
    divisors = [value for name, value in functions if name == "DivBackward0" and value]
    factors = [1 / value for name, value in functions if name == "MulBackward0" and value]
    mean = any(value and ("Loss" in name or "Mean" in name) for name, value in functions)
    return times > 1 and mean and any(abs(value - times) < 1e-3 * times for value in (*divisors, *factors))


RULES_OBEYED: tuple[Callable[[Run], Iterable[Obeyed]], ...] = (
    sampler_seed_differs,
    random_split_differs,
    missing_set_epoch,
    dataset_order_differs,
    no_distributed_sampler,
    model_differs_across_ranks,
    replicas_start_different,
    rank_dependent_graph,
    unused_parameters,
    rank_conditional_collective,
    rank_conditional_ddp_forward,
    buffers_not_synced,
    redundant_grad_allreduce,
    accumulation_not_normalised,
)
