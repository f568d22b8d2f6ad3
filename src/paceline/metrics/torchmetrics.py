"""Metrics of torchmetrics whose states are sums. The library is not imported: its object brings what is needed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.metrics.kinds import Metric, plain

__all__ = ["from_torchmetrics"]


def from_torchmetrics(metric: Any, /, *update_args: Any, **update_kwargs: Any) -> Metric:
    """What a metric of torchmetrics counts in one micro-batch.

    A copy of ``metric`` in its initial state is updated; ``metric`` itself stays as it is and on its device, which must
    be the arguments'. Float states are summed in float64 over the micro-batches, and rounded once to the type that the
    metric keeps them in; integers are exact. `Metric.compute` gives the metric's own result, in plain Python.

    Args:
        metric: of which every state is reduced by a sum, and starts at 0.
        update_args: of its ``update``, as are ``update_kwargs``.

    Raises:
        UsageError: no metric of torchmetrics, a state that is a list (such as the predictions that an exact AUROC
            collects) or is not reduced by a sum, or a metric that wraps others.

    Example::

        auroc = torchmetrics.AUROC(task="multiclass", num_classes=10, thresholds=200).to(run.device)

        def score(batch):
            x, y = batch
            return {"auroc": from_torchmetrics(auroc, model(x), y)}
    """
    _check(metric)
    own = copy.deepcopy(metric)
    own.reset()
    own.update(*update_args, **update_kwargs)
    own = own.cpu()
    return _Torchmetrics(metric=own, states={name: _exact(getattr(own, name)) for name in own._defaults})


@dataclass(frozen=True, kw_only=True, eq=False)
class _Torchmetrics(Metric):
    """States that add, and the metric that makes something of them.

    Args:
        metric: updated once, so that it also has what its ``update`` notes beside the states.
        states: by name, int64 or float64 on the CPU.
    """

    metric: Any
    states: Mapping[str, Tensor]

    @property
    def kind(self) -> str:
        shapes = ", ".join(f"{name} {list(state.shape)}" for name, state in self.states.items())
        return f"{type(self.metric).__name__} of torchmetrics ({shapes})"

    def merge(self, other: Self) -> Self:
        return type(self)(
            metric=self.metric, states={name: state + other.states[name] for name, state in self.states.items()}
        )

    def compute(self) -> Any:
        whole = copy.deepcopy(self.metric)
        whole.distributed_available_fn = bool  # False: these are everybody's sums already, it must not add them again
        for name, state in self.states.items():
            setattr(whole, name, state.to(getattr(whole, name).dtype))
        return plain(whole.compute())


def _check(metric: Any) -> None:
    reductions, defaults = getattr(metric, "_reductions", None), getattr(metric, "_defaults", None)
    if not isinstance(metric, nn.Module) or not isinstance(reductions, dict) or not isinstance(defaults, dict):
        raise UsageError(
            "cannot take a metric from torchmetrics",
            found=f"{type(metric).__name__}",
            needed="an object of torchmetrics.Metric",
            fix="Of a MetricCollection or a dictionary pass each metric by itself, under a name of its own",
        )
    name = type(metric).__name__
    inner = [type(part).__name__ for part in metric.modules() if part is not metric and hasattr(part, "_reductions")]
    if inner or not reductions:
        raise UsageError(
            f"cannot add up {name}",
            found=f"a wrapper of {inner[0]}" if inner else "no state of its own",
            needed="a metric with states that are sums",
            fix="Pass the metric inside it",
        )
    for state, reduction in reductions.items():
        default = defaults[state]
        how = "none" if reduction is None else getattr(reduction, "__name__", repr(reduction)).removeprefix("dim_zero_")
        if not isinstance(default, Tensor) or how != "sum":
            raise UsageError(
                f"cannot add up {name}",
                found=f"its state {state}{'' if isinstance(default, Tensor) else ', a list,'} with the reduction {how}",
                needed="states with the reduction sum",
                fix="Many metrics can count instead: curves with thresholds=200. "
                "Or run.gather the predictions and compute it from all of them",
            )
        if default.any():
            raise UsageError(
                f"cannot add up {name}",
                found=f"its state {state} starts at {default.tolist()}",
                needed="0, or it would be counted once for each micro-batch",
            )


def _exact(state: Tensor) -> Tensor:
    return state.detach().to(torch.float64 if state.is_floating_point() else torch.int64)
