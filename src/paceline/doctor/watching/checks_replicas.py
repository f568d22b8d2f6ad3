"""Whether replicas start equal and stay so, and whether it is their weights that are stepped with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from paceline.doctor.findings import Finding
from paceline.doctor.watching.checks_gradients import differ, how_far_apart, same_steps
from paceline.doctor.watching.evidence import Interval, beside, count, found, intervals, ranks
from paceline.doctor.watching.records import Account, Record, Run

__all__ = ["CHECKS", "alike"]


def params_changed_after_wrap(run: Run) -> Iterator[Finding]:
    for one in intervals(run.accounts[0]):
        if one.step["changed"]:
            wraps = list(run.accounts[0].of("wrap"))
            names = one.step["changed"]
            later = [those for those in same_steps(run) if those[0].number > one.number]
            apart = ""
            if later and differ(later[-1], "values"):
                apart = f"; weights differ {how_far_apart(later[-1], 'sample')} after {later[-1][0].number} steps"
            yield from found(
                "params-changed-after-wrap",
                wraps[0].place if wraps else one.step.place,
                f"{', '.join(names[:4])} became a parameter after DDP had taken its list here",
                f"{count(len(names), 'parameter')} that DDP does not reduce at step {one.number + 1}{apart}",
                stands_in=True,
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
            stands_in=True,
        )


def alike(account: Account) -> dict[int, Sequence[bool]]:
    """By optimizer which of its parameters are to be equal on all ranks: those of a DDP, and those whose gradients the
    script reduces itself. Others may be each rank's own: parts of a model that is cut in pieces, players of their
    own."""
    return {one.step["optimizer"]: one.step["alike"] for one in intervals(account) if one.step["alike"] is not None}


def _of_replicas(run: Run) -> Iterator[list[Interval]]:
    """Steps with only those parameters that are to be equal on all ranks."""
    known = [alike(account) for account in run.accounts]
    for those in same_steps(run):
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
            "replicas-start-different",
            made.place,
            "each rank begins with weights of its own",
            told.evidence,
            stands_in=True,
        )


def replicas_diverged(run: Run) -> Iterator[Finding]:
    if run.circumstances.averages_weights:
        return
    told, rated = _first_apart(run), _at_other_rates(run)
    if rated is not None and (told is None or rated[0].number < told.those[0].number):
        yield from _rated(run, rated, told)
    elif told is not None:
        cause = ""
        if told.before is not None and differ(told.before, "grads"):
            apart = how_far_apart(told.before, "grad_sample")
            cause = f"; the gradients of step {told.before[0].number + 1} differed {apart}"
        yield from found(
            "replicas-diverged",
            (told.before or told.those)[0].step.place,
            "the ranks' weights are not the same any more",
            f"{told.evidence}, in {_names(run, told.those)}{cause}",
            stands_in=True,
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
        if differ(those, "values"):
            since_s = before[0].step.at_s if before is not None else 0.0
            loads: dict[int, Record] = {}
            for record in run.all("load-state"):
                if since_s < record.at_s < those[0].step.at_s and record["whole"] is not False:
                    loads.setdefault(record.rank, record)
            when = f"before step {those[0].number + 1}"
            told = f"{when} the ranks' weights differ {how_far_apart(those, 'sample')}"
            return _Apart(those, before, loads, told)
        before = those
    return None


def _at_other_rates(run: Run) -> list[Interval] | None:
    """The first step that ranks take at learning rates of their own, though their weights are to stay equal."""
    known = [alike(account) for account in run.accounts]
    for those in same_steps(run) if any(run.all("init")) else ():
        if len({tuple(one.step["rates"] or ()) for one in those}) > 1:
            masks = [own.get(one.step["optimizer"], ()) for own, one in zip(known, those, strict=True)]
            if all(mask and all(mask) for mask in masks):
                return those
    return None


def _rated(run: Run, those: Sequence[Interval], told: _Apart | None) -> Iterator[Finding]:
    """At the scheduler that made them so, if one has; else they were given so."""
    since = [those_too for those_too in beside(run, "scheduled") if len({str(r["rates"]) for r in those_too}) > 1]
    made = [r for r in run.accounts[0].of("optimizer") if r["optimizer"] == those[0].step["optimizer"]]
    scheduled = next((records[0] for records in since if records[0].at_s < those[0].step.at_s), None)
    rates = " and ".join(f"{(one.step['rates'] or [0.0])[0]:g}" for one in those)
    yield from found(
        "replicas-diverged",
        (scheduled or next(iter(made), those[0].step)).place,
        "each rank's scheduler decides for itself, and the learning rates are not the same any more"
        if scheduled is not None
        else "the ranks take their steps at different learning rates",
        f"step {those[0].number + 1} was taken at {rates} on ranks 0 to {run.world - 1}"
        + (f"; {told.evidence}" if told is not None else ""),
        fix="Reduce what the learning rate depends on over all ranks first: all_reduce it, then step the scheduler"
        if scheduled is not None
        else "Give every rank the same learning rate",
    )


def _names(run: Run, those: Sequence[Interval]) -> str:
    """Of the weights that differ, as far as they were told: at an optimizer's first step."""
    same = (those_too[0].step for those_too in _of_replicas(run))
    names: list[str] = next((step["names"] for step in same if step["optimizer"] == those[0].step["optimizer"]), [])
    values = [one.step["values"] for one in those]
    differing = [i for i, column in enumerate(zip(*values, strict=False)) if len(set(column)) > 1]
    shown = [names[i] for i in differing[:3] if i < len(names)]
    return f"{', '.join(shown)}{' and others' if len(differing) > 3 else ''}" or "the weights"


CHECKS = (
    params_changed_after_wrap,
    optimizer_stale_params,
    resume_on_one_rank,
    replicas_start_different,
    replicas_diverged,
)
