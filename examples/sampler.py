"""Who sees which sample. The order is a function of the step, and the step knows its epoch: it cannot be forgotten.

    python examples/sampler.py
    paceline order --samples 10 --lanes 3 --tail pad

Samples are dealt to lanes, not to workers: any number of workers that drive the lanes see the same ones.
``permutation`` is the order of torch's `DistributedSampler` with one replica per lane; the default, ``cipher``, needs
no memory.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.data.order import describe

ITEMS = TensorDataset(torch.arange(10))


def main() -> None:
    print("10 items over 3 lanes", *describe(samples=10, lanes=3, order="sequential", tail="pad"), sep="\n")
    print("dropping the tail", *describe(samples=10, lanes=3, order="sequential", tail="drop"), sep="\n")

    run = paceline.Run(paceline.Recipe(batch=2, micro_batch=1, lanes=2, epochs=2, order="permutation", device="cpu"))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    seen: list[list[int]] = []

    def train_step(step: paceline.Step) -> None:
        seen.append([])
        for (item_B,) in step:  # alone, this worker drives both lanes
            seen[-1].append(int(item_B))
            step.backward(model(item_B[:, None].float()).sum(), weight=1)
        step.update(optimizer)

    print("shuffled over 2 lanes, and no call says which epoch it is")
    for done in run.steps(ITEMS, train_step):
        if len(seen) == 5:
            print(
                f"epoch {done.epoch}, lane 0: {[first for first, _ in seen]}, lane 1: {[second for _, second in seen]}"
            )
            seen.clear()


if __name__ == "__main__":
    main()
