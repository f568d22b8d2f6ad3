"""Metrics against those of scikit-learn and torchmetrics. Not a unit test, since importing those takes seconds."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from paceline.errors import UsageError
from paceline.metrics import Average, Metric, accuracy, confusion_matrix, f1, from_torchmetrics, top_k
from scoring import CLASSES, Batch, cut, dealt, samples

TorchMetrics = Any
"""The module: it is imported late, since each process of tests collects this file."""


@pytest.fixture(scope="module")
def scikit_learn() -> ModuleType:
    return importlib.import_module("sklearn.metrics")


@pytest.fixture(scope="module")
def tm() -> TorchMetrics:
    importlib.import_module("torchmetrics.classification")
    return importlib.import_module("torchmetrics")


@pytest.mark.parametrize("average", [None, "macro", "micro", "weighted", "binary"])
@pytest.mark.parametrize("seed", range(3))
def test_f1_is_scikit_learns(average: Average | None, seed: int, scikit_learn: ModuleType) -> None:
    classes = 2 if average == "binary" else 6
    generator = torch.Generator().manual_seed(seed)
    predicted, target = torch.randint(0, classes, (2, 50), generator=generator).unbind()
    predicted[predicted == 3], target[target == 3] = 0, 1  # a class that never occurs
    target[target == 4] = 1  # one that is only predicted
    labels = list(range(classes)) if average is None else None
    expected = scikit_learn.f1_score(target, predicted, labels=labels, average=average, zero_division=0.0)
    assert f1(predicted, target, classes, average=average).compute() == pytest.approx(expected)


def test_confusion_matrix_and_top_k_are_scikit_learns(scikit_learn: ModuleType) -> None:
    logits, target, _ = samples(100)
    kept = target != -100
    expected = scikit_learn.confusion_matrix(target[kept], logits.argmax(1)[kept], labels=range(CLASSES)).tolist()
    assert confusion_matrix(logits, target, ignore_index=-100).compute() == expected
    assert expected != torch.tensor(expected).T.tolist()
    for k in range(1, CLASSES):
        score = scikit_learn.top_k_accuracy_score(target[kept], logits[kept], k=k, labels=range(CLASSES))
        assert top_k(logits, target, k, ignore_index=-100).compute() == pytest.approx(score)
    assert top_k(logits, target, CLASSES, ignore_index=-100).compute() == 1.0


def test_metrics_of_torchmetrics_give_what_they_give_alone_however_they_are_dealt(tm: TorchMetrics) -> None:
    of_labels: dict[str, Any] = {
        "accuracy": tm.classification.MulticlassAccuracy(CLASSES, ignore_index=-100),
        "stat_scores": tm.classification.MulticlassStatScores(CLASSES, average=None, ignore_index=-100),
        "auroc": tm.classification.MulticlassAUROC(CLASSES, thresholds=20, ignore_index=-100),
    }
    metrics: dict[str, tuple[Any, Callable[[Batch], tuple[Any, ...]]]] = {
        **{name: (metric, lambda batch: batch[:2]) for name, metric in of_labels.items()},
        "mean": (tm.MeanMetric(), lambda batch: batch[:1]),
        "mse": (tm.MeanSquaredError(), lambda batch: (batch[0], batch[0].flip(1))),
    }

    def score(batch: Batch) -> dict[str, Metric]:
        return {name: from_torchmetrics(metric, *args(batch)) for name, (metric, args) in metrics.items()}

    scored = [score(part) for part in cut(samples(60), [9, 2, 20, 7])]
    by_workers = [dealt(scored, [1, 4, 4, 0, 3], 5, workers) for workers in (1, 2, 3, 5)]
    assert len({repr(scores) for scores in by_workers}) == 1
    assert {type(value) for value in by_workers[0].values()} == {float, list}, "results are plain Python"
    for name, (metric, args) in metrics.items():
        metric.update(*args(samples(60)))
        torch.testing.assert_close(torch.tensor(by_workers[0][name]), metric.compute())


def test_the_metric_itself_stays_as_it_is_and_counts_nothing_of_before(tm: TorchMetrics) -> None:
    metric = tm.SumMetric()
    metric.update(5.0)
    taken = from_torchmetrics(metric, value=2.0)
    assert [taken.compute(), (taken + taken).compute(), taken.compute()] == [2.0, 4.0, 2.0]
    assert metric.compute() == 5.0


def test_float_states_are_added_in_float64(tm: TorchMetrics) -> None:
    big, small = (from_torchmetrics(tm.SumMetric(), value) for value in (2.0**24, 1.0))
    assert (big + small + small).compute() == 2**24 + 2  # in float32 each 1 would vanish


def test_sums_of_the_whole_team_are_not_added_up_once_more_by_the_metric(tm: TorchMetrics) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a collective of its own")

    metric = tm.SumMetric(dist_sync_fn=never, distributed_available_fn=lambda: True)
    assert from_torchmetrics(metric, 3.0).compute() == 3.0


def from_one(tm: TorchMetrics) -> Any:
    """A metric whose sum does not start at 0."""

    class FromOne(tm.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", torch.tensor(1.0), dist_reduce_fx="sum")

        def update(self) -> None: ...

        def compute(self) -> None: ...

    return FromOne()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda tm: tm.classification.BinaryAUROC(),
            "found its state preds, a list, with the reduction cat",
        ),
        (lambda tm: tm.PearsonCorrCoef(), "found its state mean_x with the reduction none, need .* sum"),
        (lambda tm: tm.MaxMetric(), "found its state max_value with the reduction max"),
        (lambda tm: tm.classification.BinaryAccuracy(multidim_average="samplewise"), "its state tp, a list"),
        (lambda tm: tm.MetricCollection([tm.SumMetric()]), "found MetricCollection.* pass each metric by itself"),
        (
            lambda tm: tm.ClasswiseWrapper(tm.classification.MulticlassAccuracy(3, average=None)),
            "a wrapper of MulticlassAccuracy",
        ),
        (lambda tm: tm.SumMetric() + tm.SumMetric(), "a wrapper of SumMetric"),
        (from_one, "its state total starts at 1.0"),
        (lambda tm: accuracy, "found function, need an object of torchmetrics"),
    ],
)
def test_metrics_that_are_no_sums_are_refused(
    tm: TorchMetrics, build: Callable[[TorchMetrics], Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        from_torchmetrics(build(tm), torch.tensor([0.3]), torch.tensor([1]))


def test_two_metrics_under_one_name_are_refused(tm: TorchMetrics) -> None:
    target = torch.tensor([0, 2, 1])
    accuracies = [
        from_torchmetrics(tm.classification.MulticlassAccuracy(classes), target, target) for classes in (3, 4)
    ]
    with pytest.raises(UsageError, match=r"MulticlassAccuracy of torchmetrics \(tp \[3\].* and .*\(tp \[4\]"):
        accuracies[0] + accuracies[1]
