"""The steps of a `Setup` by plain torch alone: autograd per lane, the tree over the lanes, one division, the update."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.determinism import digest
from teamwork import Setup

__all__ = ["Plain", "train_plainly"]


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Digest of the model at the end, and the gradients of the last step, clipped, by parameter name."""

    digest: str
    grads: dict[str, Tensor]


def train_plainly(setup: Setup, *, max_norm: float = 1.0) -> Plain:
    """What `teamwork.plain_step` makes of ``setup``; parameters that no lane uses are not its business."""
    model = copy.deepcopy(setup.model)
    optimizer = setup.optimizer(model)
    named = dict(model.named_parameters())
    for number in range(setup.steps):
        lanes, weight = [], 0
        for lane in range(setup.plan.lanes):
            model.zero_grad(set_to_none=True)
            for indices in setup.plan.lane(number, lane):
                x_BF, y_BF = (torch.stack(part) for part in zip(*(setup.data[int(i)] for i in indices), strict=True))
                (model(x_BF) - y_BF).square().sum().backward()
                weight += len(indices)
            lanes.append([_grad(parameter) for parameter in named.values()])
        for parameter, values in zip(named.values(), zip(*lanes, strict=True), strict=True):
            parameter.grad = _tree_sum(values) / weight
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return Plain(digest=digest(model.state_dict()), grads={name: _grad(p) for name, p in named.items()})


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _tree_sum(values: Sequence[Tensor]) -> Tensor:
    """From the tree's definition and nothing of the package."""
    if len(values) == 1:
        return values[0]
    middle = max(2**k for k in range(8) if 2**k < len(values))
    return _tree_sum(values[:middle]) + _tree_sum(values[middle:])
