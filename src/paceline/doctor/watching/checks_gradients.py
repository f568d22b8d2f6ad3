"""Whether what each rank stepped with had been reduced, once, and whether the replicas stayed equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from paceline.doctor.findings import Finding
from paceline.doctor.watching.checks_data import passes
from paceline.doctor.watching.evidence import Interval, at, beside, count, found, gap, intervals, ranks
from paceline.doctor.watching.records import Account, Record, Run

__all__ = ["CHECKS", "alike"]

_NEARLY = 1.25
"""Counts of samples that differ by less are bad, and no more."""


def _steps(run: Run) -> Iterator[list[Interval]]:
    """The same step of the same optimizer, of each rank."""
    for those in zip(*(intervals(account) for account in run.accounts), strict=False):
        if len({one.step["optimizer"] for one in those}) == 1 and all(one.step["plain"] for one in those):
            yield list(those)


def _reached(one: Interval) -> dict[int, str | None]:
    """By DDP whose gradients changed, how the last forward before that meant them: synced, held, or there was none."""
    last: dict[int, str | None] = {}
    for backward in one.of("backward"):
        for ddp, pending in backward["reached"] or ():
            last[ddp] = pending if last.get(ddp) != "synced" or pending is not None else "synced"
    return last


def _gap_of(those: Sequence[Interval], name: str) -> str:
    """How far apart the ranks are; a few values of each tensor are told."""
    apart = gap([one.step[name] for one in those])
    return f"by up to {apart:.3g} in the values looked at" if apart else "in other values than those looked at"


def _differ(those: Sequence[Interval], name: str) -> bool:
    return len({tuple(one.step[name] or ()) for one in those}) > 1


def ddp_forward_bypassed(run: Run) -> Iterator[Finding]:
    """Gradients came to a DDP's parameters although nobody called the DDP."""
    for those in _steps(run):
        if any(_meets_by_hand(one) for one in those):
            continue
        one = those[0]
        bypassed = [ddp for ddp, pending in _reached(one).items() if pending is None]
        around = [record for record in one.of("around") if record["ddp"] in bypassed and record["training"]]
        if not bypassed or one.of("forward") or not (around or one.of("backward")):
            continue
        place = around[0].place if around else one.of("backward")[0].place
        what = f"{around[0]['module']} inside of the DDP" if around else "a part of the DDP"
        yield from found(
            "ddp-forward-bypassed",
            place,
            f"forward calls {what}, not the DDP itself, so gradients are not reduced",
            _unequal(those),
        )
        return


def _meets_by_hand(one: Interval) -> bool:
    """Whether gradients were reduced by the script itself."""
    return any(record["grads"] for record in one.of("collective"))


def _unequal(those: Sequence[Interval]) -> str:
    """How far apart the ranks are at a step, in a sentence."""
    number = those[0].number + 1
    if _differ(those, "grads"):
        return f"at step {number} the ranks' gradients differ {_gap_of(those, 'grad_sample')}"
    return f"step {number} was taken without any reduction"


def unsynced_optimizer_step(run: Run) -> Iterator[Finding]:
    for those in _steps(run):
        held = [ddp for ddp, pending in _reached(those[0]).items() if pending == "held"]
        if held and not any(_meets_by_hand(one) for one in those):
            backwards = those[0].of("backward")
            yield from found(
                "unsynced-optimizer-step",
                those[0].step.place,
                f"the optimizer steps although the last backward ({at(backwards[-1].place)}) was inside no_sync",
                _unequal(those),
            )
            return


def no_sync_forward_outside(run: Run) -> Iterator[Finding]:
    """Backward inside of no_sync, the forward before it."""
    account = run.accounts[0]
    synced = 0
    first: Record | None = None
    for context in account.of("no-sync"):
        end_s = context.ended_s or float("inf")
        inside = [r for r in account.of("forward", "backward") if context.at_s <= r.at_s <= end_s]
        reached = [pending for r in inside if r.kind == "backward" for _, pending in r["reached"] or ()]
        if not any(r.kind == "forward" for r in inside) and "synced" in reached:
            synced += 1
            first = first or context
    if first is not None:
        yield from found(
            "no-sync-forward-outside",
            first.place,
            "no_sync is around backward only; the forward outside of it has decided already",
            f"{count(synced, 'backward')} inside of no_sync reduced gradients all the same",
        )


def redundant_grad_allreduce(run: Run) -> Iterator[Finding]:
    for one in intervals(run.accounts[0]):
        synced = any(pending == "synced" for pending in _reached(one).values())
        again = [record for record in one.of("collective") if record["grads"] == "ddp"]
        again = [record for record in again if one.step["touched"] or not record["copied"]]  # a copy may be put back
        backwards = [record for record in one.of("backward") if "synced" in dict(record["reached"] or ()).values()]
        if synced and again and again[-1].at_s > backwards[-1].at_s:
            yield from found(
                "redundant-grad-allreduce",
                again[0].place,
                "gradients that DDP has just averaged are reduced again",
                f"{count(len(again), 'reduction')} of gradients before step {one.number + 1}, after DDP's own",
            )
            return


def accumulation_not_normalised(run: Run) -> Iterator[Finding]:
    """Plain means over micro-batches that add up."""
    done = _accumulated(run.accounts[0])
    each = _micro_batches(done)
    if done and all(_divisor(record) == 1 for one in done for record in one.of("backward")):
        yield from found(
            "accumulation-not-normalised",
            done[0].of("backward")[0].place,
            f"each step adds up the gradients of {each} micro-batches, whose losses are means",
            f"{each} backwards before each of {count(len(done), 'step')}, each of a mean that is not divided "
            f"by {each}: steps are {each} times as large",
        )


def loss_scaled_by_world_size(run: Run) -> Iterator[Finding]:
    """Means over micro-batches that are divided by their number and that of the ranks, by which DDP divides too."""
    done = _accumulated(run.accounts[0])
    each = _micro_batches(done)
    if done and run.world > 1 and all(_divisor(r) == each * run.world for one in done for r in one.of("backward")):
        yield from found(
            "loss-scaled-by-world-size",
            done[0].of("backward")[0].place,
            f"each loss is divided by its step's {each} micro-batches and by the {run.world} ranks, as DDP does",
            f"{each} backwards before each of {count(len(done), 'step')}, each of a mean divided by {each * run.world}",
            confidence="likely",
        )


def _accumulated(account: Account) -> list[Interval]:
    """The steps, if each adds up gradients of several micro-batches of its own samples and takes them as they are."""
    done = [one for one in intervals(account) if one.of("backward")]
    adds_up = all(
        len(one.of("backward")) > 1
        and not one.step["touched"]
        and all(record["onto"] for record in one.of("backward")[1:])
        for one in done
    )
    return done if len(done) > 1 and adds_up and _of_own_samples(account, done) else []


def _micro_batches(done: Sequence[Interval]) -> int:
    return max((len(one.of("backward")) for one in done), default=0)


def _of_own_samples(account: Account, done: Sequence[Interval]) -> bool:
    """Whether each backward is over other samples: not several losses or tasks of one batch, nor a batch of each of
    several loaders, which may be added up. Samples that come from no loader are told apart by what went forward."""
    trained = [one for one in passes(account) if one.trains]
    if trained:
        backwards = sum(len(one.of("backward")) for one in done)
        return len({one.loader["loader"] for one in trained}) == 1 and sum(p.batches for p in trained) >= backwards
    return all(
        len({record.places for record in one.of("backward")}) == 1
        and len({record["input"] for record in one.of("forward") if record["grad"]} - {None}) == len(one.of("backward"))
        for one in done
    )


def _divisor(backward: Record) -> float | None:
    """By what the mean was divided that a backward begins with; ``None``: it begins with something else."""
    if len(backward["roots"] or ()) != 1:
        return None
    *factors, (last, _) = backward["roots"][0] or [["", None]]
    divides = len(factors) < 2 and all(name == "DivBackward0" for name, _ in factors)
    return (factors[0][1] if factors else 1) if last in _MEANS and divides else None


_MEANS = frozenset(
    {
        "MeanBackward0",
        "MseLossBackward0",
        "NllLossBackward0",
        "NllLoss2DBackward0",
        "L1LossBackward0",
        "SmoothL1LossBackward0",
        "BinaryCrossEntropyWithLogitsBackward0",
        "BinaryCrossEntropyBackward0",
    }
)


def unequal_weight_average(run: Run) -> Iterator[Finding]:
    """Ranks divide the same loss by different numbers."""
    seen = 0
    for those in beside(run, "backward"):
        if len({record.place for record in those}) > 1 or not any(record["reached"] for record in those):
            continue
        seen += 1
        roots = [record["roots"][0] if record["roots"] else [] for record in those]
        if len({tuple(name for name, _ in root) for root in roots}) > 1:
            continue
        weighted = [(nodes[0][0], nodes) for nodes in zip(*roots, strict=True)]
        for _, nodes in weighted:
            counts = [divisor for _, divisor in nodes]
            name = nodes[0][0]
            if None in counts or len(set(counts)) == 1 or name not in {*_MEANS, "DivBackward0"}:
                continue
            if name == "DivBackward0" and not all(value == int(value) and value > 0 for value in counts):
                continue
            if any(name == "MulBackward0" and len({factor for _, factor in own}) > 1 for name, own in weighted):
                continue  # each rank weighs its mean by its own share
            yield from found(
                "unequal-weight-average",
                those[0].place,
                "each rank takes a mean over its own number of samples or tokens, and DDP counts these means alike",
                f"at backward {seen} the ranks' losses were means over {' and '.join(f'{n:g}' for n in counts)}",
                severity="error" if max(counts) > _NEARLY * min(counts) else "warning",
            )
            return


def clip_before_sync(run: Run) -> Iterator[Finding]:
    """Each rank by its own norm, and reduced afterwards."""
    for those in _steps(run):
        one = those[0]
        clips = [one_rank.of("clip") for one_rank in those]
        for side in zip(*clips, strict=False):
            norms = [clip["norm"] for clip in side]
            before = [r for r in one.of("backward") if r.at_s < side[0].at_s]
            held = bool(before) and "held" in dict(before[-1]["reached"] or ()).values()
            later = any(r["grads"] for r in one.of("collective") if r.at_s > side[0].at_s)
            if (held or later) and len(set(norms)) > 1:
                yield from found(
                    "clip-before-sync",
                    side[0].place,
                    "gradients are clipped before they are reduced",
                    f"before step {one.number + 1} the ranks clipped by norms of "
                    f"{', '.join(f'{norm:.3g}' for norm in norms if norm is not None)}",
                )
                return


def gradscaler_diverges(run: Run) -> Iterator[Finding]:
    for those in beside(run, "scale"):
        after = [record["after"] for record in those]
        if len(set(after)) > 1:
            yield from found(
                "gradscaler-diverges",
                those[0].place,
                "the ranks' loss scales are not the same any more",
                f"scales {', '.join(f'{scale:g}' for scale in after)} on ranks 0 to {run.world - 1}",
            )
            return


def gather_without_grad(run: Run) -> Iterator[Finding]:
    records = list(run.accounts[0].of("gathered"))
    if records:
        yield from found(
            "gather-without-grad",
            records[0].place,
            "what all_gather returns carries no gradient, and the rank's own part was not put back",
            f"{count(len(records), 'backward')} came after it on rank 0",
            confidence="likely",
        )


def params_changed_after_wrap(run: Run) -> Iterator[Finding]:
    for one in intervals(run.accounts[0]):
        if one.step["changed"]:
            wraps = list(run.accounts[0].of("wrap"))
            names = one.step["changed"]
            later = [those for those in _steps(run) if those[0].number > one.number]
            apart = ""
            if later and _differ(later[-1], "values"):
                apart = f"; weights differ {_gap_of(later[-1], 'sample')} after {later[-1][0].number} steps"
            yield from found(
                "params-changed-after-wrap",
                wraps[0].place if wraps else one.step.place,
                f"{', '.join(names[:4])} became a parameter after DDP had taken its list here",
                f"{count(len(names), 'parameter')} that DDP does not reduce at step {one.number + 1}{apart}",
            )
            return


def optimizer_stale_params(run: Run) -> Iterator[Finding]:
    """Parameters with gradients that no optimizer holds, and an optimizer with parameters that are nobody's."""
    done = intervals(run.accounts[0])
    optimizers = {one.step["optimizer"] for one in done}
    if len(done) < 2 or not optimizers:
        return
    unheld = set.intersection(*(set(one.step["unheld"] or ()) for one in done))
    idle = [one for one in done if one.step["grads"] and all(grad is None for grad in one.step["grads"])]
    strangers = [one for one in done if one.step["in_ddp"] is not None and not all(one.step["in_ddp"])]
    if unheld and (idle or strangers):
        yield from found(
            "optimizer-stale-params",
            done[0].step.place,
            "the optimizer holds parameters that are not the model's any more",
            f"{', '.join(sorted(unheld)[:4])} had gradients at each of {count(len(done), 'step')}, "
            "and no optimizer that steps holds them",
        )


def alike(account: Account) -> dict[int, Sequence[bool]]:
    """By optimizer which of its parameters are to be equal on all ranks: those of a DDP, and those whose gradients the
    script reduces itself. Others may be each rank's own: parts of a model that is cut in pieces, players of their
    own."""
    return {one.step["optimizer"]: one.step["alike"] for one in intervals(account) if one.step["alike"] is not None}


def _of_replicas(run: Run) -> Iterator[list[Interval]]:
    """Steps with only those parameters that are to be equal on all ranks."""
    known = [alike(account) for account in run.accounts]
    for those in _steps(run):
        masks = [own.get(one.step["optimizer"], ()) for own, one in zip(known, those, strict=True)]
        if any(masks[0]) and all(mask == masks[0] for mask in masks):
            yield [_with_only(one, masks[0]) for one in those]


def _with_only(one: Interval, mask: Sequence[bool]) -> Interval:
    facts = {
        name: [value for value, to_be_equal in zip(one.step[name] or (), mask, strict=False) if to_be_equal]
        for name in ("values", "grads", "sample", "grad_sample", "names")
    }
    return replace(one, step=replace(one.step, facts=one.step.facts | facts))


def resume_on_one_rank(run: Run) -> Iterator[Finding]:
    told = _first_apart(run)
    if told is not None and 0 < len(told.loaders) < run.world:
        who = sorted(told.loaders)
        yield from found(
            "resume-on-one-rank",
            told.loaders[who[0]].place,
            f"only {ranks(who)} load{'s' if len(who) == 1 else ''} this state",
            told.evidence,
        )


def replicas_start_different(run: Run) -> Iterator[Finding]:
    told = _first_apart(run)
    if told is not None and told.before is None and len(told.loaders) in (0, run.world):
        made = run.accounts[0].first("optimizer") or told.those[0].step
        yield from found(
            "replicas-start-different", made.place, "each rank begins with weights of its own", told.evidence
        )


def replicas_diverged(run: Run) -> Iterator[Finding]:
    if (told := _first_apart(run)) is not None:
        cause = ""
        if told.before is not None and _differ(told.before, "grads"):
            apart = _gap_of(told.before, "grad_sample")
            cause = f"; the gradients of step {told.before[0].number + 1} differed {apart}"
        yield from found(
            "replicas-diverged",
            (told.before or told.those)[0].step.place,
            "the ranks' weights are not the same any more",
            f"{told.evidence}, in {_names(run, told.those)}{cause}",
        )


class _Apart(NamedTuple):
    """Weights that are not equal any more.

    Args:
        those, before: the first step that is taken with them, and the one before, if there was one.
        loaders: by rank where it has loaded a state in between, if it has.
    """

    those: list[Interval]
    before: list[Interval] | None
    loaders: dict[int, Record]
    evidence: str


def _first_apart(run: Run) -> _Apart | None:
    before: list[Interval] | None = None
    for those in _of_replicas(run) if any(run.all("init")) else ():
        if _differ(those, "values"):
            since_s = before[0].step.at_s if before is not None else 0.0
            loads: dict[int, Record] = {}
            for record in run.all("load-state"):
                if since_s < record.at_s < those[0].step.at_s and record["whole"] is not False:
                    loads.setdefault(record.rank, record)
            when = f"before step {those[0].number + 1}"
            told = f"{when} the ranks' weights differ {_gap_of(those, 'sample')}"
            return _Apart(those, before, loads, told)
        before = those
    return None


def _names(run: Run, those: Sequence[Interval]) -> str:
    """Of the weights that differ, as far as they were told: at an optimizer's first step."""
    same = (those_too[0].step for those_too in _of_replicas(run))
    names: list[str] = next((step["names"] for step in same if step["optimizer"] == those[0].step["optimizer"]), [])
    values = [one.step["values"] for one in those]
    differing = [i for i, column in enumerate(zip(*values, strict=False)) if len(set(column)) > 1]
    shown = [names[i] for i in differing[:3] if i < len(names)]
    return f"{', '.join(shown)}{' and others' if len(differing) > 3 else ''}" or "the weights"


CHECKS = (
    ddp_forward_bypassed,
    unsynced_optimizer_step,
    no_sync_forward_outside,
    redundant_grad_allreduce,
    accumulation_not_normalised,
    loss_scaled_by_world_size,
    unequal_weight_average,
    clip_before_sync,
    gradscaler_diverges,
    gather_without_grad,
    params_changed_after_wrap,
    optimizer_stale_params,
    resume_on_one_rank,
    replicas_start_different,
    replicas_diverged,
)
