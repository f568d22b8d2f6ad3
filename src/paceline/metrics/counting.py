"""Counts of one micro-batch's outputs, by the names that the field has for what becomes of them.

Shapes: C classes, always the last dimension; N targets in whatever dimensions, the same for predictions and targets.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import get_args

import torch
from torch import Tensor

from paceline.errors import UsageError, did_you_mean
from paceline.metrics.kinds import F1, Average, ConfusionMatrix, Mean, Perplexity, Variance

__all__ = ["accuracy", "confusion_matrix", "f1", "mean", "number", "perplexity", "top_k", "variance"]

_NO_CLASS = torch.iinfo(torch.int64).min
"""What logits with a NaN predict."""


def mean(values: Tensor) -> Mean:
    """The mean of all elements of ``values``, of any shape.

    >>> (mean(torch.tensor([1, 2])) + mean(torch.tensor([6.0]))).compute()
    3.0
    """
    values = torch.as_tensor(values)
    return Mean(sum=float(values.detach().double().sum()), weight=float(values.numel()))


def variance(values: Tensor, *, correction: int = 1) -> Variance:
    """The variance of all elements of ``values``, of any shape.

    Args:
        values: numbers.
        correction: 1 divides by one less than the number of values, as `torch.var` does; 0 by their number.

    >>> (variance(torch.tensor([1.0, 2.0])) + variance(torch.tensor([6.0]))).compute()
    7.0
    """
    if not values.numel():
        return Variance(count=0, mean=0.0, squares=0.0, correction=correction)
    exact = values.detach().double()
    center = exact.mean()
    squares = (exact - center).square().sum()
    return Variance(count=values.numel(), mean=float(center), squares=float(squares), correction=correction)


def perplexity(loss_sum: Tensor | float, tokens: Tensor | float) -> Perplexity:
    """The perplexity of a language model.

    Args:
        loss_sum: the negative log-likelihood of the micro-batch's tokens in nats, summed.
        tokens: how many they are; what the loss ignores does not count.

    Raises:
        UsageError: one of them is not one number.

    >>> round((perplexity(20.0, 10) + perplexity(1.0, 20)).compute(), 4)  # exp(21 / 30)
    2.0138
    """
    return Perplexity(sum=number("the loss of a perplexity", loss_sum), weight=number("its tokens", tokens))


def accuracy(predictions: Tensor, target: Tensor, *, ignore_index: int | None = None) -> Mean:
    """The share of targets that are predicted.

    Args:
        predictions: logits or probabilities ``[..., C]``, of which the first of the largest is predicted, or classes
            ``[...]`` as integers.
        target: classes ``[...]``, integers.
        ignore_index: targets of this value do not count.

    Raises:
        UsageError: shapes that do not fit, or a target that is no class.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.6, 0.4]]), torch.tensor([1, 1, 0]))
    Mean(sum=2.0, weight=3.0)
    """
    classes = predictions.shape[-1] if _are_logits(predictions) else None
    target_N, kept_N = _targets("accuracy", predictions, target, classes, ignore_index)
    predicted_N = _predicted(predictions)[kept_N]
    return _share(predicted_N == target_N[kept_N], predicted_N == _NO_CLASS)


def top_k(logits: Tensor, target: Tensor, k: int, *, ignore_index: int | None = None) -> Mean:
    """The share of targets that are among the ``k`` classes of the largest logits; of equals the first go before.

    Args:
        logits: ``[..., C]``, floating-point.
        target: classes ``[...]``, integers.
        k: from 1 to C; 1 gives the `accuracy`.
        ignore_index: targets of this value do not count.

    Raises:
        UsageError: shapes that do not fit, a target that is no class, or more than C classes asked for.

    >>> top_k(torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]), torch.tensor([1, 2]), k=2).compute()
    0.5
    """
    if not _are_logits(logits):
        raise UsageError(
            "cannot compute top_k",
            found=f"predictions of {_shape(logits)}",
            needed="logits, one of each class",
            fix="For predicted classes there is accuracy",
        )
    classes = logits.shape[-1]
    if not 1 <= k <= classes:
        raise UsageError(
            "cannot compute top_k",
            found=f"k={k} of {classes} classes",
            needed=f"1 <= k <= {classes}",
            fix="Ask for fewer",
        )
    target_N, kept_N = _targets("top_k", logits, target, classes, ignore_index)
    logits_NC = logits.detach().reshape(-1, classes)
    class_N1 = target_N.where(kept_N, 0).to(logits.device)[:, None]
    own_N1 = logits_NC.gather(1, class_N1)
    equal_before_NC = (logits_NC == own_N1) & (torch.arange(classes, device=logits.device) < class_N1)
    rank_N = ((logits_NC > own_N1) | equal_before_NC).sum(1)
    return _share((rank_N < k).cpu()[kept_N], logits_NC.isnan().any(1).cpu()[kept_N])


def confusion_matrix(
    predictions: Tensor, target: Tensor, classes: int | None = None, *, ignore_index: int | None = None
) -> ConfusionMatrix:
    """How often each class (row) was predicted as each (column): nested lists of int, which `torch.tensor` takes.

    Args:
        predictions: logits ``[..., C]`` or classes ``[...]``, as for `accuracy`.
        target: classes ``[...]``, integers.
        classes: C; logits say it themselves.
        ignore_index: targets of this value do not count.

    Raises:
        UsageError: shapes that do not fit, a target or prediction that is no class, or logits with a NaN.

    >>> confusion_matrix(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1]), classes=2).compute()
    [[1, 1], [0, 2]]
    """
    predicted_N, target_N, classes = _classified("confusion_matrix", predictions, target, classes, ignore_index)
    counts = torch.bincount(target_N * classes + predicted_N, minlength=classes * classes)
    return ConfusionMatrix(counts=counts.view(classes, classes))


def f1(
    predictions: Tensor,
    target: Tensor,
    classes: int | None = None,
    *,
    average: Average | None = "macro",
    ignore_index: int | None = None,
) -> F1:
    """F1: of each class 2 x hits / (predictions + targets), 0 for one that never occurs.

    Args:
        predictions: logits ``[..., C]`` or classes ``[...]``, as for `accuracy`.
        target: classes ``[...]``, integers.
        classes: C; logits say it themselves, ``binary`` means 2.
        average: ``macro`` is the mean over the classes that occur as target or prediction, ``weighted`` that over all
            targets, ``micro`` counts all classes together, ``binary`` is the score of class 1 of two; ``None`` gives a
            list, one score for each class.
        ignore_index: targets of this value do not count.

    Raises:
        UsageError: as `confusion_matrix`; ``binary`` with other than 2 classes.

    >>> f1(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1]), average="binary").compute()
    0.8
    """
    if average is not None and average not in get_args(Average):
        raise UsageError(
            "cannot compute f1", found=f"average={average!r}", fix=did_you_mean(str(average), get_args(Average))
        )
    if average == "binary" and classes is None and not _are_logits(predictions):
        classes = 2
    predicted_N, target_N, classes = _classified("f1", predictions, target, classes, ignore_index)
    if average == "binary" and classes != 2:
        raise UsageError(
            "cannot compute f1", found=f"{classes} classes, average='binary'", needed="2", fix="Use average='macro'"
        )
    hits_C, predicted_C, actual_C = (
        torch.bincount(which, minlength=classes) for which in (target_N[predicted_N == target_N], predicted_N, target_N)
    )
    return F1(hits=hits_C, predicted=predicted_C, actual=actual_C, average=average)


def number(what: str, value: object) -> float:
    """``value``, if it is one number or a tensor of one.

    Raises:
        UsageError: it is not; ``what`` names it.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    if isinstance(value, Real):
        return float(value)
    raise UsageError(
        f"cannot add {what}",
        found=_shape(value) if isinstance(value, Tensor) else f"{value!r}, a {type(value).__name__}",
        needed="one number",
        fix="Sum it over the micro-batch first",
    )


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _are_logits(predictions: Tensor) -> bool:
    """Whether they are a number for each class, and not the classes themselves."""
    return predictions.is_floating_point() and predictions.ndim > 0


def _targets(
    what: str, predictions: Tensor, target: Tensor, classes: int | None, ignore_index: int | None
) -> tuple[Tensor, Tensor]:
    """All targets, and which of them count, on the CPU, once they are known to fit ``predictions``."""
    shape = predictions.shape[:-1] if _are_logits(predictions) else predictions.shape
    strange = (predictions.is_floating_point() and not predictions.ndim) or predictions.is_complex()
    if strange or shape != target.shape or target.is_floating_point() or target.is_complex():
        raise UsageError(
            f"cannot compute {what}",
            found=f"predictions of {_shape(predictions)}, a target of {_shape(target)}",
            needed="logits [..., classes] or integer classes [...], and integer targets [...]",
            fix=_mended(predictions, target),
        )
    target_N = target.detach().reshape(-1).cpu().long()
    kept_N = torch.ones_like(target_N, dtype=torch.bool) if ignore_index is None else target_N != ignore_index
    _check_classes(what, "a target", target_N[kept_N], classes)
    return target_N, kept_N


def _mended(predictions: Tensor, target: Tensor) -> str:
    if predictions.is_floating_point() and predictions.shape == target.shape:
        return "For two classes and one logit each pass classes, (logits > 0).long(); of one-hot targets the argmax(-1)"
    if predictions.ndim > 2 and predictions.shape[:1] + predictions.shape[2:] == target.shape:
        return "Put the classes last: logits.movedim(1, -1)"
    if target.ndim and target.shape[-1] == 1:
        return "Drop the target's last dimension: target.squeeze(-1)"
    return "Give each target one row of logits, or one class"


def _check_classes(what: str, which: str, class_N: Tensor, classes: int | None) -> None:
    outside_N = (class_N < 0) if classes is None else (class_N < 0) | (class_N >= classes)
    if outside_N.any():
        worst = int(class_N[outside_N][0])
        raise UsageError(
            f"cannot compute {what}",
            found=f"{which} of {worst}",
            needed="classes of at least 0" if classes is None else f"classes 0 to {classes - 1}",
            fix=f"If it stands for nothing, pass ignore_index={worst}" if which == "a target" else "Count from 0",
        )


def _predicted(predictions: Tensor) -> Tensor:
    """The predicted class of each target on the CPU; `_NO_CLASS` where its logits have a NaN."""
    if not _are_logits(predictions):
        return predictions.detach().reshape(-1).cpu().long()
    largest, class_ = predictions.detach().max(-1)  # a NaN is the largest
    return class_.masked_fill(largest.isnan(), _NO_CLASS).reshape(-1).cpu()


def _share(correct_N: Tensor, unknown_N: Tensor) -> Mean:
    return Mean(sum=math.nan if unknown_N.any() else float(correct_N.sum()), weight=float(len(correct_N)))


def _classified(
    what: str, predictions: Tensor, target: Tensor, classes: int | None, ignore_index: int | None
) -> tuple[Tensor, Tensor, int]:
    """The predicted class and the target of all that counts, on the CPU, and the number of classes."""
    of_logits = predictions.shape[-1] if _are_logits(predictions) else None
    classes = of_logits if classes is None else classes
    if classes is None or classes < 1 or of_logits not in (None, classes):
        raise UsageError(
            f"cannot compute {what}",
            found=f"classes={classes}, predictions of {_shape(predictions)}",
            needed="the number of classes",
            fix=f"Pass classes={of_logits or 'N'}, the same for every micro-batch",
        )
    target_N, kept_N = _targets(what, predictions, target, classes, ignore_index)
    predicted_N = _predicted(predictions)[kept_N]
    if (predicted_N == _NO_CLASS).any():
        raise UsageError(
            f"cannot compute {what}",
            found=f"NaN in the logits of {int((predicted_N == _NO_CLASS).sum())} of {len(predicted_N)} targets",
            needed="numbers: counts cannot show a NaN",
            fix="Look where the model's output stops being finite; accuracy and the loss show it as NaN",
        )
    _check_classes(what, "a prediction", predicted_N, classes)
    return predicted_N, target_N[kept_N], classes
