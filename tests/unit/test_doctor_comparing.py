"""What the doctor concludes from a run of two ranks beside one of one worker: pure, on accounts written by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from paceline.doctor.examine import Examination
from paceline.doctor.findings import Finding, as_json, as_text
from paceline.doctor.watching.compared import compared, without_norms
from paceline.doctor.watching.comparison import Comparison
from paceline.doctor.watching.explaining import explained, proven
from paceline.doctor.watching.records import WEIGHTED, Account, Place, Record, Run

GRADIENT = [1.0, -2.0, 0.5, 3.0]
WEIGHTS = [0.1, 0.2, 0.3, 0.4]
PLACE = Place("train.py", 12)


class Told:
    """An account, step by step."""

    def __init__(self, rank: int) -> None:
        self.account = Account(rank=rank)

    def tell(self, kind: str, **facts: Any) -> Told:
        number = len(self.account.records)
        record = Record(
            kind=kind, rank=self.account.rank, number=number, at_s=float(number), places=(PLACE,), facts=facts
        )
        self.account.records.append(record)
        return self

    def step(
        self, gradient: list[float], loss: float = 1.0, roots: list[list[Any]] | None = None, **other: Any
    ) -> Told:
        """Backward and step, of one worker or two alike; ``other`` facts are of the step."""
        first = not any(record.kind == "measured" for record in self.account.records)
        self.tell("backward", roots=roots if roots is not None else [[["MeanBackward0", 4.0]]])
        facts: dict[str, Any] = {
            "plain": True,
            "sizes": [4],
            "norms": [math.sqrt(sum(value * value for value in gradient))],
            "gradients": [gradient],
            "weights": [WEIGHTS],
            "losses": [loss],
            "samples": 4,
            "content": 10 + self.account.rank,
            "width": [8],
            "rates": [0.1],
        }
        if first:
            facts |= {"digest": 7, "names": ["weight"]}
        return self.tell("measured", **facts | other)


def scaled(by: float) -> list[float]:
    return [by * value for value in GRADIENT]


def beside(ranks: list[Told], one: Told) -> Comparison:
    return compared(Run(accounts=[rank.account for rank in ranks]), Run(accounts=[one.account]))


def three(gradient: list[float] = GRADIENT, *, of_one: dict[str, Any] | None = None, **facts: Any) -> Comparison:
    """Two ranks that take one step with a gradient, beside one worker that takes it with `GRADIENT`."""
    ranks = [Told(rank).step(gradient, **facts) for rank in (0, 1)]
    return beside(ranks, Told(0).step(GRADIENT, **{"samples": 8, "content": 21} | (of_one or {})))


def finding(name: str) -> Finding:
    return Finding(id=name, path="train.py", line=3, message="", evidence="read so")


def test_the_same_gradient_but_for_rounding() -> None:
    told = three([value * (1 + 1e-7) for value in GRADIENT])
    assert told.equal is True
    assert told.steps == 1
    assert told.loss == ((1.0, 1.0),)
    assert 0 < told.gradient["difference"] < 1e-6
    assert not told.broken


@pytest.mark.parametrize(("by", "how"), [(2.0, "2.00 times"), (0.5, "0.50 times"), (1.3, "1.30 times")])
def test_a_multiple_is_told_as_one(by: float, how: str) -> None:
    told = three(scaled(by))
    assert told.equal is False
    assert how in told.why
    assert "so is the loss" not in told.why
    assert told.broken


def test_another_direction_is_told_as_a_share() -> None:
    told = three([1.0, -2.0, 0.5, 4.0])
    assert told.equal is False
    assert "differs by 26 %" in told.why
    assert told.gradient["parameter"] == "weight"


def test_a_difference_in_values_that_were_not_told_shows_in_the_norm() -> None:
    assert three(norms=[5.0]).equal is False


def test_sixteen_bits_are_allowed_more() -> None:
    nearly = scaled(1.03)
    assert three(nearly).equal is False
    assert three(nearly, low=True).equal is True


@pytest.mark.parametrize(
    ("facts", "of_one", "reason"),
    [
        ({"digest": 8}, {}, "set a seed"),
        ({"content": 3}, {}, "same 4 samples"),
        ({}, {"content": 5}, "same samples in both"),
        ({}, {"samples": 4}, "same samples in both"),
        ({"drew": True}, {}, "random numbers"),
        ({"drew": True}, {"content": 5}, "drawn at random in each step"),
        ({"hooked": True}, {}, "communication hook"),
        ({"plain": False}, {}, "shards"),
        ({"sizes": [5]}, {}, "other parameters"),
        ({"norms": [math.nan]}, {"norms": [math.nan]}, "not finite"),
        ({}, {"norms": [math.inf]}, "not finite"),
    ],
)
def test_where_nothing_follows_nothing_is_said(facts: dict[str, Any], of_one: dict[str, Any], reason: str) -> None:
    told = three(scaled(2), of_one=of_one, **facts)
    assert told.equal is None
    assert reason in told.why
    assert not told.broken
    assert not list(proven(told, []))


def test_ranks_with_weights_of_their_own_are_not_compared() -> None:
    ranks = [Told(rank).step(GRADIENT, digest=rank) for rank in (0, 1)]
    told = beside(ranks, Told(0).step(GRADIENT, digest=0, samples=8, content=21))
    assert told.equal is None
    assert "the ranks do not begin with the same weights" in told.why


def test_random_numbers_that_change_nothing_are_no_reason() -> None:
    assert three(drew=True).equal is True


def test_padded_batches_are_known_by_the_numbers_of_their_samples() -> None:
    def by(numbers: list[int], of_one: list[int]) -> Comparison:
        ranks = [Told(0).tell("batch", indices=numbers), Told(1).tell("batch", indices=[2, 3])]
        for rank in ranks:
            rank.step(GRADIENT, width=[5])
        one = Told(0).tell("batch", indices=of_one).step(GRADIENT, width=[9], samples=8, content=99)
        return beside(ranks, one)

    assert by([0, 1], [0, 1, 2, 3]).equal is True
    assert by([0, 1], [0, 1, 2, 4]).equal is None


def test_steps_are_compared_until_the_weights_come_apart() -> None:
    apart = [[1.0, 1.0, 1.0, 1.0]]
    ranks = [Told(rank).step(GRADIENT, rates=[0.2]).step(scaled(9), weights=apart) for rank in (0, 1)]
    one = Told(0).step(GRADIENT, samples=8, content=21).step(GRADIENT, samples=8, content=21)
    told = beside(ranks, one)
    assert told.equal is True
    assert told.steps == 1
    assert "0.2 with 2 ranks and 0.1 with one worker" in told.why


@pytest.mark.parametrize(("low", "steps"), [(False, 1), (True, 2)])
def test_in_sixteen_bits_weights_stay_together_for_longer(low: bool, steps: int) -> None:
    nearly = [value * (1 + 1e-4) for value in WEIGHTS]
    ranks = [Told(rank).step(GRADIENT, low=low).step(GRADIENT, weights=[nearly], low=low) for rank in (0, 1)]
    one = Told(0).step(GRADIENT, samples=8, content=21).step(GRADIENT, samples=8, content=21)
    assert beside(ranks, one).steps == steps


def test_a_difference_in_a_later_step_counts_while_the_weights_are_the_same() -> None:
    ranks = [Told(rank).step(GRADIENT).step(scaled(2)) for rank in (0, 1)]
    one = Told(0).step(GRADIENT, samples=8, content=21).step(GRADIENT, samples=8, content=21)
    told = beside(ranks, one)
    assert told.equal is False
    assert "step 2 is 2.00 times" in told.why
    assert told.gradient["parameter"] == "weight"


def test_a_factor_of_the_number_of_ranks_is_proven_by_both_runs() -> None:
    ranks = [Told(rank).step(scaled(2), 2.0, [[["MulBackward0", 2.0], ["MeanBackward0", 4.0]]]) for rank in (0, 1)]
    roots = [[["MulBackward0", 1.0], ["MeanBackward0", 8.0]]]
    told = beside(ranks, Told(0).step(GRADIENT, 1.0, roots, samples=8, content=21))
    (found,) = proven(told, [])
    assert (found.id, found.line, found.level) == ("loss-scaled-by-world-size", 12, "error")
    assert "2.00 times" in found.evidence
    assert "so is the loss" in found.evidence
    assert not list(proven(told, [finding("loss-scaled-by-world-size")]))


def test_a_division_by_a_fixed_number_is_a_doubt() -> None:
    ranks = [Told(rank).step(scaled(0.5), 0.5, [[["DivBackward0", 4.0], ["SumBackward0", None]]]) for rank in (0, 1)]
    roots = [[["DivBackward0", 4.0], ["SumBackward0", None]]]
    told = beside(ranks, Told(0).step(GRADIENT, 1.0, roots, samples=8, content=21))
    assert told.equal is None
    assert "fixed number, 4" in told.why


def test_unequal_counts_are_proven_where_they_make_up_the_loss_of_one_worker() -> None:
    def with_loss_of_one(loss: float) -> list[Finding]:
        ranks = [
            Told(0).step([1.0, -2.0, 0.5, 4.0], 2.0, [[["MeanBackward0", 6.0]]]),
            Told(1).step([1.0, -2.0, 0.5, 4.0], 4.0, [[["MeanBackward0", 2.0]]]),
        ]
        one = Told(0).step(GRADIENT, loss, [[["MeanBackward0", 8.0]]], samples=8, content=21)
        return list(proven(beside(ranks, one), []))

    (found,) = with_loss_of_one(2.5)
    assert (found.id, found.level) == ("unequal-weight-average", "error")
    assert "weighed by 6 and 2" in found.evidence
    assert with_loss_of_one(3.0) == []


def test_weights_of_classes_are_told_as_what_they_are() -> None:
    """A loss whose classes have weights is another one on each rank, by little: that is known, and mostly meant."""
    ranks = [
        Told(rank).step([1.0, -2.0, 0.5, 3.1], loss, [[[f"NllLossBackward0{WEIGHTED}", weight]]])
        for rank, loss, weight in ((0, 2.0, 1.8), (1, 4.0, 0.6))
    ]
    told = beside(ranks, Told(0).step(GRADIENT, 2.5, [[[f"NllLossBackward0{WEIGHTED}", 2.4]]], samples=8, content=21))
    (found,) = proven(told, [])
    assert (found.id, found.level) == ("unequal-weight-average", "advice")
    assert "weighed by 1.8 and 0.6" in found.evidence
    _, after = explained([found], told)
    assert after.equal is False and not after.broken


@pytest.mark.parametrize(
    ("numbers", "why"), [([0, 1, 2, 3], "each rank has its own"), ([4, 5, 6, 7], "the same samples")]
)
def test_data_of_a_ranks_own_is_no_difference(numbers: list[int], why: str) -> None:
    ranks = [Told(rank).tell("batch", indices=[2 * rank, 2 * rank + 1]).step(scaled(2)) for rank in (0, 1)]
    one = Told(0).tell("batch", indices=numbers).step(GRADIENT, samples=8, content=5)
    told = beside(ranks, one)
    assert told.equal is None and why in told.why


def test_gradients_of_each_ranks_own_are_evidence_for_what_was_found() -> None:
    ranks = [Told(0).step([2.0, -2.0, 0.5, 3.0]), Told(1).step([0.0, -2.0, 0.5, 3.0])]
    told = beside(ranks, Told(0).step(GRADIENT, samples=8, content=21))
    assert told.equal is False
    assert "another one on each rank" in told.why
    assert "their mean is that of one worker" in told.why
    findings, after = explained([finding("uneven-inputs"), finding("ddp-forward-bypassed")], told)
    assert "their mean" not in findings[0].evidence
    assert findings[1].evidence == f"read so; {told.why}"
    assert "[ddp-forward-bypassed]" in after.why
    assert told.broken
    assert not after.broken


def test_what_nothing_explains_stays_a_plain_statement() -> None:
    told = three([1.0, -2.0, 0.5, 4.0])
    findings, after = explained([finding("uneven-inputs")], told)
    assert findings == [finding("uneven-inputs")]
    assert after.broken


def test_same_samples_are_evidence_for_the_sampler_that_is_missing() -> None:
    told = three(content=3)
    findings, after = explained([finding("no-distributed-sampler")], told)
    assert "all 2 ranks went through the same 4 samples" in findings[0].evidence
    assert not after.broken


def test_records_that_were_cut_are_not_compared() -> None:
    told = beside([Told(0).tell("measured", cut=True), Told(1).step(GRADIENT)], Told(0).step(GRADIENT))
    assert told.equal is None


def test_how_it_is_told() -> None:
    told = three(scaled(2), loss=1.5)
    assert told.as_dict()["loss"] == [[1.5, 1.0]]
    first, second = told.as_text().splitlines()
    assert first.startswith("compared with one worker: NOT the same: ")
    assert "1.5 | 1" in second


def test_a_difference_that_is_explained_by_nothing_makes_a_script_sick() -> None:
    told = three([1.0, -2.0, 0.5, 4.0])
    assert Examination(findings=(), notes=(), comparison=told).sick
    assert as_text([], [], told).endswith("Nothing found that explains it.")
    _, after = explained([finding("unequal-weight-average")], told)
    assert not Examination(findings=(), notes=(), comparison=after).sick
    assert json.loads(as_json([], [], told))["comparison"]["equal"] is False
    assert "comparison" not in json.loads(as_json([], []))
    assert as_text([], [], three()).endswith("Nothing found.")


def test_batch_norms_are_the_reason_if_nothing_is_left_without_them() -> None:
    differs, same, unknown = three([1.0, -2.0, 0.5, 4.0]), three(), three(drew=True, gradient=scaled(2))
    local = Run(accounts=[Told(0).step(GRADIENT, normed=True).account])
    synced = Run(accounts=[Told(0).step(GRADIENT, normed=True, synced=True).account])

    (found,) = proven(without_norms(differs, same, local), [])
    assert (found.id, found.level) == ("batchnorm-unsynced", "advice")
    left = without_norms(differs, differs, local)
    assert left.equal is False
    assert "even with" in left.why
    assert without_norms(differs, same, synced).equal is True
    told = without_norms(differs, unknown, local)
    assert told.equal is None
    assert not told.broken
    assert not list(proven(told, []))
