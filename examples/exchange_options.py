"""What the options of the gradient exchange change: bits by a digest, time by the milliseconds of a step.

    python examples/exchange_options.py

The same 8 steps alone and on 2 workers, which `paceline.launch` starts. Buckets and overlap belong to the execution:
they never move a bit. With ``gradients: allreduce`` the backend adds up the workers, so the digest moves with them
(alone there is nothing to add up). With ``compress: bf16`` half the bytes travel, and each sum is rounded to 8
significant bits, alone too. There are 6 lanes, 3 for each of 2 workers: with 8, both ways of adding would have the same
shape by luck.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "exact, buckets of 1 MiB": ({}, {"bucket_mib": 1}),
    "one bucket": ({}, {"bucket_mib": 64}),
    "no overlap": ({}, {"bucket_mib": 1, "overlap": False}),
    "allreduce": ({"gradients": "allreduce"}, {"bucket_mib": 1}),
    "allreduce in bf16": ({"gradients": "allreduce", "compress": "bf16"}, {"bucket_mib": 1}),
}
"""What the recipe and the execution say besides the defaults."""


def measure(recipe: dict[str, Any], execution: dict[str, Any]) -> tuple[str, float]:
    """The digest after 8 steps, and the median milliseconds of one."""
    run = paceline.Run(
        paceline.Recipe(batch=24, micro_batch=4, lanes=6, steps=8, **recipe), paceline.Execution(**execution)
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    data = TensorDataset(*torch.randn(2, 24, 512, generator=torch.Generator().manual_seed(0)))

    def train_step(step: paceline.Step) -> None:
        for x_BF, y_BF in step:
            step.backward((model(x_BF) - y_BF).square().mean(1).sum(), weight=len(x_BF))
        step.update(optimizer)

    times = [time.perf_counter() for _ in run.steps(data, train_step)]
    digest = run.digest()
    run.close()
    return digest[:8], 1000 * statistics.median(b - a for a, b in itertools.pairwise(times))


def measure_all() -> list[tuple[str, float]]:
    return [measure(recipe, execution) for recipe, execution in OPTIONS.values()]


def main() -> None:
    alone, (together, _) = measure_all(), paceline.launch(measure_all, workers=2)
    print("exchange                   1 worker  2 workers   ms a step with 2")
    for name, (one, _), (two, ms) in zip(OPTIONS, alone, together, strict=True):
        print(f"{name:<25}  {one}  {two}  {ms:17.1f}")


if __name__ == "__main__":
    main()
