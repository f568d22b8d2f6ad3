"""The batch of a step, and a learning rate that follows it: 8 lanes x 32 samples = 256, from a rate found for 64.

    python examples/batch_and_rate.py
    paceline launch -n 8 examples/batch_and_rate.py

A rate that was good for one batch is rarely good for four times as much. Two rules of thumb: times 4 (linear), or times
its root. Paceline applies one when the recipe says so, against the batch that it names, and logs what came of it.

The batch belongs to the recipe, not to the workers: 1 or 8 of them take the same step, only sooner. So when workers
change nothing needs scaling, and nothing is scaled. With so many samples *per worker*, as people launch plain DDP, each
change of workers changes the batch, and with it what is a good rate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import paceline
from paceline.optim import scaled_lr
from paceline.progress import Progress
from paceline.train import train


class Plane(paceline.Task):
    """A linear regression."""

    def build_model(self) -> nn.Module:
        return nn.Linear(16, 1)

    def train_data(self) -> Dataset[Any]:
        x_NF = torch.randn(1024, 16, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x_NF, x_NF.sum(1, keepdim=True))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        x_BF, y_B1 = batch
        return (model(x_BF) - y_B1).square().sum(), len(x_BF)


def told(batch: int) -> str:
    return f"batch {batch:>3}, lr {scaled_lr(1e-3, batch=batch, base_batch=64, rule='linear'):.2e}"


def main() -> None:
    optimizer = paceline.Optimizer(lr=1e-3, lr_scaling="linear", base_batch=64)
    schedule = paceline.Schedule(kind="constant")
    recipe = paceline.Recipe(batch=256, micro_batch=32, lanes=8, epochs=1, optimizer=optimizer, schedule=schedule)
    train(Plane(), recipe, paceline.Execution(log_every=4), sinks=[Progress()])

    run = paceline.Run(recipe)  # for an optimizer of your own the rules are a function
    for rule in ("none", "linear", "sqrt"):
        run.print(f"{rule:<6}  lr {scaled_lr(1e-3, batch=recipe.batch, base_batch=64, rule=rule):.2e}")
    run.print("workers  32 samples each        this recipe")
    for workers in (1, 2, 4, 8):
        run.print(f"{workers:>7}  {told(32 * workers)}  {told(recipe.batch)}")
    run.close()


if __name__ == "__main__":
    main()
