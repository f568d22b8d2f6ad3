"""Metrics: whoever counts which samples, the result is that of one process; and what cannot be counted is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.config import Recipe
from paceline.errors import UsageError
from paceline.metrics import (
    Average,
    Mean,
    Metric,
    accuracy,
    confusion_matrix,
    f1,
    mean,
    perplexity,
    top_k,
    variance,
)
from paceline.metrics.over_lanes import LaneMetrics, add, computed
from paceline.run import Run
from scoring import CLASSES, Batch, alone, cut, dealt, samples

AVERAGES: list[Average | None] = [None, "macro", "micro", "weighted"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As in a run: rows of four numbers gain nothing from more, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def counted(batch: Batch) -> dict[str, Any]:
    """Everything whose result is exact, however the samples are cut."""
    logits, target, values = batch
    scores: dict[str, Any] = {
        "accuracy": accuracy(logits, target, ignore_index=-100),
        "top_2": top_k(logits, target, 2, ignore_index=-100),
        "confusion": confusion_matrix(logits, target, ignore_index=-100),
        "pair": ((values > 0).sum(), len(values)),
    }
    return scores | {f"f1_{average}": f1(logits, target, average=average, ignore_index=-100) for average in AVERAGES}


def summed(batch: Batch) -> dict[str, Any]:
    """What depends on the order of additions in its last bits."""
    _, _, values = batch
    return {
        "mean": mean(values),
        "variance": variance(values),
        "perplexity": perplexity((values % 2).sum(), len(values)),
        "pair": (values.sum(), len(values)),
    }


@st.composite
def deals(draw: st.DrawFn) -> tuple[Batch, list[Batch], list[int], int]:
    """Samples, the micro-batches they are cut into, the lane of each, the number of lanes."""
    batch = samples(draw(st.integers(8, 60)), draw(st.integers(0, 2**32)))
    sizes: list[int] = []
    for size in draw(st.lists(st.integers(0, 12), max_size=8)):
        if sum(sizes) + size <= len(batch[0]):
            sizes.append(size)
    lanes = draw(st.integers(1, 8))
    lane_of = draw(st.lists(st.integers(0, lanes - 1), min_size=len(sizes) + 1, max_size=len(sizes) + 1))
    return batch, cut(batch, sizes), lane_of, lanes


# The same whoever counts.


@settings(max_examples=15)
@given(deal=deals())
def test_counts_are_exactly_those_of_one_process_however_they_are_dealt(
    deal: tuple[Batch, list[Batch], list[int], int],
) -> None:
    batch, batches, lane_of, lanes = deal
    assert dealt([counted(part) for part in batches], lane_of, lanes, lanes) == alone(counted(batch))


@given(deal=deals())
def test_sums_of_floats_have_the_same_bits_for_any_number_of_workers(
    deal: tuple[Batch, list[Batch], list[int], int],
) -> None:
    batch, batches, lane_of, lanes = deal
    scored = [summed(part) for part in batches]
    by_workers = [dealt(scored, lane_of, lanes, workers) for workers in range(1, lanes + 1)]
    assert len({repr(scores) for scores in by_workers}) == 1
    assert by_workers[0] == pytest.approx(alone(summed(batch)), rel=1e-9, abs=1e-9)


def test_lanes_are_added_in_the_trees_order_and_micro_batches_in_theirs() -> None:
    lanes = [1e16, 1.0, -1e16, 1.0]
    sums: LaneMetrics = {}
    for lane in (3, 1, 0, 2):
        add(sums, lane, {"over lanes": (lanes[lane], 0.25)})
    for value in lanes:
        add(sums, 0, {"in a lane": (value, 0.25)})
    assert computed([sums], 4) == {"in a lane": 1.0, "over lanes": 0.0}


def test_uneven_shards_weigh_by_their_samples() -> None:
    assert computed([{0: {"a": Mean(sum=90, weight=100)}}, {1: {"a": Mean(sum=10, weight=20)}}], 2) == {"a": 100 / 120}


def test_workers_and_lanes_without_a_micro_batch_add_nothing() -> None:
    scored, lanes = [counted(part) for part in cut(samples(5), [2])], 8
    for workers in range(1, lanes + 1):
        assert dealt(scored, [1, 6], lanes, workers) == alone(counted(samples(5)))


def test_a_metric_may_be_missing_in_some_micro_batches() -> None:
    sums: LaneMetrics = {}
    add(sums, 0, {"loss": (1.0, 1)})
    add(sums, 1, {"loss": (3.0, 1), "rare": (5.0, 2)})
    assert computed([sums], 2) == {"loss": 2.0, "rare": 2.5}
    assert computed([{0: {}}, {1: {}}], 2) == {}


@pytest.mark.usefixtures("process_state")
def test_a_run_evaluates_them() -> None:
    with Run(Recipe(batch=8, micro_batch=2, lanes=4, steps=1)) as run:
        assert run.evaluate(TensorDataset(*samples(21)), counted) == alone(counted(samples(21)))
        with pytest.raises(UsageError, match="a dataset of 0 samples"):
            run.evaluate(TensorDataset(*samples(0)), counted)


# Values, against others'.


def test_variance_is_numpys_even_far_from_zero() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).double() + 1e9
    for correction in (0, 1):
        parts = [variance(part, correction=correction) for part in values.split([1, 0, 400, 599])]
        merged = parts[0] + parts[1] + parts[2] + parts[3]
        assert merged.compute() == pytest.approx(float(values.var(correction=correction)), rel=1e-6)
        assert merged.mean == pytest.approx(float(values.mean()), rel=1e-15)
        assert merged.count == 1000


def test_perplexity_is_the_exponential_of_the_loss_per_token() -> None:
    assert (perplexity(torch.tensor(30.0), 10) + perplexity(0.0, 5)).compute() == math.exp(2)
    assert perplexity(1e6, 1).compute() == math.inf


def test_equal_logits_predict_the_first_class_everywhere() -> None:
    logits, target = torch.zeros(CLASSES, CLASSES), torch.arange(CLASSES)
    assert accuracy(logits, target) == top_k(logits, target, 1) == Mean(sum=1, weight=4)
    assert top_k(logits, target, 3) == Mean(sum=3, weight=4)
    assert confusion_matrix(logits, target).compute() == [[1, 0, 0, 0]] * CLASSES


def test_logits_of_any_shape_and_type_classes_too() -> None:
    logits, target, _ = samples(24)
    for shape in [(24,), (2, 12), (2, 3, 4), (24, 1)]:
        shaped = logits.reshape(*shape, CLASSES).bfloat16().requires_grad_()
        goal = target.reshape(shape).int()
        whole = counted((shaped, goal, goal))
        assert whole["accuracy"] == accuracy(logits.bfloat16(), target, ignore_index=-100)
        assert accuracy(shaped.argmax(-1), goal, ignore_index=-100) == whole["accuracy"]
        assert f1(shaped.argmax(-1), goal, CLASSES, ignore_index=-100).compute() == whole["f1_macro"].compute()
    assert accuracy(torch.tensor([0.0, 1.0]), torch.tensor(1)) == Mean(sum=1, weight=1)
    assert f1(torch.tensor([True, False]), torch.tensor([True, True]), average="binary").compute() == pytest.approx(
        2 / 3
    )


# Not a number.


def test_a_nan_is_shown_or_refused_never_counted_as_a_class() -> None:
    logits, target = torch.tensor([[0.1, 0.9], [math.nan, 0.0], [0.0, math.nan]]), torch.tensor([1, 0, 1])
    for share in (accuracy(logits, target), top_k(logits, target, 1), accuracy(logits, target) + Mean(sum=5, weight=5)):
        assert math.isnan(share.compute())
    assert accuracy(logits, torch.tensor([1, 9, 9]), ignore_index=9) == Mean(sum=1, weight=1)
    for count in (confusion_matrix, f1):
        with pytest.raises(UsageError, match="NaN in the logits of 2 of 3 targets"):
            count(logits, target)
    values = torch.tensor([1.0, math.nan])
    for metric in (mean(values), variance(values), variance(values) + variance(values[:1]), perplexity(math.nan, 3)):
        assert math.isnan(metric.compute())
    assert math.isnan(computed([{0: {"loss": mean(values)}, 1: {"loss": mean(values[:1])}}], 2)["loss"])


# What is refused.

LOGITS, TARGET = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: accuracy(LOGITS, TARGET[:2]), r"predictions of float32 \[3, 4\], a target of int64 \[2\]"),
        (lambda: accuracy(LOGITS, TARGET[:, None]), r"target\.squeeze\(-1\)"),
        (lambda: accuracy(torch.zeros(3, 4, 5), torch.zeros(3, 5).long()), r"logits\.movedim\(1, -1\)"),
        (lambda: accuracy(LOGITS[:, 0], TARGET), r"\(logits > 0\)"),
        (lambda: accuracy(LOGITS, LOGITS), r"argmax"),
        (lambda: accuracy(LOGITS, TARGET.float()), "need logits .* and integer targets"),
        (lambda: accuracy(LOGITS, TARGET - 100), "found a target of -100, need classes 0 to 3.*ignore_index=-100"),
        (lambda: accuracy(TARGET, TARGET - 100), "found a target of -100, need classes of at least 0"),
        (lambda: top_k(LOGITS, TARGET + 4, 2), "cannot compute top_k: found a target of 4"),
        (lambda: top_k(LOGITS, TARGET, 5), "found k=5 of 4 classes"),
        (lambda: top_k(TARGET, TARGET, 1), "need logits"),
        (lambda: confusion_matrix(TARGET, TARGET), r"found classes=None.* Pass classes=N"),
        (lambda: confusion_matrix(LOGITS, TARGET, 5), r"found classes=5, predictions of float32 \[3, 4\].* classes=4"),
        (lambda: confusion_matrix(TARGET + 4, TARGET, 4), "found a prediction of 4"),
        (lambda: f1(TARGET, TARGET + 4, 4), "cannot compute f1: found a target of 4"),
        (lambda: f1(LOGITS, TARGET, average="binary"), "found 4 classes, average='binary', need 2"),
        (lambda: f1(LOGITS, TARGET, average="makro"), "average='makro'. Did you mean 'macro'"),  # type: ignore[arg-type]
        (lambda: perplexity(torch.zeros(3), 3), r"the loss of a perplexity: found float32 \[3\], need one number"),
        (
            lambda: mean(LOGITS) + variance(LOGITS),  # type: ignore[operator]
            r"found Mean and Variance \(correction=1\), need one kind",
        ),
        (lambda: variance(LOGITS) + variance(LOGITS, correction=0), "correction=1.* and .*correction=0"),
        (lambda: f1(LOGITS, TARGET) + f1(LOGITS, TARGET, average="micro"), r"F1 \(macro, 4 classes\) and F1 \(micro"),
        (lambda: confusion_matrix(LOGITS, TARGET) + confusion_matrix(TARGET, TARGET, 3), "4 classes.* and .*3 classes"),
    ],
)
def test_mistakes_in_a_micro_batch(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": 0.5}, r"the metric loss: found 0\.5, a float, need \(sum, weight\)"),
        ({"loss": torch.tensor(0.5)}, r"the metric loss: found tensor\(0\.5.*, a Tensor"),
        ({"loss": (1.0, 2.0, 3.0)}, "found .*, a tuple"),
        ({"loss": (torch.zeros(3), 3)}, r"the sum of the metric loss: found float32 \[3\], need one number"),
        ({"loss": (1.0, torch.zeros(2, 2))}, r"the weight of the metric loss: found float32 \[2, 2\]"),
        ({"loss": ("1.0", 3)}, "found '1.0', a str, need one number"),
        (None, "found None, a NoneType, need a dictionary"),
        ([("loss", (1.0, 3))], "a list, need a dictionary"),
        ({"score": f1(LOGITS, TARGET)}, r"the metric score: found Mean and F1 \(macro, 4 classes\), need one kind"),
    ],
)
def test_mistakes_of_the_function_that_scores(metrics: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        add({0: {"score": mean(LOGITS)}}, 0, metrics)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (Mean(sum=0.0, weight=0), "a weight of 0 over all samples, need a weight above 0"),
        (perplexity(0.0, 0), "a weight of 0"),
        (accuracy(LOGITS, TARGET, ignore_index=0), "a weight of 0"),
        (variance(torch.zeros(1)), "1 values over all samples, need more than the correction of 1"),
        (f1(LOGITS, TARGET, ignore_index=0), "no target"),
    ],
)
def test_what_nothing_was_counted_for_has_no_value(metric: Metric, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        metric.compute()
    with pytest.raises(UsageError, match=f"cannot compute the metric it: found {message}"):
        computed([{0: {"it": metric}}], 1)


def test_an_empty_dataset_and_another_kind_in_another_lane_are_refused() -> None:
    with pytest.raises(UsageError, match="a dataset of 0 samples"):
        computed([{}, {}], 4)
    with pytest.raises(UsageError, match="cannot add the metric it: found Mean and Perplexity"):
        computed([{0: {"it": mean(LOGITS)}}, {3: {"it": perplexity(1.0, 1)}}], 4)


def test_what_has_no_counts_at_all_is_still_a_matrix() -> None:
    assert confusion_matrix(LOGITS, TARGET, ignore_index=0).compute() == [[0] * 4] * 4


def test_only_metrics_add_to_metrics() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        mean(LOGITS) + 1  # type: ignore[operator]


# Of one's own.


@dataclass(frozen=True, kw_only=True)
class Largest(Metric):
    """A metric as a user writes it, with a tensor for a result."""

    value: float

    def merge(self, other: Self) -> Self:
        return type(self)(value=max(self.value, other.value))

    def compute(self) -> Tensor:
        return torch.tensor([self.value], dtype=torch.float64)


def test_a_metric_of_ones_own() -> None:
    _, _, values = samples(30)
    scored = [{"largest": Largest(value=float(part.max()))} for part in values.split(9)]
    assert dealt(scored, [3, 0, 3, 1], 4, 3) == {"largest": [float(values.max())]}


def test_results_are_plain_python() -> None:
    scores = alone(counted(samples(20)) | summed(samples(20)))
    assert {type(score) for score in scores.values()} == {float, list}
