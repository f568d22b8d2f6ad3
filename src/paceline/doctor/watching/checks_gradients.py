"""Whether what each rank stepped with had been reduced, once, and weighed as it should."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.doctor.findings import Finding
from paceline.doctor.watching.checks_data import passes
from paceline.doctor.watching.evidence import Interval, at, beside, count, found, gap, intervals
from paceline.doctor.watching.records import WEIGHTED, Account, Record, Run

__all__ = ["CHECKS", "differ", "how_far_apart", "same_steps"]

_NEARLY = 1.25
"""Counts of samples that differ by less are bad, and no more."""


def same_steps(run: Run) -> Iterator[list[Interval]]:
    """The same step of the same optimizer, of each rank. With contexts for uneven inputs, in which ranks take as many
    steps as they have batches, only those of the first one go side by side."""
    sides = []
    for account in run.accounts:
        joins = [record.at_s for record in account.of("join")]
        sides.append([one for one in intervals(account) if len(joins) < 2 or one.step.at_s < joins[1]])
    for those in zip(*sides, strict=False):
        if len({one.step["optimizer"] for one in those}) == 1 and all(one.step["plain"] for one in those):
            yield list(those)


def _reached(one: Interval) -> dict[int, str | None]:
    """By DDP whose gradients changed, how the last forward before that meant them: synced, held, or there was none."""
    last: dict[int, str | None] = {}
    for backward in one.of("backward"):
        for ddp, pending in backward["reached"] or ():
            last[ddp] = pending if last.get(ddp) != "synced" or pending is not None else "synced"
    return last


def how_far_apart(those: Sequence[Interval], name: str) -> str:
    """How far apart the ranks are; a few values of each tensor are told."""
    apart = gap([one.step[name] for one in those])
    return f"by up to {apart:.3g} in the values looked at" if apart else "in other values than those looked at"


def differ(those: Sequence[Interval], name: str) -> bool:
    return len({tuple(one.step[name] or ()) for one in those}) > 1


def ddp_forward_bypassed(run: Run) -> Iterator[Finding]:
    """Gradients came to a DDP's parameters although nobody called the DDP."""
    for those in same_steps(run):
        if any(_meets_by_hand(one) for one in those):
            continue
        one = those[0]
        reached = _reached(one)
        bypassed = [ddp for ddp, pending in reached.items() if pending is None]
        if "synced" in reached.values() and not differ(those, "grads"):
            continue  # a player's step through the other one, whose gradients nobody steps with
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
    if differ(those, "grads"):
        return f"at step {number} the ranks' gradients differ {how_far_apart(those, 'grad_sample')}"
    return f"step {number} was taken without any reduction"


def unsynced_optimizer_step(run: Run) -> Iterator[Finding]:
    for those in same_steps(run):
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
            also=[record.place for record in done[0].of("backward")],
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
            also=[record.place for record in done[0].of("backward")],
        )


def summed_over_ranks(run: Run) -> Iterator[Finding]:
    """Gradients that the script reduces by itself, each of a mean, and that nothing divides by the number of ranks.

    Told for plain SGD only: what follows the size of gradients, as Adam does not, nor whoever clips them.
    """
    plain = [record["name"] for record in run.accounts[0].of("optimizer")] == ["SGD"]
    if run.world < 2 or not plain or any(True for _ in run.all("wrap", "clip")):
        return
    done = list(same_steps(run))
    if done and all(_is_sum(those) and _of_means(those[0]) for those in done):
        reductions = [record for record in done[0][0].of("collective") if record["grads"]]
        yield from found(
            "loss-scaled-by-world-size",
            reductions[0].place if reductions else None,
            f"gradients of {run.world} ranks are added up, each of them of a mean, and nothing divides them by "
            f"{run.world}",
            f"at each of {count(len(done), 'step')} the gradient was the sum of the ranks' own, {run.world} times "
            "that of the mean over all samples",
            severity="warning",
            fix="Divide by the world size after the reduction, or reduce with `ReduceOp.AVG`, which NCCL has",
        )


def _is_sum(those: Sequence[Interval]) -> bool:
    """Whether all ranks step with the sum of their own gradients, which are no zeros."""
    if any(one.step["own"] is None for one in those):
        return False
    each = [[value for values in one.step["own"] for value in values] for one in those]
    taken = [[value for values in one.step["grad_sample"] for value in values] for one in those]
    if len({len(own) for own in (*each, *taken)}) > 1:
        return False
    total = [sum(column) for column in zip(*each, strict=True)]
    largest = max(map(abs, total), default=0.0)
    return largest > 0 and all(
        abs(value - expected) <= 1e-3 * largest for own in taken for value, expected in zip(own, total, strict=True)
    )


def _of_means(one: Interval) -> bool:
    """Whether each backward is of a mean, over all that was accumulated if there are several."""
    backwards = one.of("backward")
    return bool(backwards) and all(_divisor(record) == len(backwards) for record in backwards)


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
    *factors, (last, counted) = backward["roots"][0] or [["", None]]
    divides = len(factors) < 2 and all(name == "DivBackward0" for name, _ in factors)
    is_mean = last not in _FACTORS and counted is not None
    return (factors[0][1] if factors else 1) if is_mean and divides else None


_FACTORS = ("DivBackward0", "MulBackward0")


def unequal_weight_average(run: Run) -> Iterator[Finding]:
    """Ranks divide the same loss by different numbers."""
    seen = 0
    for those in beside(run, "backward") if not any(run.all("join")) else ():
        if len({record.place for record in those}) > 1 or not any(record["reached"] for record in those):
            continue
        seen += 1
        roots = [record["roots"][0] if record["roots"] else [] for record in those]
        names = {tuple(name for name, _ in root) for root in roots}
        if len(names) > 1 or any("gradient" in those_names for those_names in names):
            continue
        weighted = [(nodes[0][0], nodes) for nodes in zip(*roots, strict=True)]
        for _, nodes in weighted:
            counts = [divisor for _, divisor in nodes]
            name = nodes[0][0]
            if None in counts or len(set(counts)) == 1 or name == "MulBackward0" or name.endswith(WEIGHTED):
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
    for those in same_steps(run):
        one = those[0]
        clips = [one_rank.of("clip") for one_rank in those]
        for side in zip(*clips, strict=False):
            norms = [clip["norm"] for clip in side]
            later = [r for r in one.of("collective", "backward") if r.at_s > side[0].at_s]
            reduced = any(r["grads"] or "synced" in dict(r["reached"] or ()).values() for r in later)
            if reduced and len(set(norms)) > 1:
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


CHECKS = (
    ddp_forward_bypassed,
    unsynced_optimizer_step,
    no_sync_forward_outside,
    redundant_grad_allreduce,
    accumulation_not_normalised,
    loss_scaled_by_world_size,
    summed_over_ranks,
    unequal_weight_average,
    clip_before_sync,
    gradscaler_diverges,
    gather_without_grad,
)
