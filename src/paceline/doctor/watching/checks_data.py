"""Who saw which samples, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.doctor.findings import Finding
from paceline.doctor.watching.evidence import beside, count, found, train_together
from paceline.doctor.watching.records import Account, Record, Run

__all__ = ["CHECKS", "Pass", "by_loader", "passes"]

_DISTINCT = 0.9
"""Samples are told apart by their content if so many of a rank's own are distinct."""
_TOLD_APART = 8
"""If so many different samples come to all ranks in one order, they are the same, whichever others repeat."""
_MOVED = 0.2
"""Of two orders, so many samples of one rank come to another one too, under another number."""
_PADDED = 8
"""Parts of random splits that are this many times as large as there are ranks have more than one sample in common."""
_WHOLE = 1.25
"""Shards that were padded hold no more than so many times the whole; two random halves that miss nothing hold more."""


@dataclass(kw_only=True)
class Pass:
    """A rank's pass over a loader.

    Args:
        trains: whether the rank went backward in it.
        shared: whether it did so in a model that the ranks train together, as far as is known.
        whole: whether the loader was exhausted.
        next_op: the first collective after it, if any.
    """

    loader: Record
    begin: Record
    indices: list[int] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    batches: int = 0
    trains: bool = False
    shared: bool = False
    whole: bool = False
    next_op: str | None = None

    @property
    def distinct(self) -> bool:
        return len(set(self.rows)) >= _DISTINCT * len(self.rows) > 0


def passes(account: Account) -> list[Pass]:
    """All passes over all loaders, in order."""
    loaders = {record["loader"]: record for record in account.of("loader")}
    done: list[Pass] = []
    current: dict[int, Pass] = {}
    giving: Pass | None = None
    for record in account.of("pass", "batch", "pass-end", "backward", "collective"):
        if record.kind == "pass" and record["loader"] in loaders:
            done.append(Pass(loader=loaders[record["loader"]], begin=record))
            current[record["loader"]] = done[-1]
        elif record.kind == "batch" and record["loader"] in current:
            this = giving = current[record["loader"]]
            this.indices += record["indices"] or []
            this.rows += record["rows"] or []
            this.batches += 1
        elif record.kind == "pass-end" and record["loader"] in current:
            current[record["loader"]].whole = True
        elif record.kind == "backward" and giving is not None:
            giving.trains = True
            giving.shared |= record["reached"] is None or bool(record["reached"])
        elif record.kind == "collective" and record["grads"] and giving is not None:
            giving.shared = True
        elif record.kind == "collective" and done and done[-1].whole and done[-1].next_op is None:
            done[-1].next_op = record["op"]
    return done


def by_loader(account: Account) -> list[list[Pass]]:
    """The passes over each loader."""
    grouped: dict[int, list[Pass]] = {}
    for one in passes(account):
        grouped.setdefault(one.loader["loader"], []).append(one)
    return list(grouped.values())


def _side_by_side(run: Run) -> Iterator[list[Pass]]:
    """The same pass over the same loader, of each rank."""
    for those in zip(*(passes(account) for account in run.accounts), strict=False):
        if len({(one.loader["loader"], one.begin["number"]) for one in those}) == 1:
            yield list(those)


def missing_set_epoch(run: Run) -> Iterator[Finding]:
    account = run.accounts[0]
    samplers = {record["sampler"]: record for record in account.of("sampler")}
    called = {record["sampler"] for record in account.of("set-epoch")}
    for those in by_loader(account):
        number = those[0].loader["sampler"]
        sampler = samplers.get(number)
        full = [one for one in those if one.trains and one.indices]
        if sampler is None or not sampler["shuffle"] or len(full) < 2:
            continue
        same = [one for one in full[1:] if _all_begin_alike([one.indices, full[0].indices])]
        if len(same) == len(full) - 1:
            yield from found(
                "missing-set-epoch",
                full[1].begin.place,
                "the loader is iterated again and gives the same order: its sampler's set_epoch was "
                + ("called with the same epoch each time" if number in called else "never called"),
                f"{len(full)} epochs on rank 0, each of them beginning with samples {full[0].indices[:6]}",
                also=[those[0].loader.place, sampler.place],
            )


def _all_begin_alike(orders: Sequence[Sequence[object]]) -> bool:
    length = min(map(len, orders))
    return length > 0 and all(order[:length] == orders[0][:length] for order in orders)


def sampler_seed_differs(run: Run) -> Iterator[Finding]:
    for those in _sharing(run):
        seeds = [record["seed"] for record in those]
        if len(set(seeds)) > 1 and all(record["shuffle"] for record in those):
            yield from found(
                "sampler-seed-differs",
                those[0].place,
                "the ranks' samplers shuffle with different seeds",
                f"seeds {', '.join(map(str, seeds))} on ranks 0 to {run.world - 1}{_overlap(run)}",
            )
            return


def _sharing(run: Run) -> Iterator[list[Record]]:
    """The samplers that share a dataset out to all ranks. One for a single replica is of the data of its own rank."""
    yield from (those for those in beside(run, "sampler") if all(r["replicas"] in (None, run.world) for r in those))


def _overlap(run: Run) -> str:
    """How many samples of the first pass were seen by several ranks."""
    for those in _side_by_side(run):
        sets = [set(one.indices) for one in those]
        if all(sets):
            twice = Counter(index for own in sets for index in own)
            several = sum(times > 1 for times in twice.values())
            missed = (those[0].loader["size"] or 0) - len(twice)
            told = f"; in the first epoch {count(several, 'sample')} went to several ranks"
            return told + (f" and {missed} to none" if all(one.whole for one in those) else "")
    return ""


def iterable_not_sharded(run: Run) -> Iterator[Finding]:
    for those in _first_trainings(run):
        if those[0].loader["iterable"]:
            yield from _stream(those)


def no_distributed_sampler(run: Run) -> Iterator[Finding]:
    for those in _first_trainings(run):
        loader = those[0].loader
        plain = loader["sampler"] is None and all(one.loader["drawn_by"] in _PLAIN for one in those)
        if plain and not loader["iterable"]:
            yield from _unsharded(those)


def _first_trainings(run: Run) -> Iterator[list[Pass]]:
    """Of each loader the first pass in which all ranks train the same model, if there are several ranks."""
    seen: set[int] = set()
    for those in _side_by_side(run):
        number = those[0].loader["loader"]
        if run.world > 1 and number not in seen and all(one.trains and one.shared for one in those):
            seen.add(number)
            yield those


_PLAIN = frozenset({"RandomSampler", "SequentialSampler"})


def _stream(those: list[Pass]) -> Iterator[Finding]:
    sets = [set(one.rows) for one in those]
    common = set.intersection(*sets)
    read = all(one.distinct for one in those) and len(common) >= _DISTINCT * min(map(len, sets))
    if read or (len(common) >= _TOLD_APART and _all_begin_alike([one.rows for one in those])):
        yield from found(
            "iterable-not-sharded",
            those[0].loader.place,
            f"each rank reads the whole stream of {those[0].loader['dataset']}",
            f"{len(common)} of {len(sets[0])} samples that rank 0 saw in its first pass were seen by every rank",
            also=[those[0].begin.place],
        )
    elif all(one.loader["workers"] > 1 and _repeats(one.rows, one.loader["workers"]) for one in those):
        yield from found(
            "iterable-not-sharded",
            those[0].loader.place,
            f"each loader worker reads the whole stream of {those[0].loader['dataset']}",
            f"each sample came {those[0].loader['workers']} times on rank 0, once from each loader worker",
            also=[those[0].begin.place],
        )


def _repeats(rows: Sequence[str], times: int) -> bool:
    counts = Counter(rows)
    return bool(counts) and all(number == times for number in counts.values())


def _unsharded(those: list[Pass]) -> Iterator[Finding]:
    """By content where samples can be told apart by it, since ranks may hold datasets of their own."""
    if len({one.loader["size"] for one in those}) > 1:
        return
    sets = [set(one.indices) for one in those]
    common = set.intersection(*sets)
    by_content = [dict(zip(one.rows, one.indices, strict=False)) for one in those]
    same = set.intersection(*(set(own) for own in by_content))
    if common and all(one.distinct for one in those):
        same_content = sum(len({own[row] for own in by_content}) == 1 for row in same)
        if same_content < 0.5 * len(common):
            return  # each rank has its own data under these numbers
    elif not common:
        return
    yield from found(
        "no-distributed-sampler",
        those[0].loader.place,
        "every rank draws from the whole dataset",
        f"in the first epoch {len(common)} of the {len(sets[0])} samples that rank 0 trained on "
        f"were trained on by every other rank too; the dataset has {those[0].loader['size']}",
        also=[those[0].begin.place],
    )


def dataset_order_differs(run: Run) -> Iterator[Finding]:
    """The same samples under other numbers, or different numbers of samples."""
    for samplers in _sharing(run):
        sizes = [record["size"] for record in samplers]
        if len(set(sizes)) > 1:
            yield from found(
                "dataset-order-differs",
                samplers[0].place,
                "the ranks' datasets have different lengths",
                f"{', '.join(map(str, sizes))} samples on ranks 0 to {run.world - 1}",
                stands_in=True,
            )
            return
    if any(r["where"] == "fetch" for r in run.all("draw")):
        return  # contents are partly random
    if any(True for _ in random_split_differs(run)):
        return  # numbers are of parts that are not the same
    shuffled_apart = {r[0]["sampler"] for r in beside(run, "sampler") if len({record["seed"] for record in r}) > 1}
    for passes_of in zip(*(by_loader(account) for account in run.accounts), strict=False):
        loader = passes_of[0][0].loader
        if loader["sampler"] is None or loader["sampler"] in shuffled_apart:
            continue
        held = [_contents(those) for those in passes_of]
        if any(own is None for own in held):
            continue
        for rank, own in enumerate(held[1:], 1):
            if told := _moved(held[0] or {}, own or {}, rank):
                yield from found(
                    "dataset-order-differs",
                    loader.place,
                    "the ranks' datasets hold the same samples in different orders",
                    told,
                    stands_in=True,
                )
                return


def _contents(those: Sequence[Pass]) -> dict[int, str] | None:
    """By number what a rank got from a loader; ``None``: that cannot be told, or is not the same each time."""
    held: dict[int, str] = {}
    for one in those:
        if len(one.rows) != len(one.indices):
            return None
        for number, row in zip(one.indices, one.rows, strict=True):
            if held.setdefault(number, row) != row:
                return None
    return held if len(set(held.values())) >= _DISTINCT * len(held) > 0 else None


def _moved(first: dict[int, str], other: dict[int, str], rank: int) -> str:
    """How another rank's samples are numbered otherwise than rank 0's, if they are. Equal samples are none that moved:
    what both ranks have seen under one number tells, or else that so many are not equal to one of the same rank."""
    both = first.keys() & other.keys()
    differing = [number for number in sorted(both) if first[number] != other[number]]
    numbers = {row: number for number, row in first.items()}
    moved = [(numbers[row], number) for number, row in other.items() if numbers.get(row, number) != number]
    if both:
        sure = len(differing) > 0.5 * len(both) and bool(moved)
    else:
        twins = len(first) + len(other) - len(set(first.values())) - len(set(other.values()))
        sure = len(moved) > max(_MOVED * min(len(first), len(other)), 4 * twins)
    if not sure:
        return ""
    there, here = moved[0]
    told = f"what is number {there} on rank 0 is number {here} on rank {rank}"
    return f"{count(len(moved), 'sample')} came to both: {told}"


def random_split_differs(run: Run) -> Iterator[Finding]:
    for those in beside(run, "subset") if train_together(run) else ():
        apart = len({record.place for record in those}) > 1 or len({record["size"] for record in those}) > 1
        if apart or len({record["digest"] for record in those}) == 1 or _are_shards(those):
            continue
        sets = [set(record["indices"] or []) for record in those]
        common, all_of_them = set.intersection(*sets), set.union(*sets)
        if min(map(len, sets)) > 4 and common == all_of_them:
            continue  # the same part, in another order
        yield from found(
            "random-split-differs",
            those[0].place,
            "the ranks split the dataset differently",
            f"of {count(those[0]['size'], 'sample')} in this part on rank 0, only {len(common)} are in it on every "
            f"rank; {len(all_of_them - common)} are in it on some",
        )
        return


def _are_shards(those: Sequence[Record]) -> bool:
    """Whether each rank has a part of its own. A shard that is padded repeats a few samples of another one: fewer than
    there are ranks, or so many that all shards together still are hardly more than the whole."""
    parts = [record["indices"] or [] for record in those]
    held = sum(map(len, parts))
    distinct = len({index for part in parts for index in part})
    if held - distinct < len(those) and min(map(len, parts)) > len(those) * _PADDED:
        return True
    return held == distinct or (distinct == those[0]["of"] and held <= _WHOLE * distinct)


def eval_padded_duplicates(run: Run) -> Iterator[Finding]:
    samplers = {record["sampler"]: record for record in run.accounts[0].of("sampler")}
    for one in passes(run.accounts[0]):
        sampler = samplers.get(one.loader["sampler"])
        if sampler is None or one.trains or not one.whole:
            continue
        extra = sampler["total"] - sampler["size"]
        counted = one.next_op in ("all_reduce", "reduce") or (one.next_op is None and not one.begin["grad"])
        if extra > 0 and counted:  # what is gathered may be cut to length afterwards
            yield from found(
                "eval-padded-duplicates",
                sampler.place,
                "this DistributedSampler repeats samples, and an evaluation counts them twice",
                f"{sampler['size']} samples over {sampler['replicas']} ranks: "
                f"{sampler['total']} were evaluated, {extra} of them a second time",
                also=[one.begin.place, one.loader.place],
            )
            return


def stale_epoch_in_workers(run: Run) -> Iterator[Finding]:
    """Persistent workers: the dataset's epoch moves on in the rank, what the workers give does not."""
    for those in by_loader(run.accounts[0]):
        loader = those[0].loader
        epochs = [one.begin["epoch"] for one in those]
        if not loader["persistent"] or len(those) < 2 or None in epochs or len(set(epochs)) < 2:
            continue
        if all(one.rows and one.rows == those[0].rows for one in those[1:] if one.whole):
            yield from found(
                "stale-epoch-in-workers",
                loader.place,
                f"persistent loader workers keep the epoch that {loader['dataset']} had when they were started",
                f"dataset.epoch went from {epochs[0]} to {epochs[-1]}, and {len(those)} passes gave the same samples",
            )


def schedule_length_mismatch(run: Run) -> Iterator[Finding]:
    """Only of a run that came to its end."""
    account = run.accounts[0]
    ends = account.first("end")
    if run.stopped != "ended" or ends is None or ends["code"] != 0 or run.world < 2:
        return
    made = Counter(schedule.place for schedule in account.of("schedule"))
    for schedule in account.of("schedule"):
        if made[schedule.place] > 1:
            continue  # that training was broken off, to be resumed
        taken = sum(1 for r in account.of("scheduled") if r["scheduler"] == schedule["scheduler"])
        length, epochs = schedule["length"], max(1, sum(one.trains for one in passes(account)))
        if length and taken > 1 and abs(length - taken * run.world) <= epochs and length > taken + epochs:
            yield from found(
                "schedule-length-mismatch",
                schedule.place,
                f"{schedule['name']} is made for {length} steps, as many as one process alone would take",
                f"{taken} steps were taken on each of {run.world} ranks",
            )


CHECKS = (
    missing_set_epoch,
    sampler_seed_differs,
    iterable_not_sharded,
    no_distributed_sampler,
    dataset_order_differs,
    random_split_differs,
    eval_padded_duplicates,
    stale_epoch_in_workers,
    schedule_length_mismatch,
)
