"""Mistakes in a train step, told better than torch would."""

from __future__ import annotations

import re
from typing import Any, SupportsFloat

import psutil
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from paceline.errors import OutOfMemoryError, PacelineError, UsageError
from paceline.sizes import show_size

__all__ = ["check_loss", "checked_weight", "known_mistake"]


def known_mistake(error: BaseException, step: str) -> PacelineError | None:
    """What torch's error in a train step means, where its text does not say it."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in text:
        return _out_of_memory(text, step)
    if isinstance(error, CheckpointError):
        return UsageError(
            f"cannot recompute a block in {step}",
            found="a second forward that saved other tensors than the first",
            needed="a forward that depends on its inputs, weights and random numbers alone",
            fix="Look in the blocks' forward for counters, caches, and inputs or buffers that are changed and read; or "
            "leave that block out in execution.recompute",
        )
    if isinstance(error, ValueError) and "more than 1 value per channel" in text:
        return UsageError(
            f"cannot normalise a micro-batch of {step}",
            found="BatchNorm over a single value per channel",
            needed="more samples in each micro-batch, the last of an epoch too",
            fix="Use a larger recipe.micro_batch, recipe.tail: drop, or GroupNorm, which needs no batch",
        )
    if isinstance(error, RuntimeError) and "more than one element of the written-to tensor" in text:
        return UsageError(
            "cannot count this gradient",
            found=f"loss.backward() inside {step}",
            needed="step.backward(loss, weight=...), once for each micro-batch",
            fix="Add up losses first; for gradients of inputs, as in a penalty, use torch.autograd.grad",
        )
    return None


def _out_of_memory(text: str, step: str) -> OutOfMemoryError:
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ [KMGT]iB|\d+ bytes)", text)
    more = "more than that" if asked is None else asked[1]
    if more.endswith(" bytes"):
        more = show_size(int(more.removesuffix(" bytes")))
    on_gpu = re.search(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", text)
    there = f"{on_gpu[2]} of the GPU's {on_gpu[1]} left" if on_gpu else "no memory left"
    held = torch.cuda.memory_allocated() if on_gpu else psutil.Process().memory_info().rss
    return OutOfMemoryError(
        f"cannot run {step}: out of memory",
        found=f"{there}, with {show_size(held)} in use by this worker",
        needed=f"{more} at once",
        fix="Use a smaller recipe.micro_batch, or more execution.recompute; `paceline plan` shows what fits, and "
        "paceline.memory.fit what a loop of your own can do",
    )


def check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise UsageError(
            "cannot run backward",
            found="a loss without a gradient" if isinstance(loss, Tensor) else f"a loss of type {type(loss).__name__}",
            needed="a tensor that was computed from the model's parameters",
            fix="Leave out detach(), item() and no_grad() between the model and the loss",
        )
    if loss.dim() != 0:
        raise UsageError(
            "cannot run backward",
            found=f"a loss of shape {tuple(loss.shape)}",
            needed="a single number, summed over the micro-batch",
            fix="Use reduction='sum', or loss.sum()",
        )


def checked_weight(weight: object) -> Any:
    """Its kind only: whether its value is sound shows when the lanes' weights are added, without a wait for a GPU."""
    number = weight.dim() == 0 if isinstance(weight, Tensor) else isinstance(weight, SupportsFloat)
    if not number:
        shape = f"a weight of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else _kind(weight)
        raise UsageError(
            "cannot run backward",
            found=shape,
            needed="a single number: how many samples or tokens the loss is a sum over",
            fix="Pass step.backward(loss, weight=len(batch))",
        )
    return weight


def _kind(weight: object) -> str:
    return "no weight" if weight is None else f"a weight of type {type(weight).__name__}"
