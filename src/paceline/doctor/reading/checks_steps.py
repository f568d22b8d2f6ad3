"""Rules about one optimizer step: which gradients are in it, reduced when, and how they are weighted."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.findings import Finding
from paceline.doctor.reading.evidence import Step, found, local, modules_in, wrapped
from paceline.doctor.reading.trace import Event, Loop, Trace
from paceline.doctor.reading.values import STEPS, VARYING, Value

__all__ = ["CHECKS", "reduces_gradients"]


def reduces_gradients(trace: Trace) -> list[Event]:
    """Where the script reduces gradients by itself."""
    return [
        event
        for event in trace.of("collective")
        for value in event.arguments.values()
        if "gradient" in value.labels or any("gradient" in part.labels for part in value.items or ())
    ]


def _by_hand(trace: Trace) -> bool:
    """Whether reducing is in the script's own hands: nothing can be said of when it happens."""
    own = any(event.name == "require_backward_grad_sync" for event in trace.of("store"))
    return own or bool(reduces_gradients(trace)) or trace.any("comm_hook")


def _around(step: Event, backwards: list[Event]) -> tuple[Loop, list[Event], bool] | None:
    """The loop whose iterations lead to a step, its backwards, and whether the step itself is in it."""
    same = [event for event in backwards if event.loops and event.loops == step.loops]
    if same:
        return same[0].loops[-1], same, True
    deeper = [
        event
        for event in backwards
        if len(event.loops) == len(step.loops) + 1 and event.loops[:-1] == step.loops and event.number < step.number
    ]
    return (deeper[0].loops[-1], deeper, False) if deeper else None


def _last(loop: Loop) -> int | None:
    """Its last iteration, if there are so few that they can be looked at."""
    count = loop.count.default if loop.count is not None else None
    return count - 1 if isinstance(count, int) and 0 < count <= STEPS else None


def unsynced_step(trace: Trace) -> Iterator[Finding]:
    """The optimizer steps, or gradients are clipped, while some were not reduced."""
    if _by_hand(trace) or not any(event.in_context("no_sync") for event in trace.of("backward")):
        return
    backwards = list(trace.of("backward"))
    seen: set[str] = set()
    for step in [*trace.of("step"), *trace.of("clip"), *trace.of("unscale")]:
        rule = {"clip": "clip-before-sync", "unscale": "gradscaler-diverges"}.get(step.role, "unsynced-optimizer-step")
        around = _around(step, backwards)
        if around is None or rule in seen or not _meets_unsynced(step, *around):
            continue
        seen.add(rule)
        told = {
            "clip": "gradients are clipped here while they are this rank's own: `no_sync` kept them from being reduced",
            "unscale": "gradients are unscaled and checked here while they are this rank's own",
            "step": "the optimizer steps here on gradients that `no_sync` kept from being reduced",
        }[step.role]
        yield found(rule, step, told, evidence=f"the last backward before it, line {around[1][-1].line}, is in no_sync")


def _meets_unsynced(step: Event, loop: Loop, backwards: list[Event], inside: bool) -> bool:
    pending = False
    last = _last(loop)
    for index in range(STEPS if inside else (last + 1 if last is not None else 0)):
        now = Step(loop, 0, index)
        for event in sorted([*backwards, *([step] if inside else [])], key=lambda e: e.number):
            happens = now.happens(event)
            if event is step:
                if happens and pending:
                    return True
                continue
            if happens is False:
                continue
            state = now.unsynced(event)
            if happens is None or state is None:
                return False
            pending = state
    if not inside and last is None:
        return all(Step(loop, 0, 0).unsynced(event) is True for event in backwards)
    return pending and not inside


def forward_outside(trace: Trace) -> Iterator[Finding]:
    forwards = {f"forward:{event.number}": event for event in trace.of("forward")}
    for event in trace.of("backward"):
        if not event.in_context("no_sync"):
            continue
        made_by = [forwards[label] for label in event.labels if label in forwards]
        outside = [f for f in made_by if f.subject.of_kind("ddp") is not None and not f.in_context("no_sync")]
        if outside and len(outside) == len(made_by):
            yield found(
                "no-sync-forward-outside",
                event,
                "only backward is in `no_sync`, and the forward has already decided to reduce",
                evidence=f"forward at line {outside[0].line} is outside of it",
            )


def not_normalised(trace: Trace) -> Iterator[Finding]:
    backwards = list(trace.of("backward"))
    if any(event.role == "grad" for event in trace.events):
        return
    for step in trace.of("step"):
        around = _around(step, backwards)
        if around is None:
            continue
        loop, those, inside = around
        plain = [e for e in those if "mean" in e.labels and not e.labels & {"divided", "own-mean", "over-global-count"}]
        if len(plain) != len(those) or not _accumulates(trace, step, loop, those, inside):
            continue
        yield found(
            "accumulation-not-normalised",
            those[0],
            "several of these gradients are added up before each step, and each loss is a mean already",
            evidence=f"{those[0].source} comes several times before the step at line {step.line}",
        )
        return


def _accumulates(trace: Trace, step: Event, loop: Loop, backwards: list[Event], inside: bool) -> bool:
    zeroed = [event for event in trace.of("zero_grad") if loop in event.loops]
    forwards = {f"forward:{event.number}" for event in trace.of("forward") if loop in event.loops}
    if not any(forwards & event.labels for event in backwards):
        return False
    if not inside:
        return loop.repeats and not zeroed and not loop.is_while
    own = [c for c in step.under if all(c.value is not other.value for event in backwards for other in event.under)]
    if not any("every-nth" in condition.value.labels for condition in own):
        return False
    first = backwards[0]
    return not any(all(any(c.value is other.value for other in first.under) for c in event.under) for event in zeroed)


def weighted(trace: Trace) -> Iterator[Finding]:
    """How each rank's loss counts."""
    if not trace.any("wrap"):
        return
    for event in trace.of("backward"):
        labels = event.labels
        if labels & {"times-world", "divided-by-world"} and not labels & {"reduced", "gathered", "over-global-count"}:
            yield found(
                "loss-scaled-by-world-size",
                event,
                "this loss is scaled by the world size, and DDP averages gradients over ranks already",
            )
        if "mean-of-some" in labels and labels & VARYING and "reduced" not in labels:
            yield found(
                "unequal-weight-average",
                event,
                "this loss is a mean over the targets that are not ignored, and DDP averages these means as if every "
                "rank had as many",
                severity="advice",
                confidence="possible",
            )
        if "own-mean" in labels and "reduced" not in labels:
            yield found(
                "unequal-weight-average",
                event,
                "this loss is a sum over this rank's own count, and DDP averages them as if all counts were equal",
            )


def gathered(trace: Trace) -> Iterator[Finding]:
    for event in trace.of("backward"):
        if "gathered" in event.labels:
            yield found(
                "gather-without-grad",
                event,
                "this loss uses what `all_gather` returned, which carries no gradient, not even for this rank's part",
            )


def clipped_before_reducing(trace: Trace) -> Iterator[Finding]:
    """Without DDP: the script reduces gradients itself, after they were clipped or unscaled."""
    if trace.any("wrap") and not all(event.in_context("no_sync") for event in trace.of("backward")):
        return
    for reduce in reduces_gradients(trace):
        for event in trace.of("clip", "unscale"):
            backward = [e for e in trace.of("backward") if e.number < event.number and e.loops[:1] == event.loops[:1]]
            steps = [e for e in trace.of("step") if e.number > reduce.number]
            if backward and steps and backward[-1].number < event.number < reduce.number:
                rule = "clip-before-sync" if event.role == "clip" else "gradscaler-diverges"
                yield found(rule, event, f"gradients are still this rank's own here: line {reduce.line} reduces them")


def scaler_diverges(trace: Trace) -> Iterator[Finding]:
    for event in trace.of("scaler_update", "step"):
        if event.subject.of_kind("scaler") is None:
            continue
        if event.on_some_ranks or any(local(condition) for condition in event.under):
            yield found("gradscaler-diverges", event, "not every rank comes to this call, so loss scales drift apart")
    for event in trace.of("scaler"):
        scale = event.argument("init_scale")
        if scale is not None and scale.varies:
            yield found("gradscaler-diverges", event, "ranks start with different loss scales")


def redundant_reduce(trace: Trace) -> Iterator[Finding]:
    inner = wrapped(trace)
    if any(event.in_context("no_sync") for event in trace.of("backward")) or not inner:
        return
    if not any(event.subject.of_kind("ddp") is not None for event in trace.of("forward")):
        return
    for event in reduces_gradients(trace):
        tensor = event.argument("tensor")
        owner = tensor.fields.get("of", Value()).fields.get("owner") if tensor is not None else None
        flattened = tensor is not None and tensor.kind == "tensor"
        if flattened or (owner is not None and (owner.kind == "ddp" or any(id(m) in inner for m in modules_in(owner)))):
            yield found("redundant-grad-allreduce", event, "DDP has reduced these gradients in backward already")


CHECKS = (
    unsynced_step,
    forward_outside,
    not_normalised,
    weighted,
    gathered,
    clipped_before_reducing,
    scaler_diverges,
    redundant_reduce,
)
