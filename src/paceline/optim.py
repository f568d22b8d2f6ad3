"""The optimizer from its settings; the learning rate as a function of the batch and of the step."""

from __future__ import annotations

import importlib
import inspect
import math
from typing import Any, Literal

import torch
from torch import nn

from paceline.config import Optimizer, Schedule
from paceline.errors import ConfigError, did_you_mean

__all__ = ["build_optimizer", "learning_rate", "peak_lr", "scaled_lr"]

_OWN_FIELDS = ("lr", "weight_decay", "betas", "eps", "fused")


def build_optimizer(model: nn.Module, settings: Optimizer, *, batch: int | None = None) -> torch.optim.Optimizer:
    """The optimizer of the parameters of ``model`` that require a gradient.

    Two groups: matrices and larger (embeddings among them) decay, vectors (norms, biases) do not, since shrinking a
    scale regularises nothing; the split of GPT-2's and nanoGPT's training. Tied parameters are updated once.
    ``betas``, ``eps`` and ``fused`` are preferences: they go to optimizers that have such an argument. A weight decay
    must be taken: an optimizer without it needs ``weight_decay: null``.

    Args:
        batch: samples of one step, to which ``settings.lr_scaling`` scales the learning rate; needed for that only.

    Raises:
        ConfigError: an unknown class or argument (the nearest name is given), a learning rate that scales with a batch
            that is not given, or a refusal by the optimizer itself.

    >>> optimizer = build_optimizer(nn.Linear(2, 2), Optimizer(lr=0.1))
    >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
    [(1, 0.1), (1, 0.0)]
    """
    optimizer_class = _find(settings.class_path)
    accepted = set(inspect.signature(optimizer_class).parameters) - {"params", "args", "kwargs"}
    arguments = _arguments(settings, accepted)
    if "lr" in accepted:
        arguments["lr"] = peak_lr(settings, batch)

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError(
            "cannot build the optimizer",
            found="a model whose parameters are all frozen",
            needed="one or more that require a gradient",
            fix="Leave requires_grad on for what shall be trained",
        )
    matrices = [parameter for parameter in trainable if parameter.dim() >= 2]
    vectors = [parameter for parameter in trainable if parameter.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors}]
    if "weight_decay" in accepted:
        groups[1]["weight_decay"] = 0.0
    try:
        return optimizer_class([group for group in groups if group["params"]], **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cannot build the optimizer {settings.class_path}",
            found=str(error).rstrip("."),
            fix="Mend recipe.optimizer, or use class_path: AdamW",
        ) from error


def _find(class_path: str) -> type[torch.optim.Optimizer]:
    module_name, _, name = class_path.rpartition(".")
    try:
        module = importlib.import_module(module_name) if module_name else torch.optim
    except ImportError as error:
        raise ConfigError(
            "cannot find the optimizer",
            found=f"class_path={class_path!r}: {error}",
            needed="a class in torch.optim, or an import path",
            fix="Mend recipe.optimizer.class_path, or install the package that holds it",
        ) from error
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer:
        return found
    known = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and key != "Optimizer"
    ]
    raise ConfigError(
        "cannot find the optimizer",
        found=f"class_path={class_path!r}",
        needed=f"an optimizer in {module.__name__}",
        fix=did_you_mean(name, known) if known else "Use class_path: AdamW",
    )


def _arguments(settings: Optimizer, accepted: set[str]) -> dict[str, Any]:
    for name in settings.init_args:
        if name in _OWN_FIELDS:
            raise ConfigError(
                "cannot set an optimizer argument twice",
                found=f"{name} in recipe.optimizer.init_args",
                needed="it in its own field",
                fix=f"Set recipe.optimizer.{name}",
            )
        if name not in accepted:
            raise ConfigError(
                "cannot build the optimizer",
                found=f"init_args.{name}",
                needed=f"an argument of {settings.class_path}",
                fix=did_you_mean(name, accepted.difference(_OWN_FIELDS)),
            )
    if settings.weight_decay and "weight_decay" not in accepted:
        raise ConfigError(
            "cannot build the optimizer",
            found=f"weight_decay={settings.weight_decay}",
            needed=f"an optimizer that decays; {settings.class_path} has no such argument",
            fix="Set recipe.optimizer.weight_decay: null",
        )
    own: dict[str, Any] = {name: getattr(settings, name) for name in _OWN_FIELDS}
    return {name: value for name, value in own.items() if name in accepted and value is not None} | settings.init_args


def scaled_lr(lr: float, *, batch: int, base_batch: int, rule: Literal["none", "linear", "sqrt"]) -> float:
    """The learning rate for ``batch`` samples a step, from one that was found for ``base_batch``.

    ``linear``: k times the samples, k times the rate (Goyal et al. 2017, arXiv:1706.02677, section 2.1: SGD, with a
    warm-up). ``sqrt``: the root of k times the rate, which keeps the variance of an update (Krizhevsky 2014,
    arXiv:1404.5997). ``none``: as it is. These are rules of thumb: chosen and logged, never applied unasked.

    With a fixed recipe nothing needs scaling when the number of workers changes: the batch of a step stays the same.

    Args:
        lr: learning rate at ``base_batch``.
        batch: samples of one step, of all workers together.
        base_batch: the batch that ``lr`` was found for.

    Raises:
        ConfigError: a batch below 1, or another rule.

    >>> [scaled_lr(1e-3, batch=256, base_batch=64, rule=rule) for rule in ("none", "linear", "sqrt")]
    [0.001, 0.004, 0.002]
    """
    if batch < 1 or base_batch < 1:
        raise ConfigError(
            "cannot scale the learning rate",
            found=f"batch={batch}, base_batch={base_batch}",
            needed="whole numbers >= 1",
            fix="Pass the samples of one step, of all workers together",
        )
    factors = {"none": 1.0, "linear": batch / base_batch, "sqrt": math.sqrt(batch / base_batch)}
    if rule not in factors:
        raise ConfigError("cannot scale the learning rate", found=f"rule={rule!r}", fix=did_you_mean(rule, factors))
    return lr * factors[rule]


def peak_lr(settings: Optimizer, batch: int | None) -> float:
    """The learning rate of a run with ``batch`` samples a step, at the peak of its schedule.

    Raises:
        ConfigError: it scales with the batch, and ``batch`` is ``None``.

    >>> peak_lr(Optimizer(lr=0.1, lr_scaling="linear", base_batch=64), 256)
    0.4
    """
    if settings.base_batch is None:
        return settings.lr
    if batch is None:
        raise ConfigError(
            "cannot scale the learning rate",
            found=f"lr_scaling={settings.lr_scaling} and no batch",
            needed="the samples of one step, of all workers together",
            fix="Pass batch=recipe.batch",
        )
    return scaled_lr(settings.lr, batch=batch, base_batch=settings.base_batch, rule=settings.lr_scaling)


def learning_rate(schedule: Schedule, peak: float, step: int, total: int) -> float:
    """The learning rate of the step at position ``step`` (0-based) in a run of ``total`` steps.

    ``warmup`` steps climb evenly from above zero, the next one has the peak, and the last step of the run has
    ``final * peak`` (``constant`` stays at the peak; ``wsd`` stays there until its last ``decay`` of the run, then
    falls in a line: Hu et al. 2024, MiniCPM). The cosine is that of Loshchilov & Hutter 2017 without restarts. A run
    that is not longer than its warm-up only climbs.

    >>> schedule = Schedule(kind="linear", warmup=2, final=0.0)
    >>> [round(learning_rate(schedule, 3.0, step, total=6), 3) for step in range(6)]
    [1.0, 2.0, 3.0, 2.0, 1.0, 0.0]
    """
    if step < schedule.warmup:
        return peak * (step + 1) / (schedule.warmup + 1)
    last = total - 1
    fall_steps: float = last - schedule.warmup
    if schedule.kind == "wsd":
        fall_steps = min(fall_steps, last * schedule.decay)
    fallen_steps = step - last + fall_steps  # in this order the last step ends the fall exactly
    if schedule.kind == "constant" or fall_steps <= 0 or fallen_steps <= 0:
        return peak
    done = min(1.0, fallen_steps / fall_steps)
    left = (1 + math.cos(math.pi * done)) / 2 if schedule.kind == "cosine" else 1 - done
    return peak * (schedule.final + (1 - schedule.final) * left)
