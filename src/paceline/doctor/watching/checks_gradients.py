"""Whether what each rank stepped with had been reduced, once, and whether the replicas stayed equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.doctor.findings import Finding
from paceline.doctor.watching.evidence import Interval, at, beside, count, found, gap, intervals, ranks
from paceline.doctor.watching.records import Place, Record, Run

__all__ = ["CHECKS"]

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
    return f"{gap([one.step[name] for one in those]):.3g}"


def _differ(those: Sequence[Interval], name: str) -> bool:
    return len({tuple(one.step[name] or ()) for one in those}) > 1


def _bypassed(run: Run) -> Iterator[Finding]:
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
        return (
            f"at step {number} the ranks' gradients differ by up to {_gap_of(those, 'grad_sample')} (values looked at)"
        )
    return f"step {number} was taken without any reduction"


def _unsynced(run: Run) -> Iterator[Finding]:
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


def _no_sync_outside(run: Run) -> Iterator[Finding]:
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


def _twice(run: Run) -> Iterator[Finding]:
    for one in intervals(run.accounts[0]):
        synced = any(pending == "synced" for pending in _reached(one).values())
        again = [record for record in one.of("collective") if record["grads"] == "ddp"]
        backwards = [record for record in one.of("backward") if "synced" in dict(record["reached"] or ()).values()]
        if synced and again and again[-1].at_s > backwards[-1].at_s:
            yield from found(
                "redundant-grad-allreduce",
                again[0].place,
                "gradients that DDP has just averaged are reduced again",
                f"{count(len(again), 'reduction')} of gradients before step {one.number + 1}, after DDP's own",
            )
            return


def _not_normalised(run: Run) -> Iterator[Finding]:
    """Several backwards of the same line in each step, each of a plain mean."""
    all_steps = [one for one in intervals(run.accounts[0]) if one.of("backward")]
    if len(all_steps) < 2:
        return
    numbers = set()
    for one in all_steps:
        backwards = one.of("backward")
        if len({record.place for record in backwards}) != 1 or one.step["touched"]:
            return
        if not all(_plain_mean(record) for record in backwards):
            return
        numbers.add(len(backwards))
    each = max(numbers)
    if min(numbers) > 1:
        yield from found(
            "accumulation-not-normalised",
            all_steps[0].of("backward")[0].place,
            f"each step adds up the gradients of {each} micro-batches, whose losses are means",
            f"{each} backwards before each of {count(len(all_steps), 'step')}, each of a mean that is not divided "
            f"by {each}: steps are {each} times as large",
        )


def _plain_mean(backward: Record) -> bool:
    roots = backward["roots"] or []
    return len(roots) == 1 and len(roots[0]) == 1 and roots[0][0][0] in _MEANS


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


def _unequal_weights(run: Run) -> Iterator[Finding]:
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


def _clipped_early(run: Run) -> Iterator[Finding]:
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


def _scaler(run: Run) -> Iterator[Finding]:
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


def _gathered(run: Run) -> Iterator[Finding]:
    records = list(run.accounts[0].of("gathered"))
    if records:
        yield from found(
            "gather-without-grad",
            records[0].place,
            "what all_gather returns carries no gradient, and the rank's own part was not put back",
            f"{count(len(records), 'backward')} came after it on rank 0",
            confidence="likely",
        )


def _changed_after_wrap(run: Run) -> Iterator[Finding]:
    for one in intervals(run.accounts[0]):
        if one.step["changed"]:
            wraps = list(run.accounts[0].of("wrap"))
            names = one.step["changed"]
            later = [those for those in _steps(run) if those[0].number > one.number]
            apart = ""
            if later and _differ(later[-1], "values"):
                apart = f"; weights differ by {_gap_of(later[-1], 'sample')} after {later[-1][0].number} steps"
            yield from found(
                "params-changed-after-wrap",
                wraps[0].place if wraps else one.step.place,
                f"{', '.join(names[:4])} became a parameter after DDP had taken its list here",
                f"{count(len(names), 'parameter')} that DDP does not reduce at step {one.number + 1}{apart}",
            )
            return


def _stale_parameters(run: Run) -> Iterator[Finding]:
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


def _start(run: Run) -> Iterator[Finding]:
    """The weights before the first step."""
    first = next(_steps(run), None)
    if first is None or not _differ(first, "values") or not any(True for _ in run.all("init")):
        return
    loads = [[r for r in account.of("load-state") if r.at_s < first[0].step.at_s] for account in run.accounts]
    who = [number for number, those in enumerate(loads) if those]
    evidence = f"before the first step the ranks' weights differ by up to {_gap_of(first, 'sample')} (values looked at)"
    if 0 < len(who) < run.world:
        yield from found(
            "resume-on-one-rank",
            loads[who[0]][0].place,
            f"only {ranks(who)} load{'s' if len(who) == 1 else ''} this state",
            evidence,
        )
    else:
        yield from found(
            "replicas-start-different",
            _made_at(run) or first[0].step.place,
            "each rank begins with weights of its own",
            evidence,
        )


def _made_at(run: Run) -> Place | None:
    made = run.accounts[0].first("optimizer")
    return made.place if made is not None else None


def _diverged(run: Run) -> Iterator[Finding]:
    previous: list[Interval] | None = None
    for those in _steps(run):
        if _differ(those, "values") and any(True for _ in run.all("init")):
            names = _names(run, those)
            cause = ""
            if previous is not None and _differ(previous, "grads"):
                cause = (
                    f"; the gradients of step {previous[0].number + 1} differed by {_gap_of(previous, 'grad_sample')}"
                )
            yield from found(
                "replicas-diverged",
                (previous or those)[0].step.place,
                "the ranks' weights are not the same any more",
                f"first seen before step {those[0].number + 1}, in {names}: up to {_gap_of(those, 'sample')}{cause}",
            )
            return
        previous = those


def _names(run: Run, those: Sequence[Interval]) -> str:
    names: list[str] = []
    for one in intervals(run.accounts[0]):
        if one.step["names"] and one.step["optimizer"] == those[0].step["optimizer"]:
            names = one.step["names"]
            break
    values = [one.step["values"] for one in those]
    differing = [i for i, column in enumerate(zip(*values, strict=False)) if len(set(column)) > 1]
    shown = [names[i] for i in differing[:3] if i < len(names)]
    return f"{', '.join(shown)}{' and others' if len(differing) > 3 else ''}" or "the weights"


CHECKS = (
    _bypassed,
    _unsynced,
    _no_sync_outside,
    _twice,
    _not_normalised,
    _unequal_weights,
    _clipped_early,
    _scaler,
    _gathered,
    _changed_after_wrap,
    _stale_parameters,
    _start,
    _diverged,
)
