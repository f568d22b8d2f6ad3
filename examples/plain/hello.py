"""Two workers add up a number, and worker 0 prints what each has to say.

    torchrun --standalone --nproc_per_node=2 examples/plain/hello.py
    torchrun --standalone --nproc_per_node=2 examples/plain/hello.py --fail 1

Printed by each worker, the lines would come out in any order. With ``--fail RANK`` that worker raises: Python prints
its traceback, the others fail in its wake and print theirs, and torchrun's own report follows.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", type=int, metavar="RANK", help="the worker that shall fail")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank()
    if rank == options.fail:
        raise RuntimeError(f"worker {rank} fails, as asked")

    total = torch.tensor(rank + 1.0)
    dist.all_reduce(total)
    lines: list[str | None] = [None] * world_size
    dist.all_gather_object(lines, f"rank {rank}/{world_size} local_rank={local_rank} sum={total.item()}")
    if rank == 0:
        print(*lines, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
