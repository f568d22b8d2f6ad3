"""Who sees which sample: torch's `DistributedSampler`, and the call that everybody forgets once.

    python examples/plain/sampler.py

No workers are needed to see it: a sampler is told how many there are, and which one it serves. Without ``set_epoch``
every epoch has the order of the first, and nothing says so.
"""

from __future__ import annotations

import torch
from torch.utils.data import DistributedSampler, TensorDataset

ITEMS = TensorDataset(torch.arange(10))


def dealt(*, drop_last: bool) -> str:
    """What each of 3 workers sees, unshuffled."""
    samplers: list[DistributedSampler[int]] = [
        DistributedSampler(ITEMS, num_replicas=3, rank=rank, shuffle=False, drop_last=drop_last) for rank in range(3)
    ]
    return " ".join(str(list(sampler)) for sampler in samplers)


def main() -> None:
    print("10 items over 3 workers:", dealt(drop_last=False))
    print("dropping the tail:", dealt(drop_last=True))

    sampler: DistributedSampler[int] = DistributedSampler(ITEMS, num_replicas=2, rank=0, shuffle=True, seed=0)
    print("shuffled over 2, rank 0, epoch 0:", list(sampler))
    print("epoch 1, set_epoch forgotten:", list(sampler))
    sampler.set_epoch(1)
    print("epoch 1:", list(sampler))


if __name__ == "__main__":
    main()
