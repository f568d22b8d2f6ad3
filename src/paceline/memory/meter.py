"""Measures what autograd keeps for backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SavedBytes", "saved_bytes"]


@dataclass(frozen=True, kw_only=True)
class SavedBytes:
    """What autograd kept for backward while a function ran.

    Args:
        packed: bytes of every tensor that it packed. A tensor counts each time an operator saves it, weights too, so
            this is more than memory holds: compare it with itself, before and after a change.
    """

    packed: int


def saved_bytes(fn: Callable[[], object]) -> SavedBytes:
    """Runs ``fn`` once and measures what autograd saves for backward meanwhile. Not collective.

    Give it the forward pass (``lambda: model(x)``); what it returns is dropped, and with it what was saved. Inside
    ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`` only the inputs of the checkpointed part are saved,
    and so counted. The count is that of a plain hook: `torch.autograd.graph.saved_tensors_hooks`.

    >>> layer, x_BF = torch.nn.Linear(256, 256, bias=False), torch.zeros(64, 256)
    >>> saved_bytes(lambda: layer(x_BF)).packed == 4 * x_BF.numel()
    True
    """
    packed = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal packed
        packed += tensor.numel() * tensor.element_size()
        return tensor.detach()  # an operator's own output, kept as it is, would keep the operator: both would leak

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return SavedBytes(packed=packed)
