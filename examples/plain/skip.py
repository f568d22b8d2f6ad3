"""Leave out a step whose loss is too high or not finite, on every worker alike.

    torchrun --standalone --nproc_per_node=2 examples/plain/skip.py

Were each worker to decide for itself, the weights would part. So they vote, and one that wants to skip makes all skip:
another number of workers would skip other steps. They vote with a flag, not with the loss: gloo's MAX of (0.42, NaN) is
0.42.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: first imported by DDP, after init_process_group, it would keep the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LIMIT = 2.0
LOSSES = [(0.42, 3.90), (0.42, float("nan")), (0.10, 3.50), (0.42, 0.58)]
"""Of worker 0 and worker 1, step by step."""


def take_steps() -> None:
    rank = dist.get_rank()
    net = nn.Linear(1, 1, bias=False)  # its loss is its input, as long as its only weight is 1.0
    nn.init.ones_(net.weight)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    skipped = 0
    for step, losses in enumerate(LOSSES, start=1):
        loss = model(torch.tensor([[losses[rank]]])).sum()
        optimizer.zero_grad()
        loss.backward()
        vote = torch.tensor(0 if loss.item() <= LIMIT else 1)  # so asked, NaN is too high as well
        dist.all_reduce(vote, dist.ReduceOp.MAX)
        if vote.item():
            skipped += 1
        else:
            optimizer.step()
        told: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(told, f"{loss.item():.2f} {'skipped' if vote.item() else 'taken'}")
        if rank == 0:
            print(f"step {step}:", *told)
    weights: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(weights, net.weight.item())
    if rank == 0:
        print(f"{skipped} of {len(LOSSES)} skipped, weights {weights}")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    take_steps()
    dist.destroy_process_group()  # now that the wrapper, which holds it, is gone


if __name__ == "__main__":
    main()
