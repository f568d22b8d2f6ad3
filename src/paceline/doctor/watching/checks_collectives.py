"""Where the ranks' ways part: the first meeting to which they do not all come, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

from paceline.doctor.circumstances import Asked
from paceline.doctor.findings import Finding
from paceline.doctor.watching.checks_data import passes
from paceline.doctor.watching.evidence import at, count, found
from paceline.doctor.watching.records import Account, Place, Record, Run
from paceline.doctor.watching.sources import conditions, line_of, loops_around

__all__ = ["CHECKS", "Parting", "meetings", "parting"]

_NAMES = {"init": "init_process_group", "wrap": "making the DDP", "forward": "DDP's forward", "backward": "backward"}


def meetings(account: Account, world: int) -> list[Record]:
    """All that this rank has done together with all others, or wanted to."""
    return [record for record in account.of(*_NAMES, "collective") if _meets(record, world)]


def _meets(record: Record, world: int) -> bool:
    if record.kind == "collective":
        return len(record["ranks"] or ()) == world
    if record.kind == "forward":
        return bool(record["communicates"])
    if record.kind == "backward":
        reached = record["reached"]
        return reached is None or "synced" in dict(reached).values()
    return True


def _name(record: Record) -> str:
    return record["op"] if record.kind == "collective" else _NAMES[record.kind]


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Two ranks that are not at the same meeting.

    Args:
        one, other: what each does instead; ``None``: it has come to its end.
    """

    one: Account
    other: Account
    mine: Record
    others: Record | None
    number: int


def parting(run: Run) -> Parting | None:
    """The first meeting at which two ranks differ."""
    whole = run.stopped in ("ended", "hang", "failed")
    lists = [meetings(account, run.world) for account in run.accounts]
    longest = max(range(run.world), key=lambda rank: len(lists[rank]))
    for number, mine in enumerate(lists[longest]):
        for rank, others in enumerate(lists):
            theirs = others[number] if number < len(others) else None
            if theirs is None and not (whole and _gone_or_stuck(run.accounts[rank], run)):
                continue
            if theirs is None or _name(theirs) != _name(mine) or _shape(theirs) != _shape(mine):
                one, other = run.accounts[longest], run.accounts[rank]
                return Parting(one=one, other=other, mine=mine, others=theirs, number=number)
    return None


def _swapped(run: Run) -> Parting | None:
    """Two ranks that call the same in another order; their calls match in kind only."""
    first = run.accounts[0]
    mine = [record for record in meetings(first, run.world) if record.kind == "collective"]
    for other in run.accounts[1:]:
        others = [record for record in meetings(other, run.world) if record.kind == "collective"]
        if Counter(map(_written, mine)) != Counter(map(_written, others)):
            continue
        for number, (a, b) in enumerate(zip(mine, others, strict=True)):
            if _written(a) != _written(b):
                return Parting(one=first, other=other, mine=a, others=b, number=number)
    return None


def _mistaken(run: Run, ways: Parting) -> Parting | None:
    """An earlier meeting at which two ranks took each other's calls for one, as they are of one name: the one rank's is
    under a condition of its own, and so is the reason why they are one apart ever since."""
    sides = zip(meetings(ways.one, run.world), meetings(ways.other, run.world), strict=False)
    for number, (mine, others) in enumerate(islice(sides, ways.number)):
        alone = [bool(_own_conditions(run, one, other)) for one, other in ((mine, others), (others, mine))]
        if mine.place != others.place and alone[0] != alone[1]:
            return Parting(one=ways.one, other=ways.other, mine=mine, others=others, number=number)
    return None


def _written(record: Record) -> str:
    """The call as it stands in the source."""
    return line_of(record.place)


def _shape(record: Record) -> object:
    return record["shape"] if record.kind == "collective" and record["op"] in ("all_reduce", "broadcast") else None


def _gone_or_stuck(account: Account, run: Run) -> bool:
    """Whether a rank will not come any more, for another reason than that it has failed: that has its own."""
    end = account.first("end")
    well = account.code == 0 or run.stopped == "hang" or (end is not None and not end["code"])
    return well and account.first("error") is None


def meetings_missed(run: Run) -> Iterator[Finding]:
    if any(True for _ in run.all("join")) or any(r["ranks"] not in (None, run.world) for r in run.all("wrap")):
        return  # ranks may do different things, and each knows
    if (skip := _skip(run)) is not None:
        yield from skip
        return
    ways = parting(run) or _swapped(run)
    if ways is None:
        return
    ways = _mistaken(run, ways) or ways
    mine, others = ways.mine, ways.others
    my_conditions = _own_conditions(run, mine, others)
    their_conditions = _own_conditions(run, others, mine) if others is not None else []
    if my_conditions and their_conditions:
        yield from _order(ways)
    elif my_conditions:
        yield from _conditional(ways.one, mine, ways.other, others, my_conditions)
    elif their_conditions and others is not None:
        yield from _conditional(ways.other, others, ways.one, mine, their_conditions)
    else:
        yield from _left(run, ways) or _order(ways)


def _own_conditions(run: Run, record: Record, other: Record | None) -> list[Asked]:
    """The conditions that one stands under and the other does not."""
    shared = {asked.text for asked in conditions(run, other.places)} if other is not None else set()
    return [asked for asked in conditions(run, record.places) if asked.text not in shared]


def _stands(account: Account, record: Record | None) -> str:
    if record is not None:
        return f"rank {account.rank} is at {_name(record)} ({at(record.place)})"
    if account.ended_s is not None or account.first("end") is not None:
        return f"rank {account.rank} has come to its end"
    return f"rank {account.rank} stands at {account.stands or 'a line that is not known'}"


def _conditional(
    there: Account, mine: Record, elsewhere: Account, others: Record | None, under: Sequence[Asked]
) -> Iterator[Finding]:
    of_rank = [asked for asked in under if asked.of_rank]
    evidence = f"{_stands(there, mine)}; {_stands(elsewhere, others)}"
    if mine.kind in ("forward", "backward", "wrap") and of_rank:
        yield from found(
            "rank-conditional-ddp-forward",
            mine.place,
            f"only some ranks call the DDP model: it is under `if {of_rank[0].text}`",
            evidence,
        )
    elif of_rank:
        yield from found(
            "rank-conditional-collective",
            mine.place,
            f"{_name(mine)} is under `if {of_rank[0].text}` (line {of_rank[0].line}), and the other ranks never come",
            evidence,
        )
    else:
        yield from found(
            "data-dependent-collective",
            mine.place,
            f"{_name(mine)} is under `if {under[0].text}` (line {under[0].line}), which ranks answer differently",
            evidence,
        )


def _order(ways: Parting) -> Iterator[Finding]:
    yield from found(
        "collective-order-differs",
        ways.mine.place,
        "the ranks call different collectives at the same time",
        f"meeting {ways.number + 1}: {_stands(ways.one, ways.mine)}; {_stands(ways.other, ways.others)}",
    )


def _skip(run: Run) -> Iterator[Finding] | None:
    """A rank that leaves out a step: it takes a batch and does not go forward, or goes forward twice where the others
    go backward in between."""
    return _without_forward(run) or _without_backward(run)


def _without_forward(run: Run) -> Iterator[Finding] | None:
    for those in zip(*map(_batches_of_training, run.accounts), strict=False):
        if len({(one.of_pass, one.batch.place) for one in those}) > 1:
            return None
        if len({one.went for one in those}) > 1:
            skipping = next(one.batch for one in those if not one.went)
            others = next(one.batch for one in those if one.went)
            return _skipped(
                run,
                skipping.places,
                f"with batch {those[0].number} of its pass rank {others.rank} went forward, and rank {skipping.rank} "
                "went on to the next one",
            )
    return None


class _Taken(NamedTuple):
    """A batch that a rank took from a loader that it trains with; ``went``: it went forward before the next one."""

    batch: Record
    of_pass: tuple[int, int]
    number: int
    went: bool


def _batches_of_training(account: Account) -> list[_Taken]:
    """Those after which the rank took another one of the same pass."""
    trained = {one.loader["loader"] for one in passes(account) if one.trains}
    taken: list[_Taken] = []
    numbers = Counter[tuple[int, int]]()
    for record in account.of("batch", "forward"):
        if record.kind == "batch" and record["loader"] in trained:
            of_pass = record["loader"], record["number"]
            numbers[of_pass] += 1
            taken.append(_Taken(record, of_pass, numbers[of_pass], went=False))
        elif record.kind == "forward" and record["grad"] and taken:
            taken[-1] = taken[-1]._replace(went=True)
    return [one for one, following in pairwise(taken) if one.of_pass == following.of_pass]


def _without_backward(run: Run) -> Iterator[Finding] | None:
    doings = [list(account.of("forward", "backward")) for account in run.accounts]
    for number, those in enumerate(zip(*doings, strict=False)):
        kinds = {record.kind for record in those}
        if len(kinds) == 1:
            if those[0].kind == "forward" and len({record.place for record in those}) > 1:
                return None
            continue
        skipping = next(record for record in those if record.kind == "forward")
        before = doings[skipping.rank][number - 1] if number else None
        others = next(record for record in those if record.kind == "backward")
        if before is None or before.kind != "forward" or before.place != skipping.place or not before["grad"]:
            return None
        nth = sum(record.kind == "forward" for record in doings[skipping.rank][:number])
        return _skipped(
            run,
            before.places,
            f"after forward {nth} rank {others.rank} went backward ({at(others.place)}), "
            f"rank {skipping.rank} went on to the next forward ({at(skipping.place)})",
        )
    return None


def _skipped(run: Run, places: Sequence[Place], evidence: str) -> Iterator[Finding]:
    """At the condition of the first ``continue`` of the loop around these lines, if it has one."""
    loop = next(iter(loops_around(places)), None)
    under = conditions(run, [Place(loop.path, loop.skips[0][0])]) if loop is not None and loop.skips else []
    place, why = next(iter(places), None), ""
    if under:
        place, why = Place(under[0].path, under[0].line), f", at `if {under[0].text}`"
    yield from found("rank-local-skip", place, f"a rank leaves out a step that the others take{why}", evidence)


def _left(run: Run, ways: Parting) -> Iterator[Finding] | None:
    """A rank that has left the loop in which another still is."""
    mine, others = ways.mine, ways.others
    inside, outside, stays, left = mine, others, ways.one, ways.other
    loops = loops_around(mine.places, others.places if others is not None else ())
    if not loops and others is not None:
        inside, outside, stays, left = others, mine, ways.other, ways.one
        loops = loops_around(others.places, mine.places)
    if not loops:
        return None
    loop = loops[0]
    if len(passes(stays)) > len(passes(left)):  # it had all that it was to have of each pass
        loop = next((outer for outer in loops[1:] if outer.exits), loop)
    done = {account.rank: _rounds(account, inside) for account in (stays, left)}
    evidence = f"{_stands(stays, inside)}; {_stands(left, outside)}"
    exhausted = _batches(run)
    if exhausted is not None:
        place, told = exhausted
        return found("uneven-inputs", place, "the ranks have different numbers of batches", f"{told}; {evidence}")
    if loop.exits:
        line, condition = loop.exits[0]
        return found(
            "rank-local-early-stop",
            Place(loop.path, line),
            f"rank {left.rank} leaves the loop at `if {condition}`, and the others go on",
            f"rank {left.rank} left after {count(done[left.rank], 'round')}, rank {stays.rank} began round "
            f"{done[stays.rank]}; {evidence}",
        )
    if (last := next(reversed(passes(left)), None)) is not None and not last.whole:  # there was more for it
        if left.ended_s is None:
            return iter(())  # it waits for something else, and is told with where it stands
        return found(
            "rank-local-early-stop",
            Place(loop.path, loop.line),
            f"rank {left.rank} ends in the middle of this loop, and the others go on",
            evidence,
        )
    return found(
        "uneven-inputs",
        Place(loop.path, loop.line),
        "the ranks have different numbers of batches",
        f"rank {left.rank} had {count(done[left.rank], 'batch')}, "
        f"rank {stays.rank} at least {done[stays.rank]}; {evidence}",
    )


def _rounds(account: Account, like: Record) -> int:
    """How many times a rank has been at a line."""
    return sum(1 for record in account.of(like.kind) if record.place == like.place)


def _batches(run: Run) -> tuple[Place | None, str] | None:
    """A loader that had given all to one rank while another got more from it."""
    all_passes = [passes(account) for account in run.accounts]
    for those in zip(*all_passes, strict=False):
        batches = [one.batches for one in those]
        short = min(those, key=lambda one: one.batches)
        if len(set(batches)) > 1 and short.whole:
            told = " and ".join(f"rank {rank} got {count(n, 'batch')}" for rank, n in enumerate(batches))
            return short.loader.place, told
    return None


CHECKS = (meetings_missed,)
