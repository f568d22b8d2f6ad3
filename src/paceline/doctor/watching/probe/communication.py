"""Hooks on the process group: who calls which collective, where, with what."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import torch

from paceline.doctor.torch_names import COLLECTIVES
from paceline.doctor.watching.probe import digests
from paceline.doctor.watching.probe.hooking import Call, Hooked
from paceline.doctor.watching.probe.optimizers import reduced

__all__ = ["TABLE"]

_REDUCTIONS = frozenset({"all_reduce", "all_reduce_coalesced", "reduce"})
_gathered: list[tuple[list[Any], int, Any]] = []


def _begun(call: Call) -> Generator[None, Any, None]:
    number = call.recorder.tell(
        "init",
        world_size=call["world_size"] if call["world_size"] not in (None, -1) else None,
    )
    yield
    call.recorder.syncs += 1
    call.recorder.done(number, failed=call.error is not None)


def _destroyed(call: Call) -> Generator[None, Any, None]:
    number = call.recorder.tell("destroy")
    yield
    call.recorder.done(number, failed=call.error is not None)


def _collective(call: Call) -> Generator[None, Any, None]:
    op = call.function.__name__
    dist = sys.modules["torch.distributed"]
    tensor = next(iter(digests.tensors_in([*call.args, *call.kwargs.values()])), None)
    sent = call["tensor"] if op.startswith("all_gather") else None
    carries = isinstance(sent, torch.Tensor) and sent.requires_grad and torch.is_grad_enabled()
    places = call.recorder.places()
    gradients = reduced(tensor) if tensor is not None and op in _REDUCTIONS else None
    number = call.recorder.tell(
        "collective",
        places=places,
        op=op,
        ranks=dist.get_process_group_ranks(call["group"] or dist.group.WORLD),
        shape=list(tensor.shape) if tensor is not None else None,
        grads=gradients.of if gradients is not None else None,
        copied=gradients is not None and gradients.copied,
    )
    yield
    call.recorder.syncs += call.error is None
    call.recorder.done(number, failed=call.error is not None)
    if carries and isinstance(call["tensor_list"], list):
        _gathered.append((call["tensor_list"], dist.get_rank(call["group"]), places))


def _waited(call: Call) -> Generator[None, Any, None]:
    number = call.recorder.tell("wait")
    yield
    call.recorder.done(number, failed=call.error is not None)


def _backward(call: Call) -> Generator[None, Any, None]:
    """Results of all_gather without a gradient, when autograd comes: nobody has put the rank's own part back, and the
    loss is made of products with something that has none. What is gathered for a metric makes no such products."""
    if _gathered and any(map(_has_constant_factor, digests.tensors_in(call["tensors"]))):
        for results, own, places in _gathered:
            if own < len(results) and not results[own].requires_grad:
                call.recorder.tell("gathered", places=places, op="all_gather")
    _gathered.clear()
    yield


_PRODUCTS = frozenset({"BmmBackward0", "CdistBackward0", "DotBackward0", "MmBackward0", "MvBackward0"})
_NODES = 2000
"""So far from its end the graph of a loss is looked at."""


def _has_constant_factor(loss: Any) -> bool:
    """Whether there is a product of matrices in its graph of which one carries no gradient."""
    pending, seen = [loss.grad_fn], {loss.grad_fn}
    while pending and len(seen) < _NODES:
        node = pending.pop()
        inputs = [following for following, _ in node.next_functions] if node is not None else []
        if node is not None and node.name() in _PRODUCTS and None in inputs[:2]:
            return True
        pending += [following for following in inputs if following not in seen]
        seen.update(inputs)
    return False


def _spawned(call: Call) -> Generator[None, Any, None]:
    call.recorder.tell("spawn", count=call["nprocs"])
    yield


_MODULES = ("torch.distributed.distributed_c10d", "torch.distributed")
TABLE = (
    *(Hooked(module, name, _collective, scope="collective") for name in COLLECTIVES for module in _MODULES),
    *(Hooked(module, "init_process_group", _begun, scope="init") for module in _MODULES),
    *(Hooked(module, "destroy_process_group", _destroyed, scope="destroy") for module in _MODULES),
    Hooked("torch.distributed", "Work.wait", _waited, scope="collective"),
    Hooked("torch.autograd", "backward", _backward, scope="gathered"),
    Hooked("torch.multiprocessing", "spawn", _spawned, scope="spawn"),
    Hooked("torch.multiprocessing.spawn", "start_processes", _spawned, scope="spawn"),
)
