"""Gradients of several micro-batches before one update, with very unequal numbers of tokens.

    torchrun --standalone --nproc_per_node=2 examples/plain/accumulate.py

``no_sync`` spares the exchange after all micro-batches but the last: until then each worker has gradients of its own.
And the usual mean per micro-batch gives a token more weight the fewer there are beside it. Right is the sum over
tokens, divided by the tokens of all workers; and DDP's own division by the number of workers has to be undone.
"""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: first imported by DDP, after init_process_group, it would keep the group alive
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

TOKENS = [[1000, 3], [7, 40]]  # in each micro-batch of worker 0, and of worker 1


def make_batch(rank: int, micro: int) -> tuple[Tensor, Tensor]:
    """Features and targets of some tokens; the targets of each micro-batch have a mean of their own."""
    seed, tokens = 2 * rank + micro, TOKENS[rank][micro]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 8, generator=generator), torch.randn(tokens, 1, generator=generator) + seed


def flat_grad(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def accumulate(model: DistributedDataParallel, *, weighted: bool) -> list[str]:
    """The gradients of one step; whether the workers' agree, after each micro-batch."""
    rank, seen = dist.get_rank(), []
    all_tokens = torch.tensor(sum(TOKENS[rank]))
    dist.all_reduce(all_tokens)
    model.zero_grad()
    for micro in range(2):
        x_TF, y_T1 = make_batch(rank, micro)
        with contextlib.nullcontext() if micro == 1 else model.no_sync():
            if weighted:
                loss = F.mse_loss(model(x_TF), y_T1, reduction="sum") * dist.get_world_size() / all_tokens
            else:
                loss = F.mse_loss(model(x_TF), y_T1) / 2
            loss.backward()
        everyone: list[Tensor] = [torch.empty(0)] * dist.get_world_size()
        dist.all_gather_object(everyone, flat_grad(model))
        seen.append("agree" if torch.equal(*everyone) else "disagree")
    return seen


def compare() -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    whole = copy.deepcopy(net).double()  # sees all tokens in one batch: its gradient is the one to have
    batches = [make_batch(rank, micro) for rank in range(2) for micro in range(2)]
    x_TF, y_T1 = (torch.cat(parts).double() for parts in zip(*batches, strict=True))
    F.mse_loss(whole(x_TF), y_T1).backward()
    model = DistributedDataParallel(net)
    for name, weighted in (("mean of means", False), ("weighted by tokens", True)):
        first, last = accumulate(model, weighted=weighted)
        error = float((flat_grad(net) - flat_grad(whole)).norm() / flat_grad(whole).norm())
        if dist.get_rank() == 0:
            print(f"{name}: gradients {first} after no_sync, {last} after the next")
            print(f"{name}: relative error {error:.1e} against one big batch")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    compare()
    dist.destroy_process_group()  # now that the wrapper, which holds it, is gone


if __name__ == "__main__":
    main()
