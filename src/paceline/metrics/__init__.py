"""Metrics as counts that can be added: the same bits, and the value of one process, whoever counted.

A mean of means depends on how samples were dealt. A sum beside its weight, or a matrix of counts, does not: it is added
over micro-batches, lanes and workers, and the metric is computed once from the whole.

>>> first, second = Mean(sum=90, weight=100), Mean(sum=10, weight=20)
>>> f"{(first.compute() + second.compute()) / 2:.4f}, from counts {(first + second).compute():.4f}"
'0.7000, from counts 0.8333'

Make them of a micro-batch's outputs in the function that `Run.evaluate` calls::

    def score(batch):
        x, y = batch
        logits = model(x)
        return {
            "loss": (F.cross_entropy(logits, y, reduction="sum"), len(y)),   # a pair is a Mean
            "accuracy": accuracy(logits, y),
            "f1": f1(logits, y, average="macro"),
        }

Shapes: B samples, C classes, N targets in whatever dimensions; classes are always the last dimension. Counts are int64,
sums of floats float64. A NaN is shown: a mean with one is NaN, counts that cannot hold one refuse it.
"""

from __future__ import annotations

from paceline.metrics.counting import (
    accuracy,
    confusion_matrix,
    f1,
    mean,
    perplexity,
    top_k,
    variance,
)
from paceline.metrics.kinds import F1, Average, ConfusionMatrix, Mean, Metric, Perplexity, Variance
from paceline.metrics.torchmetrics import from_torchmetrics

__all__ = [
    "F1",
    "Average",
    "ConfusionMatrix",
    "Mean",
    "Metric",
    "Perplexity",
    "Variance",
    "accuracy",
    "confusion_matrix",
    "f1",
    "from_torchmetrics",
    "mean",
    "perplexity",
    "top_k",
    "variance",
]
