"""Whether several ranks compute what one worker does with the same samples, and if not, what explains it. Pure.

[Note: when anything follows] A difference is told only where both runs began with the same weights, went through the
same samples (`_samples`), and drew no random numbers in the step but for those. Anything else is a reason not to
compare, and is told as that. The steps after the first are compared as long as the weights have not come apart: a
learning rate that grows with the number of ranks moves them, and is no mistake.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from paceline.doctor.findings import Finding
from paceline.doctor.watching.evidence import count
from paceline.doctor.watching.records import Account, Place, Record, Run

__all__ = ["Comparison", "Shown", "compared", "explained", "proven"]

_ROUNDING: Final = 1e-3
"""Of float32 gradients: sums of the same numbers in another order come to 1e-7 to 1e-5, and badly conditioned ones to
more. No mistake that is worth a word comes to so little."""
_LOW_ROUNDING: Final = 0.05
"""The same where some of it is computed in 16 bits, which hold two to three digits."""
_SAME: Final = 1e-5
"""Weights that differ by less have not come apart; nor have losses, but for rounding."""
_FACTOR: Final = 0.02
"""A ratio that is so near to a number is that number, if nothing else is left when it is divided out."""

_OWN_GRADIENTS: Final = (
    "ddp-forward-bypassed",
    "unsynced-optimizer-step",
    "not-distributed",
    "params-changed-after-wrap",
    "optimizer-stale-params",
    "clip-before-sync",
    "legacy-data-parallel",
    "replicas-diverged",
)
"""Why each rank may step with a gradient of its own."""
_ONCE_TOO_OFTEN: Final = ("redundant-grad-allreduce", "loss-scaled-by-world-size")
_OTHER_WEIGHTS: Final = (
    "unequal-weight-average",
    "clip-before-sync",
    "gather-without-grad",
    "redundant-grad-allreduce",
)
"""Why the ranks' common gradient may be another one than that of one worker."""
_FACTORS: Final = {"DivBackward0": "divided", "MulBackward0": "multiplied"}
_SAME_SAMPLES: Final = ("no-distributed-sampler", "iterable-not-sharded", "sampler-seed-differs")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the numbers say about a mistake.

    Args:
        ids: the rules that it may be, most specific first; evidence for the first one that was found.
        evidence: in a sentence.
        place: where it is, if the numbers prove that it is the first of ``ids``; ``None``: they only agree with it.
        message: what is wrong there.
    """

    ids: tuple[str, ...]
    evidence: str
    place: Place | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run of some ranks beside one of a single worker with the same samples.

    Args:
        equal: whether both compute the same; ``None``: it cannot be said.
        steps: so many were compared.
        loss: before each of them, that of the ranks (the mean over them) and that of one worker.
        gradient: where it differs most: ``step``, ``difference`` (relative), ``ratio``, ``parameter``.
        why: what was seen, or why nothing can be said; a sentence.
        shown: what explains a difference.
        explained: whether something does that was found, or is proven.
    """

    equal: bool | None
    steps: int = 0
    loss: tuple[tuple[float, float], ...] = ()
    gradient: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    shown: tuple[Shown, ...] = ()
    explained: bool = False

    @property
    def broken(self) -> bool:
        """Whether there is a difference that nothing else which is told accounts for."""
        return self.equal is False and not self.explained

    def as_dict(self) -> dict[str, Any]:
        """As it is written to JSON."""
        loss, gradient = [list(pair) for pair in self.loss], dict(self.gradient)
        return {"equal": self.equal, "steps": self.steps, "loss": loss, "gradient": gradient, "why": self.why}

    def as_text(self) -> str:
        """For people: two or three lines."""
        verdict = {True: "the same", False: "NOT the same", None: "not known"}[self.equal]
        lines = [f"compared with one worker: {verdict}: {self.why}"]
        if self.loss:
            pairs = ", ".join(f"{several:.6g} | {one:.6g}" for several, one in self.loss)
            lines.append(f"  loss of the ranks | of one worker, before each step: {pairs}")
        return "\n".join(lines)


def proven(comparison: Comparison | None, findings: Collection[Finding]) -> Iterator[Finding]:
    """What the numbers prove and nobody else has found."""
    for shown in comparison.shown if comparison is not None else ():
        if shown.place is not None and not any(finding.id == shown.ids[0] for finding in findings):
            yield Finding(
                id=shown.ids[0],
                path=shown.place.path,
                line=shown.place.line,
                message=shown.message,
                evidence=shown.evidence,
                confidence="certain",
                seen="run",
            )


def explained(findings: Sequence[Finding], comparison: Comparison) -> tuple[list[Finding], Comparison]:
    """Both, with what the numbers say added to what was found: of each explanation the most specific finding."""
    told, why = list(findings), comparison.why
    holds = comparison.explained
    for shown in comparison.shown:
        holds |= shown.place is not None
        number = next((n for id in shown.ids for n, f in enumerate(told) if f.id == id), None)
        if number is not None:
            holds, finding = True, told[number]
            why += f" [{finding.id}]"
            if shown.evidence not in finding.evidence:
                evidence = "; ".join(text for text in (finding.evidence, shown.evidence) if text)
                told[number] = replace(finding, evidence=evidence)
    return told, replace(comparison, why=why, explained=holds)


class _Step(NamedTuple):
    """The same step of all ranks, and of one worker.

    Args:
        names: of the parameters.
        numbers, numbers_of_one: of the samples that their loaders have given since the step before.
    """

    number: int
    ranks: list[Record]
    one: Record
    names: list[str]
    numbers: list[int]
    numbers_of_one: list[int]

    @property
    def losses(self) -> tuple[float, float]:
        each = [sum(record["losses"]) for record in self.ranks]
        return sum(each) / len(each), float(sum(self.one["losses"]))


def compared(several: Run, alone: Run) -> Comparison:
    """What both runs come to.

    Args:
        several: of some ranks, ``alone``: of one worker. Both of the same script, with the hooks of `probe.comparing`.
    """
    steps = _steps(several, alone)
    if not steps:
        return Comparison(equal=None, why="there was no step to compare")
    done: list[tuple[_Step, _Gap]] = []
    reason: str | None = None
    for step in steps:
        gap = None if (reason := _incomparable(step, done)) else _gap(step)
        if gap is None:
            break
        done.append((step, gap))
        if gap.difference > _tolerance(step):
            return _different(several, alone, done)
    if not done:
        return Comparison(equal=None, why=str(reason), shown=tuple(_same_samples(steps[0])))
    step, gap = max(done, key=lambda both: both[1].difference)
    told = f"gradients of {count(len(done), 'step')} differ by {gap.difference:.1e} at most"
    return Comparison(
        equal=True,
        steps=len(done),
        loss=_losses(done),
        gradient=gap.as_dict(step),
        why=told + (f"; not compared after that: {reason}" if reason else ""),
    )


def _steps(several: Run, alone: Run) -> list[_Step]:
    """As far as all have told of them, and not too much for a message."""
    found: list[_Step] = []
    names: dict[str, list[str]] = {}
    for each in zip(*(_taken(account) for account in (*several.accounts, *alone.accounts)), strict=False):
        *ranks, (one, numbers_of_one) = each
        if any(record["cut"] for record, _ in each):
            break
        numbers = sorted(number for _, own in ranks for number in own)
        its_names = names.setdefault(str(one["sizes"]), one["names"] or [])  # they are told once
        records = [record for record, _ in ranks]
        found.append(_Step(len(found) + 1, records, one, its_names, numbers, sorted(numbers_of_one)))
    return found


def _taken(account: Account) -> Iterator[tuple[Record, list[int]]]:
    """Each step, and the numbers of the samples that were loaded since the one before."""
    numbers: list[int] = []
    for record in account.of("batch", "measured"):
        if record.kind == "batch":
            numbers += record["indices"] or []
        else:
            yield record, numbers
            numbers = []


def _losses(done: Sequence[tuple[_Step, _Gap]]) -> tuple[tuple[float, float], ...]:
    return tuple(step.losses for step, _ in done)


# ── whether they can be compared ──


def _incomparable(step: _Step, done: Sequence[tuple[_Step, _Gap]]) -> str | None:
    """Why nothing follows from a difference at this step; ``None``: it can be compared."""
    records = [*step.ranks, step.one]
    if not all(record["plain"] for record in records):
        return "the optimizer's parameters are shards, of which each rank has its own"
    if any(record["sizes"] != step.one["sizes"] for record in records):
        return "with one worker the optimizer has other parameters"
    if any(record["hooked"] for record in records):
        return "a communication hook changes what DDP reduces"
    return _weights(step, done) or _samples(step) or _drawn(step)


def _weights(step: _Step, done: Sequence[tuple[_Step, _Gap]]) -> str | None:
    firsts = {record["digest"] for record in (*step.ranks, step.one) if record["digest"] is not None}
    if len(firsts) > 1:
        if len({record["digest"] for record in step.ranks}) > 1:
            return "the ranks do not begin with the same weights"
        return "each run begins with other weights: the script draws them anew each time, and should set a seed"
    own = _weighed(step.ranks[0], "weights")
    if _difference(own, _weighed(step.one, "weights")) <= _SAME:
        return None
    rates = [(record["rates"] or [0.0])[0] for record in (done[-1][0].ranks[0], done[-1][0].one)] if done else [0, 0]
    if rates[0] != rates[1]:
        return f"the learning rate is {rates[0]:g} with {len(step.ranks)} ranks and {rates[1]:g} with one worker"
    return "the weights have come apart, by rounding or by what the script does with them"


def _samples(step: _Step) -> str | None:
    """Whether what went into the model is the same, sample by sample. Where the longest sample of a batch says how
    long the others are made, that cannot be seen by their content, and their numbers must do."""
    ranks, one = step.ranks, step.one
    whole = sum(record["content"] for record in ranks) % (1 << 64)
    if _same_for_all(step):
        return f"all ranks went through the same {ranks[0]['samples']} samples: none were shared out"
    if one["samples"] and (whole, sum(r["samples"] for r in ranks)) == (one["content"], one["samples"]):
        return None
    padded = len({str(record["width"]) for record in (*ranks, one)}) > 1 or not one["samples"]
    if padded and step.numbers and step.numbers == step.numbers_of_one:
        return None
    told = f"{sum(r['samples'] for r in ranks)} in all ranks, {one['samples']} in one worker"
    return f"step {step.number} did not go through the same samples in both runs ({told})"


def _same_for_all(step: _Step) -> bool:
    contents = {record["content"] for record in step.ranks}
    return len(contents) == 1 and len(step.ranks) > 1 and step.ranks[0]["samples"] > 0


def _same_samples(step: _Step) -> Iterator[Shown]:
    if _same_for_all(step) and step.ranks[0]["plain"]:
        own = step.ranks[0]["samples"]
        told = f"in step {step.number} all {len(step.ranks)} ranks went through the same {own} samples"
        yield Shown(ids=_SAME_SAMPLES, evidence=told)


def _drawn(step: _Step) -> str | None:
    """Random numbers are a reason only if it differs: whoever draws some may use them for other things."""
    if any(record["drew"] for record in (*step.ranks, step.one)) and _gap(step).difference > _tolerance(step):
        return "each step draws random numbers of its own (noise, or parts that are left out at random)"
    return None


# ── how far they are apart ──


class _Gap(NamedTuple):
    """How far a gradient of the ranks is from that of one worker.

    Args:
        difference: relative to the one worker's.
        ratio: how many times as large it is, along with that.
        rest: what is left of the difference when it is divided by the ratio.
        among: how far the ranks' own are from each other.
        parameter: where it differs most.
    """

    difference: float
    ratio: float
    rest: float
    among: float
    parameter: str

    def as_dict(self, step: _Step) -> dict[str, Any]:
        told = {"step": step.number, "difference": self.difference, "ratio": self.ratio}
        return {**told, "parameter": self.parameter}


def _weighed(record: Record, name: str) -> list[float]:
    """Values of all tensors, each as heavy as those between it and the next one that are not told."""
    return [
        value * math.sqrt(size / len(values))
        for size, values in zip(record["sizes"], record[name], strict=True)
        for value in values
    ]


def _length(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values))


def _difference(own: Sequence[float], other: Sequence[float]) -> float:
    """How far a vector is from another one, relative to that; of a NaN or an infinity, infinitely far.

    >>> _difference([3.0, 0.0], [2.0, 0.0])
    0.5
    """
    if len(own) != len(other):
        return math.inf
    apart = _length([a - b for a, b in zip(own, other, strict=True)])
    if apart == 0:
        return 0.0
    length = _length(other)
    return apart / length if length > 0 and math.isfinite(apart) else math.inf


def _norms(record: Record) -> list[float]:
    return [norm or 0.0 for norm in record["norms"]]


def _gap(step: _Step) -> _Gap:
    one = _weighed(step.one, "gradients")
    each = [_weighed(record, "gradients") for record in step.ranks]
    differences = [
        max(_difference(own, one), _difference(_norms(record), _norms(step.one)))
        for own, record in zip(each, step.ranks, strict=True)
    ]
    worst = max(range(len(each)), key=lambda rank: differences[rank])
    own = each[worst]
    square = math.fsum(value * value for value in one)
    same = len(own) == len(one) and square > 0 and math.isfinite(square)
    ratio = math.fsum(a * b for a, b in zip(own, one, strict=True)) / square if same else math.nan
    return _Gap(
        difference=differences[worst],
        ratio=ratio,
        rest=_difference([a - (ratio - 1) * b for a, b in zip(own, one, strict=True)], one) if same else math.inf,
        among=max(_difference(other, each[0]) for other in each),
        parameter=_worst(step, step.ranks[worst]),
    )


def _worst(step: _Step, record: Record) -> str:
    """The parameter in which a rank's gradient differs most."""
    pairs = zip(record["gradients"], step.one["gradients"], strict=True)
    apart = [_length([a - b for a, b in zip(*pair, strict=False)]) for pair in pairs]
    number = max(range(len(apart)), key=lambda i: apart[i] if math.isfinite(apart[i]) else 0.0, default=0)
    return step.names[number] if number < len(step.names) else ""


def _tolerance(step: _Step) -> float:
    return _LOW_ROUNDING if any(record["low"] for record in (*step.ranks, step.one)) else _ROUNDING


# ── what explains it ──


def _different(several: Run, alone: Run, done: Sequence[tuple[_Step, _Gap]]) -> Comparison:
    step, gap = done[-1]
    fixed = _divided_by_a_fixed_number(several, alone, step, gap)
    return Comparison(
        equal=None if fixed else False,
        steps=len(done),
        loss=_losses(done),
        gradient=gap.as_dict(step),
        why=fixed or _how(step, gap),
        shown=() if fixed else tuple(_shown(several, alone, step, gap)),
    )


def _how(step: _Step, gap: _Gap) -> str:
    """The numbers in a sentence."""
    told = f"the gradient of step {step.number}"
    if gap.among > _tolerance(step):
        mean = _mean_difference(step)
        own = f"{told} is another one on each rank, up to {_share(gap.difference)} from that of one worker"
        return f"{own}; their mean is that of one worker" if mean <= _tolerance(step) else own
    if _is_factor(gap):
        several, one = step.losses
        also = ", and so is the loss" if one and abs(several / one / gap.ratio - 1) < _FACTOR else ""
        return f"{told} is {gap.ratio:.2f} times that of one worker with the same samples{also}"
    return f"{told} differs by {_share(gap.difference)} from that of one worker with the same samples"


def _share(difference: float) -> str:
    """
    >>> _share(0.314), _share(float("inf"))
    ('31 %', 'beyond measure')
    """
    return f"{100 * difference:.2g} %" if difference < 100 else "beyond measure"


def _is_factor(gap: _Gap) -> bool:
    return gap.rest < _FACTOR and gap.ratio > 0 and abs(gap.ratio - 1) > _FACTOR


def _mean_difference(step: _Step) -> float:
    each = [_weighed(record, "gradients") for record in step.ranks]
    if len({len(own) for own in each}) > 1:
        return math.inf
    return _difference(
        [math.fsum(column) / len(each) for column in zip(*each, strict=True)], _weighed(step.one, "gradients")
    )


def _shown(several: Run, alone: Run, step: _Step, gap: _Gap) -> Iterator[Shown]:
    how = _how(step, gap)
    if gap.among > _tolerance(step):
        yield Shown(ids=_OWN_GRADIENTS, evidence=how)
    elif _is_factor(gap):
        world = several.world
        factor = _factor_of_ranks(several, alone, step, world)
        if factor is not None and min(abs(gap.ratio - world), abs(gap.ratio - 1 / world) * world) < _FACTOR * world:
            message = (
                f"the loss is {factor[0]} by {world}, the number of ranks, and DDP takes the mean over them itself"
            )
            yield Shown(ids=("loss-scaled-by-world-size",), evidence=how, place=factor[1], message=message)
        else:
            yield Shown(ids=_ONCE_TOO_OFTEN, evidence=how)
    elif (counts := _weights_of_ranks(several, alone, step)) is not None:
        told = " and ".join(f"{n:g}" for n in counts)
        backward = _backwards(several.accounts[0], step.number)[0]
        losses = ", ".join(f"{sum(record['losses']):.6g}" for record in step.ranks)
        proof = f"weighed by {told}, the ranks' losses of {losses} make up that of one worker, {step.losses[1]:.6g}"
        message = "each rank takes a mean over its own number of samples or tokens, and DDP counts these means alike"
        yield Shown(ids=("unequal-weight-average",), evidence=f"{how}; {proof}", place=backward.place, message=message)
    else:
        yield Shown(ids=_OTHER_WEIGHTS, evidence=how)


def _backwards(account: Account, number: int) -> list[Record]:
    """Those that led to a step, the first of which has number 1."""
    taken, found = 1, []
    for record in account.of("backward", "measured"):
        if record.kind == "measured":
            taken += 1
        elif taken == number:
            found.append(record)
    return found


def _roots(account: Account, number: int) -> list[list[list[Any]]]:
    return [root for record in _backwards(account, number) for root in record["roots"] or ()]


def _factor_of_ranks(several: Run, alone: Run, step: _Step, world: int) -> tuple[str, Place | None] | None:
    """How the loss is scaled by the number of ranks, and where: by that, and in the other run by one."""
    with_ranks, with_one = _roots(several.accounts[0], step.number), _roots(alone.accounts[0], step.number)
    place = next((r.place for r in _backwards(several.accounts[0], step.number)), None)
    for own, other in zip(with_ranks, with_one, strict=False):
        for (name, value), (same, by_one) in zip(own, other, strict=False):
            if name == same and name in _FACTORS and (value, by_one) == (world, 1):
                return _FACTORS[name], place
    return None


def _divided_by_a_fixed_number(several: Run, alone: Run, step: _Step, gap: _Gap) -> str | None:
    """A batch size that the script was told, which does not know that one worker is given the samples of all ranks."""
    if not _is_factor(gap) or abs(gap.ratio * several.world - 1) > _FACTOR:
        return None
    pairs = zip(_roots(several.accounts[0], step.number), _roots(alone.accounts[0], step.number), strict=False)
    for own, other in pairs:
        for (name, value), alike in zip(own, other, strict=False):
            if name in _FACTORS and value not in (None, 1) and [name, value] == alike:
                return (
                    f"the loss is {_FACTORS[name]} by a fixed number, {value:g}, which may be the size of a rank's "
                    "batch: one worker with the samples of all ranks would need another one"
                )
    return None


def _weights_of_ranks(several: Run, alone: Run, step: _Step) -> list[float] | None:
    """The counts over which the ranks took their means, if by these the ranks' losses make up that of one worker."""
    each = [_roots(account, step.number) for account in several.accounts]
    one = _roots(alone.accounts[0], step.number)
    if any(len(own) != 1 for own in (*each, one)):
        return None
    losses = [float(sum(record["losses"])) for record in step.ranks]
    for nodes in zip(*(own[0] for own in (*each, one)), strict=False):
        *counts, whole = (value for _, value in nodes)
        if None in (*counts, whole) or len(set(counts)) < 2 or sum(counts) != whole:
            continue
        made = math.fsum(n * loss for n, loss in zip(counts, losses, strict=True)) / whole
        if abs(made - step.losses[1]) <= _SAME * max(abs(made), abs(step.losses[1])):
            return [float(n) for n in counts]
    return None
