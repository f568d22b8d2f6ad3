"""Cross entropy of a language model's output head without its logits: in chunks of tokens, one at a time.

Legend of shapes: N tokens, n tokens of a chunk, V vocabulary, C width.

[Note: gradients in forward] At vocabulary 50,000 the logits outweigh all else that a model keeps: N V floats, and as
many again for their gradient. But a sum over tokens splits: as soon as a chunk's logits are there, what it adds to the
loss and to the gradients of hidden states, weight and bias follows, and the logits can go. So forward takes these
gradients along, and backward only scales them: each logit is computed once, and one chunk's are in memory at a time.
(`torch.utils.checkpoint` of each chunk computes them twice.) The gradients are as large as what they belong to.

[Note: why not torch's] `torch.nn.functional.linear_cross_entropy` does the same from torch 2.13 on, but passes over
autocast: it multiplies in float32, or in bfloat16 tensors returns the whole sum in bfloat16, with 8 significant bits.
And it is one operator, so that a simulation on shapes alone cannot see what it holds inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import UsageError

__all__ = ["MOST_CHUNKS", "chunked_cross_entropy"]

_IGNORED = -100  # torch's: such a target adds nothing
_ROWS = 4096
MOST_CHUNKS = 4096  # each costs a dozen operators, and a chunk that small frees nothing any more


def chunked_cross_entropy(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, *, chunks: int, bias_V: Tensor | None = None
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden_NC, weight_VC, bias_V).float(), targets_N, reduction="sum")`` in less memory.

    Only one chunk's logits are in memory, ``ceil(N / chunks)`` times V, in two copies. Under autocast matrices are
    multiplied in its dtype, as in the plain call; the softmax is in float32, and gradients add up in float32. The bits
    depend on ``chunks``, by rounding; for the same ``chunks`` they are the same.

    Args:
        hidden_NC: what the output head takes, one row a token.
        weight_VC: the head's matrix, that of a `torch.nn.Linear`.
        targets_N: int64, the right token of each; -100: it does not count.
        chunks: parts into which the tokens are split, 4,096 at most. With more of them than tokens, as a last batch may
            have, each token is one.
        bias_V: the head's bias, if it has one.

    Returns:
        The sum over the tokens in nats, float32. Unless gradients are off (`torch.no_grad`), they are computed together
        with it; they can be used for one backward, and not be differentiated again.

    Raises:
        UsageError: ``chunks`` out of range, other shapes or dtypes, or on a CPU a target that is no token; in backward:
            the second one, or ``create_graph=True``.

    >>> hidden_NC, weight_VC = torch.randn(6, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    >>> loss = chunked_cross_entropy(hidden_NC, weight_VC, torch.arange(6), chunks=3)
    >>> plain = F.cross_entropy(hidden_NC @ weight_VC.T, torch.arange(6), reduction="sum")
    >>> torch.allclose(loss, plain)
    True
    """
    _check(hidden_NC, weight_VC, targets_N, chunks, bias_V)
    dtype = torch.promote_types(hidden_NC.dtype, weight_VC.dtype)
    device = hidden_NC.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    wanted = torch.is_grad_enabled()  # inside the function it is always off
    apply: Callable[..., Tensor] = _ChunkedCrossEntropy.apply
    with torch.autocast(device, enabled=False):  # it would cast more than what matrices are multiplied in
        return apply(hidden_NC, weight_VC, bias_V, targets_N, chunks, dtype, wanted)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """See [Note: gradients in forward]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        chunks: int,
        dtype: torch.dtype,
        wanted: bool,
    ) -> Tensor:
        """``dtype``: of the matrix products; ``wanted``: whether gradients are."""
        full = torch.promote_types(dtype, torch.float32)
        x_NC, w_VC, b_V = hidden_NC.to(dtype), weight_VC.to(dtype), None if bias_V is None else bias_V.to(dtype)
        of_hidden, of_weight, of_bias = (wanted and needed for needed in ctx.needs_input_grad[:3])
        grad_NC = torch.empty_like(hidden_NC) if of_hidden else None
        grad_VC = torch.zeros_like(weight_VC, dtype=full) if of_weight else None
        grad_V = torch.zeros_like(bias_V, dtype=full) if of_bias and bias_V is not None else None
        loss = torch.zeros((), dtype=full, device=hidden_NC.device)
        size = max(1, -(-len(x_NC) // chunks))
        for start in range(0, len(x_NC), size):
            x_nC, targets_n = x_NC[start : start + size], targets_N[start : start + size]
            chance_nV = F.log_softmax(F.linear(x_nC, w_VC, b_V), dim=-1, dtype=full)
            try:
                loss += F.nll_loss(chance_nV, targets_n, reduction="sum", ignore_index=_IGNORED)
            except IndexError:  # a GPU finds out later, and in its own words
                counted = targets_n[targets_n != _IGNORED]
                raise _refusal(
                    f"targets from {counted.min().item()} to {counted.max().item()}",
                    f"0 to {len(w_VC) - 1}, or {_IGNORED} for one that does not count",
                    "Give the head as many rows as there are tokens",
                ) from None
            if not (of_hidden or of_weight or of_bias):
                continue
            counts_n = targets_n != _IGNORED
            grad_nV = chance_nV.exp_()  # softmax minus one-hot
            grad_nV[torch.arange(len(x_nC), device=x_NC.device), targets_n.where(counts_n, 0)] -= 1
            if grad_V is not None:
                grad_V += counts_n.to(full) @ grad_nV
            grad_nV = grad_nV.to(dtype)
            if grad_NC is not None:
                grad_NC[start : start + size] = grad_nV @ w_VC * counts_n[:, None]
            if grad_VC is not None:
                _add_product(grad_VC, grad_nV.T, x_nC * counts_n[:, None])
        ctx.save_for_backward(grad_NC, grad_VC, grad_V)
        ctx.spent = False
        ctx.dtypes = hidden_NC.dtype, weight_VC.dtype, None if bias_V is None else bias_V.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent or torch.is_grad_enabled():
            raise UsageError(
                "cannot go back through the chunked loss",
                found="a second backward" if ctx.spent else "create_graph=True",
                needed="one backward, and no gradients of gradients",
                fix="Add up losses before backward, or leave out recipe.loss_chunks",
            )
        ctx.spent = True  # scaled in place, as of a weight's gradient one copy is enough
        scaled = [
            None if own is None else own.mul_(grad).to(dtype)
            for own, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None


def _add_product(into_VC: Tensor, left_Vn: Tensor, right_nC: Tensor) -> None:
    if left_Vn.dtype == into_VC.dtype:
        into_VC.addmm_(left_Vn, right_nC)
        return
    # A product is rounded before it is added. Some rows at a time it stays in the cache: a third of the time on a CPU.
    for into_vC, left_vn in zip(into_VC.split(_ROWS), left_Vn.split(_ROWS), strict=True):
        into_vC += left_vn @ right_nC


def _check(hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, chunks: object, bias_V: Tensor | None) -> None:
    if not isinstance(chunks, int) or isinstance(chunks, bool) or not 1 <= chunks <= MOST_CHUNKS:
        raise _refusal(
            f"chunks={chunks!r} for {targets_N.numel()} tokens",
            f"a whole number from 1 to {MOST_CHUNKS}",
            "Use chunks=8, or so many that each has some hundred tokens",
        )
    shapes = [tuple(tensor.shape) for tensor in (hidden_NC, weight_VC, targets_N)]
    fits = [len(shape) for shape in shapes] == [2, 2, 1]
    if not fits or hidden_NC.shape[1] != weight_VC.shape[1] or len(hidden_NC) != len(targets_N):
        raise _refusal(
            f"hidden {shapes[0]}, weight {shapes[1]}, targets {shapes[2]}",
            "(tokens, width), (vocabulary, width), (tokens,)",
            "Flatten samples and their tokens: hidden_BTC.flatten(0, 1), targets_BT.flatten()",
        )
    if bias_V is not None and bias_V.shape != weight_VC.shape[:1]:
        raise _refusal(
            f"bias {tuple(bias_V.shape)}", f"({len(weight_VC)},), one per token id", "Use that of the head itself"
        )
    if targets_N.dtype != torch.int64:
        raise _refusal(
            f"targets of {targets_N.dtype}",
            "torch.int64, the number of the right token",
            "Give whole numbers, as by targets_N.long()",
        )


def _refusal(found: str, needed: str, fix: str) -> UsageError:
    return UsageError("cannot compute the loss in chunks", found=found, needed=needed, fix=fix)
