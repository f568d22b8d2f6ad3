"""What an optimizer is about to step with: digests and a few values of its parameters, gradients and the buffers."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Generator
from typing import Any

import torch

from paceline.doctor.watching.probe import digests
from paceline.doctor.watching.probe.hooking import Call, Hooked
from paceline.doctor.watching.probe.recorder import Recorder
from paceline.doctor.watching.probe.training import replicas

__all__ = ["TABLE", "buffers", "gradients", "watch_steps"]

_TOLD = 400
"""Of so many parameters the digests are told one by one; the rest counts in the whole's."""
_SAMPLED_PARAMETERS = 24
_SAMPLED_VALUES = 8

_optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_names_told: dict[int, tuple[str, ...]] = {}
_running: list[int] = []


def gradients() -> dict[int, str]:
    """By address the gradients that there are: ``ddp`` for those that a DDP reduces, else ``plain``."""
    found: dict[int, str] = {}
    for optimizer in list(_optimizers):
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:
                found[parameter.grad.data_ptr()] = "plain"
    for model in replicas.models().values():
        for parameter in model.parameters():
            if parameter.grad is not None:
                found[parameter.grad.data_ptr()] = "ddp"
    return found


def watch_steps(recorder: Recorder) -> None:
    """Tells of each step of each optimizer."""
    optimizer_module = sys.modules["torch.optim.optimizer"]

    def before(optimizer: Any, _: Any, __: Any) -> None:
        outermost = not _running  # a wrapper's step calls that of the optimizer inside
        _running.append(0)
        if outermost:
            with recorder.unnoticed():
                _running[-1] = _tell(recorder, optimizer)

    def after(_: Any, __: Any, ___: Any) -> None:
        if _running and (number := _running.pop()):
            recorder.done(number)

    optimizer_module.register_optimizer_step_pre_hook(before)
    optimizer_module.register_optimizer_step_post_hook(after)


def _tell(recorder: Recorder, optimizer: Any) -> int:
    parameters = _parameters(optimizer)
    own = _number(optimizer)
    known = replicas.names()
    names = tuple(known.get(id(p), f"parameter {i} of shape {tuple(p.shape)}") for i, p in enumerate(parameters))
    facts: dict[str, Any] = {}
    if _names_told.get(own) != names:
        _names_told[own] = names
        facts["names"] = names[:_TOLD]
        facts["in_ddp"] = [id(p) in known for p in parameters[:_TOLD]]
        facts["shapes"] = [tuple(p.shape) for p in parameters[:_TOLD]]
    plain = all(_is_whole(p) for p in parameters)
    gradients = [p.grad for p in parameters]
    held = {id(p) for p in parameters}
    return recorder.tell(
        "step",
        optimizer=own,
        plain=plain,
        values=[digests.of(p)[:12] for p in parameters[:_TOLD]] if plain else [],
        grads=[digests.of(g)[:12] if _dense(g) else None for g in gradients[:_TOLD]] if plain else [],
        sample=[digests.sampled(p, _SAMPLED_VALUES) for p in parameters[:_SAMPLED_PARAMETERS]] if plain else [],
        grad_sample=[digests.sampled(g, _SAMPLED_VALUES) if _dense(g) else [] for g in gradients[:_SAMPLED_PARAMETERS]],
        norm=_norm(gradients),
        changed=_changed(),
        unheld=[
            known[id(p)]
            for model in replicas.models().values()
            for p in model.parameters()
            if p.grad is not None and id(p) not in held
        ][:_TOLD],
        buffers=buffers(),
        threads=torch.get_num_threads(),
        touched=_touched(parameters),
        **facts,
    )


def buffers() -> dict[str, str]:
    """Digests of the buffers of all DDP models."""
    return {
        name: digests.of(buffer)[:12]
        for model in replicas.models().values()
        for name, buffer in list(model.named_buffers())[:_TOLD]
        if buffer.device.type == "cpu"
    }


def _parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _number(optimizer: Any) -> int:
    return _optimizers.setdefault(optimizer, len(_optimizers))


def _is_whole(parameter: Any) -> bool:
    """Not a shard, which differs from rank to rank by design."""
    return type(parameter.detach()) is torch.Tensor and type(parameter).__name__ != "FlatParameter"


def _dense(gradient: Any) -> bool:
    return gradient is not None and not gradient.is_sparse


def _norm(gradients: list[Any]) -> float:
    squares = [float(g.detach().double().square().sum()) for g in gradients[:_SAMPLED_PARAMETERS] if _dense(g)]
    return float(sum(squares) ** 0.5)


def _changed() -> list[str]:
    """Parameters of a DDP's module that were not there when it was made, or are others now."""
    return [
        name
        for own, model in replicas.models().items()
        for name, p in model.named_parameters()
        if p.requires_grad and replicas.registered[own].get(name) != id(p)
    ][:_TOLD]


def _touched(parameters: list[Any]) -> bool:
    """Whether a gradient has changed since the last backward."""
    return any(
        p.grad is not None and replicas.marks.get(id(p), (id(p.grad), p.grad._version)) != (id(p.grad), p.grad._version)
        for p in parameters
    )


def _made(call: Call) -> Generator[None, Any, None]:
    yield
    if call.error is None:
        call.recorder.tell("optimizer", optimizer=_number(call.owner), name=type(call.owner).__name__)


TABLE = (Hooked("torch.optim", "Optimizer.__init__", _made, scope="optimizer"),)
