"""What two run logs say of each other: the pure part. No process is started here, no file read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from paceline.errors import PacelineError

__all__ = [
    "Cost",
    "Difference",
    "StepBits",
    "WeightGap",
    "cost_of",
    "first_difference",
    "trace_of",
    "weight_gap",
]


@dataclass(frozen=True, kw_only=True)
class StepBits:
    """What a run left of one step, to the bit.

    Args:
        digest: of everything tracked, after the step.
        lanes: each lane's summed loss as a hexadecimal float; computed with the weights from before the step.
        tensors: digest of each tracked tensor after the step, in the order of the state.
        redone: what it left when it was done again, after a loss, as far as that is something else.
    """

    digest: str
    lanes: tuple[str, ...]
    tensors: Mapping[str, str]
    redone: tuple[StepBits, ...] = field(default=(), compare=False)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where two runs part; fields as in the description of ``proof.json`` in `record`."""

    step: int
    kind: Literal["lane loss", "tensor"]
    name: str
    reference: str
    found: str
    count: int
    of: int


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the faults of a run have cost it.

    Args:
        lost: how many workers, while others were left.
        seconds: for how long those stood still until all were at one again, losses and replacements together.
        restarts: how often all had to start again, from a checkpoint or the beginning.
    """

    lost: int
    seconds: float
    restarts: int


@dataclass(frozen=True, kw_only=True)
class WeightGap:
    """How far apart two models are.

    Args:
        max_abs: largest difference of one weight.
        at: the parameter in which it is.
        relative: Euclidean norm of all differences over that of the reference's weights.
    """

    max_abs: float
    at: str
    relative: float


def first_difference(reference: Sequence[StepBits], other: Sequence[StepBits]) -> Difference | None:
    """The first difference of two runs of the same number of steps; ``None`` when every bit agrees.

    At the first step that differs in anything, lanes come before tensors: the losses were computed from weights that
    still agreed, so a loss that differs explains the tensors after it, and never the other way round.

    >>> same, moved = ({"model.w": "aa"}, {"model.w": "ab"})
    >>> a = [StepBits(digest="1", lanes=("0x1p+0",), tensors=same)]
    >>> b = [StepBits(digest="2", lanes=("0x1p+0",), tensors=moved)]
    >>> first_difference(a, b)
    Difference(step=1, kind='tensor', name='model.w', reference='aa', found='ab', count=1, of=1)
    """
    for step, (left, one) in enumerate(zip(reference, other, strict=True), start=1):
        right = next((bits for bits in (one, *one.redone) if bits != left), None)
        if right is None:
            continue
        lanes = [
            ({f"lane {lane}": loss for lane, loss in enumerate(bits.lanes)}, "lane loss") for bits in (left, right)
        ]
        kinds: list[tuple[Literal["lane loss", "tensor"], Mapping[str, str], Mapping[str, str]]] = [
            ("lane loss", lanes[0][0], lanes[1][0]),
            ("tensor", left.tensors, right.tensors),
            ("tensor", {"the whole state": left.digest}, {"the whole state": right.digest}),
        ]
        for kind, here, there in kinds:
            names = list(dict.fromkeys([*here, *there]))
            unlike = [name for name in names if here.get(name) != there.get(name)]
            if unlike:
                name = unlike[0]
                return Difference(
                    step=step,
                    kind=kind,
                    name=name,
                    reference=here.get(name, "none"),
                    found=there.get(name, "none"),
                    count=len(unlike),
                    of=len(names),
                )
    return None


def trace_of(
    events: Sequence[Mapping[str, Any]], *, workers: Sequence[int], steps: int | None, disturbed: bool = False
) -> list[StepBits]:
    """Every step of one variation, from its run log.

    Args:
        workers: worker counts that must have run, in turn.
        steps: how many steps it must have run; ``None``: to the end of the recipe.
        disturbed: by faults, so that it may have started, and done a step, more than once.

    Raises:
        PacelineError: the log does not show just that, so it proves nothing.
    """
    starts = [event["workers"] for event in events if event["event"] == "start"]
    digests = [event for event in events if event["event"] == "digest"]
    ends = [event for event in events if event["event"] == "end"]
    last: Mapping[str, Any] = ends[-1] if ends else {"step": 0, "steps": steps or 1, "digest": None}
    needed: int = min(steps, last["steps"]) if steps is not None else last["steps"]
    recorded = [event["step"] for event in digests]
    if disturbed:
        starts, recorded = starts[: len(workers)], sorted(set(recorded))
    faults = [
        (starts != list(workers), f"starts with {starts} workers", f"{list(workers)}"),
        (recorded != list(range(1, needed + 1)), f"digests of {_ranges(recorded)}", f"one of each step to {needed}"),
        (last["step"] != needed, f"an end at step {last['step']}", f"step {needed}"),
        (
            bool(digests) and digests[-1]["digest"] != last["digest"],
            "another digest at the end",
            "that of the last step",
        ),
    ]
    for wrong, found, wanted in faults:
        if wrong:
            raise PacelineError(
                "cannot prove anything by this variation", found=found, needed=wanted, fix="Look into its events.jsonl"
            )
    done: dict[int, StepBits] = {}
    for event in digests:
        bits = StepBits(digest=event["digest"], lanes=tuple(event["lanes"]), tensors=event["tensors"])
        first = done.setdefault(event["step"], bits)
        if bits not in (first, *first.redone):
            done[event["step"]] = replace(first, redone=(*first.redone, bits))
    return [done[step] for step in recorded]


def cost_of(events: Sequence[Mapping[str, Any]]) -> Cost:
    """Of a run, from its log. Workers are counted, since a change that a further loss overtakes leaves no event.

    >>> loss, join = {"workers": 1, "joined": 0, "seconds": 0.14}, {"workers": 2, "joined": 1, "seconds": 0.05}
    >>> start = {"event": "start", "workers": 2}
    >>> cost_of([start, {"event": "membership", **loss}, {"event": "membership", **join}])
    Cost(lost=1, seconds=0.19, restarts=0)
    """
    workers = lost = starts = 0
    seconds = []
    for event in events:
        if event["event"] == "membership":
            lost += workers + event["joined"] - event["workers"]
            seconds.append(event["seconds"])
        elif event["event"] == "start":
            starts += 1
        else:
            continue
        workers = event["workers"]
    return Cost(lost=lost, seconds=round(math.fsum(seconds), 3), restarts=max(0, starts - 1))


def weight_gap(reference: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> WeightGap:
    """How far apart the floating-point tensors of two state dicts with the same keys are, computed in float64."""
    largest, at, squares, norm = 0.0, "", 0.0, 0.0
    for name, tensor in reference.items():
        if not tensor.is_floating_point():
            continue
        left, right = tensor.double(), other[name].double()
        gap = (left - right).abs()
        most = float(gap.max()) if gap.numel() else 0.0
        if most > largest or math.isnan(most):
            largest, at = most, name
        squares += float(gap.square().sum())
        norm += float(left.square().sum())
    return WeightGap(max_abs=largest, at=at, relative=math.sqrt(squares / norm) if norm else math.inf)


def _ranges(steps: Sequence[int]) -> str:
    """Whole numbers in words.

    >>> _ranges([1, 2, 3, 5])
    'steps 1-3, 5'
    """
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return "steps " + ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts) if parts else "no step"
