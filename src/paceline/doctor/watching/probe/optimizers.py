"""What an optimizer is about to step with: digests and a few values of its parameters, gradients and the buffers."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from paceline.doctor.watching.probe import digests
from paceline.doctor.watching.probe.hooking import Call, Hooked
from paceline.doctor.watching.probe.recorder import Recorder
from paceline.doctor.watching.probe.training import replicas

__all__ = ["TABLE", "Reduced", "buffers", "reduced", "watch_steps"]

_TOLD = 400
"""Of so many parameters the digests are told one by one; the rest counts in the whole's."""
_SAMPLED_PARAMETERS = 24
_SAMPLED_VALUES = 8

_optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_names_told: dict[int, tuple[tuple[str, ...], tuple[bool, ...]]] = {}
_numbers = itertools.count()
_running: list[int] = []
_reduced: set[int] = set()
"""Ids of parameters whose gradients the script has reduced itself."""
_before: dict[int, list[float]] = {}
"""By id of such a parameter a few values of this rank's own gradient, before it was reduced for the next step."""


class Reduced(NamedTuple):
    """What gradients a tensor is that is reduced.

    Args:
        of: ``ddp`` if a DDP reduces them too, else ``plain``.
        copied: it holds their values, and is not a gradient itself.
    """

    of: str
    copied: bool


def reduced(tensor: Any) -> Reduced | None:
    """What is known of a tensor that the script is about to reduce; ``None``: it holds no gradients."""
    held = list(_with_gradients())
    own = [p for p in held if p.grad.data_ptr() == tensor.data_ptr()]
    found = own or _copied(tensor, held)
    if not found:
        return None
    _reduced.update(id(p) for p in found)
    for p in found:
        _before.setdefault(id(p), digests.sampled(p.grad, _SAMPLED_VALUES))
    ddp = replicas.names()
    return Reduced("ddp" if any(id(p) in ddp for p in found) else "plain", not own)


def _with_gradients() -> Iterator[Any]:
    """All parameters with a gradient of optimizers and DDP models, in their order."""
    seen: set[int] = set()
    models = replicas.models().values()
    for these in (*map(_parameters, list(_optimizers)), *(model.parameters() for model in models)):
        for parameter in these:
            if _dense(parameter.grad) and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _copied(tensor: Any, held: Sequence[Any]) -> Sequence[Any]:
    """The parameters whose gradients, one behind the other, make up a tensor: `flatten` or `clone` was called."""
    if not tensor.is_floating_point() or tensor.device.type != "cpu":
        return []
    sizes = [parameter.grad.numel() for parameter in held]
    for first in range(len(held)):
        size, last = 0, first
        while size < tensor.numel() and last < len(held):
            size, last = size + sizes[last], last + 1
        if size == tensor.numel() and _proportional(tensor, [p.grad for p in held[first:last]]):
            return held[first:last]
    return []


def _proportional(tensor: Any, parts: Sequence[Any]) -> bool:
    """Whether it is its parts but for a factor; of so few values that any could be, whether it is them."""
    one = tensor.detach().reshape(-1).double()
    other = torch.cat([part.detach().reshape(-1).double() for part in parts])
    if one.numel() < 4:
        return bool(torch.equal(one, other))
    dot = float(one @ other)
    return dot > 0 and dot * dot >= (1 - 1e-6) * float(one @ one) * float(other @ other)


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
    names = tuple(known.get(id(p)) or f"parameter {i} of shape {tuple(p.shape)}" for i, p in enumerate(parameters))
    facts: dict[str, Any] = {}
    alike = replicas.alike() | _reduced
    equal = tuple(id(p) in alike for p in parameters[:_TOLD])
    if _names_told.get(own) != (names, equal):
        _names_told[own] = names, equal
        facts["alike"] = equal
        facts["names"] = names[:_TOLD]
        facts["in_ddp"] = [id(p) in known for p in parameters[:_TOLD]]
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
        changed=_changed(),
        unheld=[
            known[id(p)]
            for model in replicas.models().values()
            for p in model.parameters()
            if p.grad is not None and id(p) not in held
        ][:_TOLD],
        buffers=buffers(),
        touched=_touched(parameters),
        own=_own(parameters),
        rates=[float(group.get("lr", 0.0)) for group in optimizer.param_groups],
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
    if optimizer not in _optimizers:
        _optimizers[optimizer] = next(_numbers)
    return _optimizers[optimizer]


def _is_whole(parameter: Any) -> bool:
    """Not a shard, which differs from rank to rank by design."""
    return type(parameter.detach()) is torch.Tensor and type(parameter).__name__ != "FlatParameter"


def _dense(gradient: Any) -> bool:
    return gradient is not None and not gradient.is_sparse


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


def _own(parameters: Sequence[Any]) -> list[list[float]] | None:
    """What this rank has brought to the gradients that it steps with, as `grad_sample` tells of these; ``None``: not
    all of them were reduced by the script itself."""
    held = [p for p in parameters[:_SAMPLED_PARAMETERS] if _dense(p.grad)]
    own = [_before.pop(id(p), []) for p in held]
    return own if own and all(own) else None


def _made(call: Call) -> Generator[None, Any, None]:
    yield
    if call.error is None:
        call.recorder.tell("optimizer", optimizer=_number(call.owner), name=type(call.owner).__name__)


TABLE = (Hooked("torch.optim", "Optimizer.__init__", _made, scope="optimizer"),)
