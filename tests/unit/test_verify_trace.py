"""What two run logs say of each other, without running anything."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import Execution, Recipe
from paceline.errors import ConfigError, PacelineError
from paceline.faults import Faults
from paceline.parsing import Settings, TaskSpec
from paceline.supervisor import Template
from paceline.verify import verify
from paceline.verify.runs import Variation, stops
from paceline.verify.table import conclusion
from paceline.verify.trace import Cost, StepBits, WeightGap, cost_of, first_difference, trace_of, weight_gap

LANES, NAMES = 3, ("model.a", "model.b", "optimizer.state.0.exp_avg")


def log(steps: int) -> list[StepBits]:
    """A run in which every number is another."""
    return [
        StepBits(
            digest=f"all{step}",
            lanes=tuple(float(10 * step + lane).hex() for lane in range(LANES)),
            tensors={name: f"{name}@{step}" for name in NAMES},
        )
        for step in range(1, steps + 1)
    ]


def events(steps: int, *, workers: tuple[int, ...] = (2,), total: int | None = None) -> list[dict[str, Any]]:
    """The run log of a run of ``steps``, with one start for each of ``workers``."""
    digests = [
        {"event": "digest", "step": number, "digest": bits.digest, "lanes": list(bits.lanes), "tensors": bits.tensors}
        for number, bits in enumerate(log(steps), start=1)
    ]
    starts = [{"event": "start", "workers": count} for count in workers]
    end = {"event": "end", "step": steps, "steps": total or steps, "digest": f"all{steps}"}
    return [*starts, *digests, end]


def changed(bits: StepBits, lanes: set[int], names: set[str]) -> StepBits:
    return StepBits(
        digest=bits.digest + "'" if names else bits.digest,
        lanes=tuple(loss + "'" if lane in lanes else loss for lane, loss in enumerate(bits.lanes)),
        tensors={name: value + "'" if name in names else value for name, value in bits.tensors.items()},
    )


def settings(directory: Path) -> Settings:
    return Settings(
        task=TaskSpec(class_path="paceline.tasks.Language", init_args={}),
        recipe=Recipe(steps=20),
        execution=Execution(run_dir=str(directory / "run")),
    )


def test_equal_logs_have_no_difference() -> None:
    assert first_difference(log(4), log(4)) is None


@given(
    changes=st.dictionaries(
        st.integers(1, 6), st.tuples(st.sets(st.integers(0, LANES - 1)), st.sets(st.sampled_from(NAMES)))
    )
)
def test_the_first_difference_is_the_earliest_step_then_lanes_then_tensors(
    changes: dict[int, tuple[set[int], set[str]]],
) -> None:
    reference = log(6)
    other = [changed(bits, *changes.get(step, (set(), set()))) for step, bits in enumerate(reference, start=1)]
    found = first_difference(reference, other)
    steps = sorted(step for step, (lanes, names) in changes.items() if lanes or names)
    if not steps:
        assert found is None
        return
    assert found is not None and found.step == steps[0]
    lanes, names = changes[steps[0]]
    if lanes:
        assert (found.kind, found.name, found.count, found.of) == (
            "lane loss",
            f"lane {min(lanes)}",
            len(lanes),
            LANES,
        )
    else:
        first = next(name for name in NAMES if name in names)
        assert (found.kind, found.name, found.count, found.of) == ("tensor", first, len(names), len(NAMES))
    assert found.found == found.reference + "'"
    back = first_difference(other, reference)
    assert back == replace(found, reference=found.found, found=found.reference)


def test_a_tensor_that_only_one_run_has_is_a_difference() -> None:
    more = replace(log(1)[0], digest="other", tensors={**log(1)[0].tensors, "model.c": "new"})
    found = first_difference(log(1), [more])
    assert found is not None and (found.name, found.reference, found.found) == ("model.c", "none", "new")


def test_a_digest_that_differs_alone_is_a_difference() -> None:
    found = first_difference(log(1), [replace(log(1)[0], digest="other")])
    assert found is not None and (found.name, found.found) == ("the whole state", "other")


def test_logs_of_other_lengths_are_not_compared() -> None:
    with pytest.raises(ValueError, match="shorter"):
        first_difference(log(3), log(2))


def test_a_trace_is_read_from_events() -> None:
    assert trace_of(events(5), workers=(2,), steps=5) == log(5)
    assert trace_of(events(5), workers=(2,), steps=None) == log(5)
    assert trace_of(events(5, total=9), workers=(2,), steps=5) == log(5)
    assert trace_of(events(5), workers=(2,), steps=7) == log(5), "a run by epochs may be shorter than asked"


def without(kind: str, step: int | None = None) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda all_of: [e for e in all_of if e["event"] != kind or (step is not None and e["step"] != step)]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda _: [], "starts with"),
        (without("start"), "starts with"),
        (without("digest"), "digests of no step"),
        (without("digest", 1), "digests of steps 2-5"),
        (without("digest", 3), "digests of steps 1-2, 4-5"),
        (without("digest", 5), "digests of steps 1-4"),
        (lambda all_of: [*all_of[:2], all_of[1], *all_of[2:]], "digests of steps 1, 1-5"),
        (without("end"), "an end at step 0"),
        (lambda all_of: [*all_of[:-1], {**all_of[-1], "step": 4}], "an end at step 4"),
        (lambda all_of: [*all_of[:-1], {**all_of[-1], "digest": "x"}], "another digest at the end"),
        (lambda all_of: [{**all_of[0], "workers": 1}, *all_of[1:]], "starts with \\[1\\] workers"),
        (lambda all_of: [all_of[0], *all_of], "starts with \\[2, 2\\] workers"),
    ],
)
def test_a_log_that_does_not_show_the_whole_run_proves_nothing(
    damage: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], says: str
) -> None:
    with pytest.raises(PacelineError, match=says):
        trace_of(damage(events(5)), workers=(2,), steps=5)


def redone(step: int, lanes: set[int], names: set[str]) -> list[dict[str, Any]]:
    """The log of a run of 5 steps that did ``step`` once more, and then got this."""
    again = changed(log(5)[step - 1], lanes, names)
    more = {"event": "digest", "step": step, "digest": again.digest, "lanes": again.lanes, "tensors": again.tensors}
    first = events(5)
    return [*first[: step + 1], more, *first[step + 1 :]]


def test_a_step_that_was_redone_to_the_same_bits_is_one_step() -> None:
    started_again = [*events(5)[:3], *events(5)]  # from the beginning, after 2 steps
    for told in (redone(3, set(), set()), started_again):
        trace = trace_of(told, workers=(2,), steps=5, disturbed=True)
        assert trace == log(5) and first_difference(log(5), trace) is None
        with pytest.raises(PacelineError):
            trace_of(told, workers=(2,), steps=5)


@pytest.mark.parametrize("first_is_wrong", [False, True])
def test_a_step_that_was_redone_to_other_bits_is_a_difference(first_is_wrong: bool) -> None:
    told = redone(3, {1}, {"model.a"})
    if first_is_wrong:
        told[3], told[4] = told[4], told[3]
    trace = trace_of(told, workers=(2,), steps=5, disturbed=True)
    found = first_difference(log(5), trace)
    assert found is not None and (found.step, found.name, found.count) == (3, "lane 1", 1)


def test_a_disturbed_run_must_be_whole_too() -> None:
    for damage, says in (
        (without("digest", 3), "digests of steps 1-2, 4-5"),
        (without("end"), "an end at step 0"),
        (without("start"), "starts with"),
    ):
        with pytest.raises(PacelineError, match=says):
            trace_of(damage(redone(2, set(), set())), workers=(2,), steps=5, disturbed=True)
    with pytest.raises(PacelineError, match="starts with \\[2\\]"):
        trace_of(events(5), workers=(3,), steps=5, disturbed=True)


def test_what_faults_cost_is_read_from_the_log() -> None:
    changes = [(2, 0, 0.25), (3, 1, 0.125), (3, 1, 0.25), (1, 0, 0.5)]  # the third: one was lost as one came in
    told = [{"event": "membership", "workers": n, "joined": new, "seconds": s} for n, new, s in changes]
    assert cost_of([*events(3, workers=(3,)), *told]) == Cost(lost=4, seconds=1.125, restarts=0)
    assert cost_of([*events(3, workers=(3,)), *told, *events(3), *events(3)]) == Cost(lost=4, seconds=1.125, restarts=2)
    assert cost_of(events(3)) == Cost(lost=0, seconds=0.0, restarts=0)


def test_the_gap_between_weights() -> None:
    here = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2), "count": torch.tensor(7)}
    there = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([0.0, -0.25]), "count": torch.tensor(8)}
    gap = weight_gap(here, there)
    assert (gap.max_abs, gap.at) == (0.5, "a")
    assert gap.relative == pytest.approx(math.sqrt(0.25 + 0.0625) / 5)
    assert weight_gap(here, here) == WeightGap(max_abs=0.0, at="", relative=0.0)
    assert math.isnan(weight_gap(here, {**there, "b": torch.tensor([0.0, math.nan])}).max_abs)


@given(st.integers(3, 10_000), st.integers(1, 3))
def test_legs_all_have_steps_and_end_with_the_run(steps: int, legs: int) -> None:
    ends = stops(steps, legs)
    assert len(ends) == legs and ends[-1] == steps
    assert all(before < after for before, after in zip([0, *ends], ends, strict=False))


def test_a_variation_is_named_by_what_disturbs_it() -> None:
    sentence = "kill worker=1 step=3; stop worker=0 step=7; hang worker=0 step=8; spin worker=0 step=9"
    named = [
        Variation(workers=(3,), run_dir=Path("3"), faults=Faults.parse(text)).name
        for text in (None, "kill  worker=1 step=3;", sentence)
    ]
    assert named == ["3", "3, kill worker=1 step=3", "3, " + sentence.replace("spin worker=0 step=9", "...")]


def test_the_conclusion_says_that_the_faults_were_met() -> None:
    runs = [
        Variation(workers=(3,), run_dir=Path("3"), faults=Faults.parse(text), trace=log(4))
        for text in (None, "kill worker=1 step=3")
    ]
    told = list(conclusion(runs, Recipe(steps=4)))
    assert told == ["equal: 2 runs, the same bits after each of 4 steps; every fault was met"]


def test_the_conclusion_tells_where_and_how_far() -> None:
    reference = Variation(workers=(1,), run_dir=Path("1"), trace=log(4))
    other = Variation(workers=(2, 3, 1), run_dir=Path("2"), trace=log(4))
    exact, allreduce = Recipe(steps=4), Recipe(steps=4, gradients="allreduce")
    assert list(conclusion([reference, other], exact)) == ["equal: 2 runs, the same bits after each of 4 steps"]
    other.difference = first_difference(log(4), [*log(2), changed(log(4)[2], {1}, set()), log(4)[3]])
    other.weights = WeightGap(max_abs=0.125, at="model.b", relative=0.5)
    text = "\n".join(conclusion([reference, other], exact))
    for part in (
        "workers 2 > 3 > 1, step 3, the first after a resume: lane 1",
        "up to 0.12 apart (model.b)",
        "0.5 relative",
        "weights before it",
    ):
        assert part in text
    assert "allreduce" in "\n".join(conclusion([reference, other], allreduce))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"workers": []}, "no worker counts"),
        ({"workers": [1, 2, 1]}, "each number once"),
        ({"workers": [1, 9]}, "lanes=8, need 1 <= workers <= lanes"),
        ({"workers": [0, 1]}, "need 1 <= workers <= lanes"),
        ({"workers": [2]}, "nothing to compare it with, need at least two runs"),
        ({"workers": [1, 2], "steps": 0}, "--steps 0, need 1 or more"),
        ({"workers": [1, 2], "steps": 21}, "up to the run's own 20"),
        ({"workers": [1, 2], "steps": 2, "interrupt": True}, "--steps 2, need 3 or more"),
        ({"workers": [1, 2], "faults": Faults().kill(worker=2, step=3)}, "worker=2 in .*need 0 <= worker <= 1"),
        ({"workers": [2], "steps": 6, "faults": Faults().stop(worker=1, step=7)}, "step=7 in .*need 1 <= step <= 6"),
        ({"workers": [2], "faults": Faults().stop(worker=1, step=21)}, "step=21 in .*need 1 <= step <= 20"),
        ({"workers": [2], "faults": Faults().stop(worker=1, step=1, lane=8)}, "lane=8 in .*need 0 <= lane <= 7"),
        ({"workers": [2], "faults": Faults().raise_(worker=1, step=1)}, "raise .*an exception ends every run"),
    ],
)
def test_nothing_runs_when_nothing_can_be_learned(tmp_path: Path, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        verify(settings(tmp_path), Template(), **asked)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_does_not_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="found RANK=0, WORLD_SIZE=1"):
        verify(settings(tmp_path), Template(), workers=[1, 2])
    assert list(tmp_path.iterdir()) == []
