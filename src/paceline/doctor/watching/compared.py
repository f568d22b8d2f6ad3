"""Whether several ranks compute what one worker does with the same samples, and if not, what explains it. Pure.

[Note: when anything follows] A difference is told only where both runs began with the same weights, went through the
same samples (`_samples`), and drew no random numbers in the step but for those. Anything else is a reason not to
compare, and is told as that. The steps after the first are compared as long as the weights have not come apart: a
learning rate that grows with the number of ranks moves them, and is no mistake.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from paceline.doctor.watching.comparison import Comparison, Shown
from paceline.doctor.watching.evidence import count
from paceline.doctor.watching.records import WEIGHTED, Account, Record, Run
from paceline.doctor.watching.steps import (
    Gap,
    Step,
    difference,
    gap_of,
    mean_difference,
    steps_of,
    tolerance,
    weighed,
)

__all__ = ["compared", "without_norms"]

_SAME: Final = 1e-5
"""Losses that differ by less are the same but for rounding."""
_TOGETHER: Final = 0.01
"""Weights have not come apart as long as they differ by less than this share of what gradients may."""
_LARGEST: Final = 1e100
"""Numbers whose squares can be added up."""
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
"""Why the ranks' gradient may be a multiple of that of one worker."""
_OTHER_WEIGHTS: Final = (
    "unequal-weight-average",
    "clip-before-sync",
    "gather-without-grad",
    "redundant-grad-allreduce",
)
"""Why the ranks' common gradient may be another one than that of one worker."""
_SAME_SAMPLES: Final = ("no-distributed-sampler", "iterable-not-sharded", "sampler-seed-differs")
"""Why all ranks may see the same samples."""
_FACTORS: Final = {"DivBackward0": "divided", "MulBackward0": "multiplied"}
"""By what autograd calls it, how a loss is scaled."""


def compared(several: Run, alone: Run) -> Comparison:
    """What both runs come to.

    Args:
        several: of some ranks, ``alone``: of one worker. Both of the same script, with the hooks of `probe.comparing`.
    """
    steps = steps_of(several, alone)
    if not steps:
        return Comparison(equal=None, why="there was no step to compare")
    done: list[tuple[Step, Gap]] = []
    reason: str | None = None
    for step in steps:
        gap = None if (reason := _incomparable(step, done)) else gap_of(step)
        if gap is None:
            break
        done.append((step, gap))
        if gap.difference > tolerance(step):
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


def without_norms(seen: Comparison, still: Comparison, with_ranks: Run) -> Comparison:
    """What is left of a difference when no batch norm depends on who has which samples.

    Args:
        seen: the difference, and ``still``: the same two runs with the norms' running statistics.
        with_ranks: the run of some ranks that led to ``seen``.
    """
    if still.equal is None:
        why = f"{seen.why}, as far as that is not the batch norms' doing; without these: {still.why}"
        return replace(seen, equal=None, why=why, shown=())
    if any(record["synced"] for record in with_ranks.all("measured")):  # on GPUs, and not here
        return replace(still, why=f"with the running statistics of SyncBatchNorm, which needs GPUs: {still.why}")
    if not still.equal:
        return replace(still, why=f"even with the batch norms' running statistics {still.why}")
    told = f"{seen.why}; with the batch norms' running statistics {still.why}"
    place = next((record.place for record in with_ranks.accounts[0].of("wrap", "measured")), None)
    message = "batch norm's statistics come from one rank's samples"
    return replace(
        seen, why=told, shown=(Shown(ids=("batchnorm-unsynced",), evidence=told, place=place, message=message),)
    )


def _losses(done: Sequence[tuple[Step, Gap]]) -> tuple[tuple[float, float], ...]:
    return tuple(step.losses for step, _ in done)


def _incomparable(step: Step, done: Sequence[tuple[Step, Gap]]) -> str | None:
    """Why nothing follows from a difference at this step; ``None``: it can be compared."""
    if not all(record["plain"] for record in step.records):
        return "the optimizer's parameters are shards, of which each rank has its own"
    if any(record["sizes"] != step.one["sizes"] for record in step.records):
        return "with one worker the optimizer has other parameters"
    if any(record["hooked"] for record in step.records):
        return "a communication hook changes what DDP reduces"
    if not all(norm is None or norm < _LARGEST for record in step.records for norm in record["norms"]):
        return f"the gradients of step {step.number} are not finite"
    return _weights(step, done) or _samples(step) or _drawn(step)


def _weights(step: Step, done: Sequence[tuple[Step, Gap]]) -> str | None:
    """Whether both runs have the same weights: to the bit before the first step of an optimizer."""
    if len({record["digest"] for record in step.ranks}) > 1:
        return "the ranks do not begin with the same weights"
    if step.ranks[0]["digest"] != step.one["digest"]:
        return (
            "each run begins with other weights, drawn anew each time or made for the number of ranks: "
            "set a seed before the model is made"
        )
    apart = difference(weighed(step.ranks[0], "weights"), weighed(step.one, "weights"))
    if apart <= _TOGETHER * tolerance(step):
        return None
    before = done[-1][0] if done else step
    rate, rate_of_one = ((record["rates"] or [0.0])[0] for record in (before.ranks[0], before.one))
    if rate != rate_of_one:
        return f"the learning rate is {rate:g} with {len(step.ranks)} ranks and {rate_of_one:g} with one worker"
    return "the weights have come apart, by rounding or by what the script does with them"


def _samples(step: Step) -> str | None:
    """Whether what went into the model is the same, sample by sample. Where the longest sample of a batch says how
    long the others are made, that cannot be seen by their content, and their numbers must do."""
    ranks, one = step.ranks, step.one
    whole = sum(record["content"] for record in ranks) % (1 << 64)
    if _same_for_all(step):
        return f"all ranks went through the same {ranks[0]['samples']} samples: none were shared out"
    if one["samples"] and (whole, sum(r["samples"] for r in ranks)) == (one["content"], one["samples"]):
        return None
    padded = len({str(record["width"]) for record in step.records}) > 1 or not one["samples"]
    if padded and step.numbers and step.numbers == step.numbers_of_one:
        return None
    counts = sum(record["samples"] for record in ranks), one["samples"]
    if counts[0] == counts[1] > 0:
        if any(record["drew"] for record in step.records):
            return "what goes into the model is drawn at random in each step"
        if step.numbers and step.numbers == step.numbers_of_one:
            return "with one worker the data is not the same: each rank has its own, or it is made anew in each run"
    told = f"{counts[0]} in all ranks, {counts[1]} in one worker"
    unknown = "" if step.numbers else ", and no DataLoader says which they are"
    return f"step {step.number} did not go through the same samples in both runs ({told}){unknown}"


def _same_for_all(step: Step) -> bool:
    contents = {record["content"] for record in step.ranks}
    return len(contents) == 1 and len(step.ranks) > 1 and step.ranks[0]["samples"] > 0


def _same_samples(step: Step) -> Iterator[Shown]:
    if _same_for_all(step) and step.ranks[0]["plain"]:
        own = step.ranks[0]["samples"]
        told = f"in step {step.number} all {len(step.ranks)} ranks went through the same {own} samples"
        yield Shown(ids=_SAME_SAMPLES, evidence=told)


def _drawn(step: Step) -> str | None:
    """Random numbers are a reason only if it differs: whoever draws some may use them for other things."""
    if any(record["drew"] for record in step.records) and gap_of(step).difference > tolerance(step):
        return "each step draws random numbers of its own (noise, or parts that are left out at random)"
    return None


# ── what explains a difference ──


def _different(several: Run, alone: Run, done: Sequence[tuple[Step, Gap]]) -> Comparison:
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


def _how(step: Step, gap: Gap) -> str:
    """The numbers in a sentence."""
    told = f"the gradient of step {step.number}"
    if gap.among > tolerance(step):
        mean = mean_difference(step)
        own = f"{told} is another one on each rank, up to {_share(gap.difference)} from that of one worker"
        return f"{own}; their mean is that of one worker" if mean <= tolerance(step) else own
    if _is_factor(gap):
        several, one = step.losses
        also = ", and so is the loss" if one and abs(several / one / gap.ratio - 1) < _FACTOR else ""
        return f"{told} is {gap.ratio:.2f} times that of one worker with the same samples{also}"
    return f"{told} differs by {_share(gap.difference)} from that of one worker with the same samples"


def _share(difference: float) -> str:
    """As it is told of something relative.

    >>> _share(0.00314), _share(1.314), _share(float("inf"))
    ('0.31 %', '131 %', 'beyond measure')
    """
    if difference >= 100:
        return "beyond measure"
    return f"{100 * difference:.2g} %" if difference < 1 else f"{100 * difference:.0f} %"


def _is_factor(gap: Gap, expected: float | None = None) -> bool:
    """Whether the gradient of the ranks is a multiple of that of one worker: so many times it, or anything but once."""
    if gap.rest >= _FACTOR or gap.ratio <= 0:
        return False
    return abs(gap.ratio - 1) > _FACTOR if expected is None else abs(gap.ratio / expected - 1) < _FACTOR


def _shown(several: Run, alone: Run, step: Step, gap: Gap) -> Iterator[Shown]:
    how = _how(step, gap)
    if gap.among > tolerance(step):
        yield Shown(ids=_OWN_GRADIENTS, evidence=how)
    elif (proof := _scaled(several, alone, step, gap) or _unequal(several, alone, step, how)) is not None:
        yield proof
    elif _is_factor(gap, several.world) or _is_factor(gap, 1 / several.world):
        yield Shown(ids=_ONCE_TOO_OFTEN, evidence=how)
    else:
        yield Shown(ids=_OTHER_WEIGHTS, evidence=how)


def _scaled(several: Run, alone: Run, step: Step, gap: Gap) -> Shown | None:
    """The loss is scaled by the number of ranks: by that in one run, by one in the other, and so are the gradients."""
    world = several.world
    pairs = zip(_roots(several.accounts[0], step.number), _roots(alone.accounts[0], step.number), strict=False)
    for own, other in pairs:
        for (name, value), (same, by_one) in zip(own, other, strict=False):
            expected = {"MulBackward0": float(world), "DivBackward0": 1 / world}.get(name)
            if name == same and expected and (value, by_one) == (world, 1) and _is_factor(gap, expected):
                message = (
                    f"the loss is {_FACTORS[name]} by {world}, the number of ranks, and DDP takes their mean itself"
                )
                place = _backwards(several.accounts[0], step.number)[0].place
                return Shown(ids=("loss-scaled-by-world-size",), evidence=_how(step, gap), place=place, message=message)
    return None


def _unequal(several: Run, alone: Run, step: Step, how: str) -> Shown | None:
    """The ranks took means over different counts: weighed by these, their losses make up that of one worker."""
    if (found := _counts_of_ranks(several, alone, step)) is None:
        return None
    name, counts = found
    by_class = name.endswith(WEIGHTED)
    weights = " and ".join(f"{n:g}" for n in counts)
    losses = ", ".join(f"{sum(record['losses']):.6g}" for record in step.ranks)
    proof = f"weighed by {weights}, the ranks' losses of {losses} make up that of one worker, {step.losses[1]:.6g}"
    return Shown(
        ids=("unequal-weight-average",),
        evidence=f"{how}; {proof}",
        place=_backwards(several.accounts[0], step.number)[0].place,
        message="each rank divides by the weights of its own samples' classes, and DDP counts these means alike"
        if by_class
        else "each rank takes a mean over its own number of samples or tokens, and DDP counts these means alike",
        severity="advice" if by_class else None,  # it is close, and common
    )


def _counts_of_ranks(several: Run, alone: Run, step: Step) -> tuple[str, list[float]] | None:
    """The counts over which the ranks took their means, if by these the ranks' losses make up that of one worker; and
    which function did."""
    each = [_roots(account, step.number) for account in several.accounts]
    one = _roots(alone.accounts[0], step.number)
    if any(len(own) != 1 for own in (*each, one)):
        return None
    losses = [float(sum(record["losses"])) for record in step.ranks]
    for nodes in zip(*(own[0] for own in (*each, one)), strict=False):
        *counts, whole = (value for _, value in nodes)
        if None in (*counts, whole) or len(set(counts)) < 2 or not math.isclose(sum(counts), whole, rel_tol=_SAME):
            continue
        made = math.fsum(n * loss for n, loss in zip(counts, losses, strict=True)) / whole
        if abs(made - step.losses[1]) <= _SAME * max(abs(made), abs(step.losses[1])):
            return nodes[0][0], [float(n) for n in counts]
    return None


def _divided_by_a_fixed_number(several: Run, alone: Run, step: Step, gap: Gap) -> str | None:
    """A batch size that the script was told, which does not know that one worker is given the samples of all ranks."""
    if not _is_factor(gap, 1 / several.world):
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
