# expect: collective-order-differs
"""Metrics by name, reduced in the order of a union of sets: each process hashes strings by a key of its own."""

import torch
import torch.distributed as dist

TRAINED = {"loss", "accuracy"}
WATCHED = {"norm", "rate"}


def main() -> None:
    dist.init_process_group("gloo")
    told = {name: torch.zeros(1) for name in TRAINED | WATCHED}
    for name in TRAINED | WATCHED:
        dist.all_reduce(told[name])
    dist.destroy_process_group()


main()
