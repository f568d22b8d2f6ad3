"""Rules about one optimizer step: which gradients are in it, reduced when, and how they are weighted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.doctor.reading.evidence import (
    Found,
    Step,
    differs,
    forwards,
    instead,
    local,
    modules_in,
    rule_check,
    wrapped,
)
from paceline.doctor.reading.trace import Event, Loop, Trace
from paceline.doctor.reading.values import STEPS, VARYING, Value

__all__ = ["reduces_gradients"]


def reduces_gradients(trace: Trace) -> list[Event]:
    """Where the script reduces gradients by itself."""
    return [
        event
        for event in trace.of("collective")
        for value in event.arguments.values()
        if "gradient" in value.labels or any("gradient" in part.labels for part in value.items or ())
    ]


# --- steps on gradients that `no_sync` kept apart


@rule_check("unsynced-optimizer-step")
def unsynced_optimizer_step(trace: Trace) -> Iterator[Found]:
    for step, unsynced in _meets_unsynced(trace, "step"):
        yield Found(
            step,
            "the optimizer steps here on gradients that `no_sync` kept from being reduced",
            evidence=f"the last backward before it, line {unsynced.line}, is in no_sync",
        )


@rule_check("clip-before-sync")
def clip_before_sync(trace: Trace) -> Iterator[Found]:
    if not any(_meets_unsynced(trace, "step")):  # else the whole step comes too early
        for clip, unsynced in _meets_unsynced(trace, "clip"):
            yield Found(
                clip,
                "gradients are clipped here while they are this rank's own: `no_sync` kept them from being reduced",
                evidence=f"the last backward before it, line {unsynced.line}, is in no_sync",
            )
    yield from _before_reducing(trace, "clip")


@rule_check("gradscaler-diverges")
def gradscaler_diverges(trace: Trace) -> Iterator[Found]:
    if not any(_meets_unsynced(trace, "step")):
        for unscale, unsynced in _meets_unsynced(trace, "unscale"):
            yield Found(
                unscale,
                "gradients are unscaled and checked here while they are this rank's own",
                evidence=f"the last backward before it, line {unsynced.line}, is in no_sync",
            )
    yield from _before_reducing(trace, "unscale")
    for event in trace.of("scaler_update", "step"):
        kept_away = [c for c in event.under if local(c) or (event.on_some_ranks and "rank" in c.value.labels)]
        alone = [condition for condition in kept_away if not instead(event, condition, trace)]
        if event.subject.of_kind("scaler") is not None and alone:
            yield Found(event, "not every rank comes to this call, so loss scales drift apart")
    for event in trace.of("scaler"):
        scale = event.argument("init_scale")
        if scale is not None and differs(scale):
            yield Found(event, "ranks start with different loss scales")


@dataclass(frozen=True, slots=True)
class _Micro:
    """The loop whose iterations lead to a step.

    Args:
        backwards: in it.
        inside: whether the step is in it as well, and not behind it.
    """

    loop: Loop
    backwards: list[Event]
    inside: bool


def _micro_batches(step: Event, backwards: list[Event]) -> _Micro | None:
    same = [event for event in backwards if event.loops and event.loops == step.loops]
    if same:
        return _Micro(same[0].loops[-1], same, inside=True)
    deeper = [
        event
        for event in backwards
        if len(event.loops) == len(step.loops) + 1 and event.loops[:-1] == step.loops and event.number < step.number
    ]
    return _Micro(deeper[0].loops[-1], deeper, inside=False) if deeper else None


def _meets_unsynced(trace: Trace, role: str) -> Iterator[tuple[Event, Event]]:
    """The first event of that role that comes while some gradients are not reduced, and the backward that left them."""
    backwards = list(trace.of("backward"))
    in_hand = bool(reduces_gradients(trace)) or trace.any("comm_hook")
    switched = any(event.name == "require_backward_grad_sync" for event in trace.of("store"))
    if in_hand or switched or not any(event.in_context("no_sync") for event in backwards):
        return
    for event in trace.of(role):
        micro = _micro_batches(event, backwards)
        if micro is None:
            continue
        beside = next((backward for backward in micro.backwards if _in_one_no_sync(backward, event)), None)
        if beside is not None or (_in_some_round(event, micro) if micro.inside else _after_the_last(micro)):
            yield event, beside or micro.backwards[-1]
            return


def _in_one_no_sync(backward: Event, event: Event) -> bool:
    """Whether an event follows a backward in the same `no_sync`, in whichever rounds that is one."""
    shared = [context for context in backward.within if any(context is other for other in event.within)]
    may_be = any(option.name == "no_sync" for context in shared for option in context.each())
    return may_be and event.number > backward.number and event.under == backward.under


def _in_some_round(step: Event, micro: _Micro) -> bool:
    pending = False
    shared = set.intersection(*({(id(c.value), c.holds) for c in event.under} for event in [*micro.backwards, step]))
    for index in range(STEPS):
        now = Step(micro.loop, 0, index, given=shared)
        for event in sorted([*micro.backwards, step], key=lambda event: event.number):
            happens = now.happens(event)
            if event is step:
                if happens and pending:
                    return True
            elif happens is not False:
                unsynced = now.unsynced(event)
                if happens is None or unsynced is None:
                    return False
                pending = unsynced
    return False


def _after_the_last(micro: _Micro) -> bool:
    """Whether the last round leaves gradients that are not reduced."""
    count = micro.loop.count.default if micro.loop.count is not None else None
    if not isinstance(count, int) or not 0 < count <= STEPS:
        return all(Step(micro.loop, 0, 0).unsynced(event) is True for event in micro.backwards)
    pending = False
    for index in range(count):
        now = Step(micro.loop, 0, index)
        for event in micro.backwards:
            if (happens := now.happens(event)) is False:
                continue
            unsynced = now.unsynced(event)
            if happens is None or unsynced is None:
                return False
            pending = unsynced
    return pending


def _before_reducing(trace: Trace, role: str) -> Iterator[Found]:
    """Without DDP: the script reduces gradients itself, after they were clipped or unscaled."""
    backwards = list(trace.of("backward"))
    if trace.any("wrap") and not all(event.in_context("no_sync") for event in backwards):
        return
    for reduce in reduces_gradients(trace):
        stepped = any(step.number > reduce.number for step in trace.of("step"))
        for event in trace.of(role):
            earlier = [b for b in backwards if b.number < event.number and b.loops[:1] == event.loops[:1]]
            if earlier and stepped and event.number < reduce.number:
                yield Found(event, f"gradients are still this rank's own here: line {reduce.line} reduces them")


@rule_check("no-sync-forward-outside")
def no_sync_forward_outside(trace: Trace) -> Iterator[Found]:
    calls = forwards(trace)
    for event in trace.of("backward"):
        made_by = [calls[label] for label in event.labels & calls.keys()]
        outside = [f for f in made_by if f.subject.of_kind("ddp") is not None and not f.in_context("no_sync")]
        if event.in_context("no_sync") and outside and len(outside) == len(made_by):
            yield Found(
                event,
                "only backward is in `no_sync`, and the forward has already decided to reduce",
                evidence=f"forward at line {outside[0].line} is outside of it",
            )


# --- how a loss counts


@rule_check("accumulation-not-normalised")
def accumulation_not_normalised(trace: Trace) -> Iterator[Found]:
    backwards = list(trace.of("backward"))
    if trace.any("grad", "comm_hook"):
        return  # gradients are set by hand, or scaled on their way
    for step in trace.of("step"):
        micro = _micro_batches(step, backwards)
        if micro is not None and all(map(_is_a_mean, micro.backwards)) and _adds_up(trace, step, micro):
            first = micro.backwards[0]
            yield Found(
                first,
                "several of these gradients are added up before each step, and each loss is a mean already",
                evidence=f"{first.source} comes several times before the step at line {step.line}",
            )
            return


def _is_a_mean(backward: Event) -> bool:
    return "mean" in backward.labels and not backward.labels & {"divided", "own-mean", "over-global-count"}


def _adds_up(trace: Trace, step: Event, micro: _Micro) -> bool:
    """Whether several backwards of a loop, each of samples of its own, come to one step."""
    zeroed = [event for event in trace.of("zero_grad") if micro.loop in event.loops]
    calls = {label for label, event in forwards(trace).items() if micro.loop in event.loops}
    if not any(calls & event.labels for event in micro.backwards):
        return False
    if not micro.inside:
        return micro.loop.repeats and not zeroed and not micro.loop.is_while and not _goes_through_parts(micro.loop)
    common = set.intersection(*({(id(c.value), c.holds) for c in event.under} for event in micro.backwards))
    now_and_then = [condition for condition in step.under if (id(condition.value), condition.holds) not in common]
    if not any("every-nth" in condition.value.labels for condition in now_and_then):
        return False
    return not any(all((id(c.value), c.holds) in common for c in event.under) for event in zeroed)


def _goes_through_parts(loop: Loop) -> bool:
    """Whether it is not over samples but over what is done with them: tasks by name, heads, the losses of a step."""
    found: list[Value] = [part for value in loop.over.each() for part in (value, value.fields.get("of", value))]
    if any(value.kind == "dict" for value in found):
        return True  # by name
    if any(value.kind in ("tuple", "list") and value.items and "some" not in value.labels for value in found):
        return True  # each of a few things that are written down
    for _ in range(2):  # pairs, as `items()` and `zip` give them
        found += [item for value in found for item in value.items or ()]
    return any(
        option.kind in ("module", "modules", "function") or isinstance(option.only, str)
        for value in found
        for option in value.each()
    )


@rule_check("loss-scaled-by-world-size")
def loss_scaled_by_world_size(trace: Trace) -> Iterator[Found]:
    for event in trace.of("backward") if trace.any("wrap") and not trace.any("comm_hook") else ():
        labels = event.labels
        summed = "times-count" in labels or ("sum" in labels and "mean" not in labels)
        scaled = "divided-by-world" in labels or ("times-world" in labels and not summed)  # sums are to be added up
        if scaled and not labels & {"reduced", "gathered", "over-global-count"}:
            yield Found(event, "this loss is scaled by the world size, and DDP averages gradients over ranks already")

    if trace.whole:  # it speaks of a division that is missing
        yield from _summed_over_ranks(trace)


def _summed_over_ranks(trace: Trace) -> Iterator[Found]:
    """Without DDP: gradients of means that are added up over ranks, and never divided."""
    backwards = list(trace.of("backward"))
    if not backwards or not all(map(_is_a_mean, backwards)) or any(_is_global(event) for event in backwards):
        return
    if trace.any("wrap", "grad", "clip", "comm_hook", "rate") or not all(map(_minds_a_factor, trace.of("optimizer"))):
        return
    for event in reduces_gradients(trace):
        summed = event.name == "torch.distributed.all_reduce" and _sums(event.argument("op"))
        if summed and event.argument("tensor") is not None and any(s.number > event.number for s in trace.of("step")):
            yield Found(
                event,
                "gradients are added up over ranks here and never divided by their number, though each loss is a mean",
                evidence=f"{event.source}; of a mean: {backwards[0].source} at line {backwards[0].line}",
                severity="warning",
                fix="Divide by the world size after the reduction, or reduce with `ReduceOp.AVG`, which NCCL has",
            )
            return


def _is_global(backward: Event) -> bool:
    """Whether the loss counts what all ranks have."""
    return bool(backward.labels & {"reduced", "gathered", "world", "escaped", "times-count"})


def _sums(op: Value | None) -> bool:
    return op is None or op.name == "torch.distributed.ReduceOp.SUM"


def _minds_a_factor(optimizer: Event) -> bool:
    """Whether its steps are as large as gradients are; Adam's are not. A rate that knows of the ranks may make up for
    it."""
    rate = optimizer.argument("lr")
    return optimizer.name == "torch.optim.SGD" and (rate is None or "world" not in rate.labels)


@rule_check("unequal-weight-average")
def unequal_weight_average(trace: Trace) -> Iterator[Found]:
    for event in trace.of("backward") if trace.any("wrap") else ():
        if "reduced" in event.labels:
            continue
        if "own-mean" in event.labels:
            yield Found(
                event,
                "this loss is a sum divided by this rank's own count, and DDP averages such means as if all counts "
                "were equal",
            )
        elif "mean-of-some" in event.labels and event.labels & VARYING:
            yield Found(
                event,
                "this loss is a mean over the targets that are not ignored, and DDP averages these means as if every "
                "rank had as many",
                severity="advice",
                confidence="possible",
            )


@rule_check("gather-without-grad")
def gather_without_grad(trace: Trace) -> Iterator[Found]:
    for event in trace.of("backward"):
        if "gathered" in event.labels:
            yield Found(
                event,
                "this loss uses what `all_gather` returned, which carries no gradient, not even for this rank's part",
            )


@rule_check("redundant-grad-allreduce")
def redundant_grad_allreduce(trace: Trace) -> Iterator[Found]:
    inner = wrapped(trace)
    called = any(event.subject.of_kind("ddp") is not None for event in trace.of("forward"))
    if (
        not inner
        or not called
        or trace.any("comm_hook")
        or any(event.in_context("no_sync") for event in trace.of("backward"))
    ):
        return
    for event in reduces_gradients(trace):
        tensor = event.argument("tensor")
        owner = tensor.fields.get("of", Value()).fields.get("owner") if tensor is not None else None
        flattened = tensor is not None and tensor.kind == "tensor"
        of_ddp = owner is not None and (owner.kind == "ddp" or any(id(part) in inner for part in modules_in(owner)))
        if flattened or of_ddp:
            yield Found(event, "DDP has reduced these gradients in backward already")
