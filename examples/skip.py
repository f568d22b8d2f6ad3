"""Leave out a step whose loss is too high or not finite, on every worker alike.

    paceline launch -n 2 examples/skip.py

Two fields of the recipe. The decision is taken on the reduced loss, so nobody needs a vote, and it is the same for
any number of workers. That is also why it is the mean that counts: a limit for "any worker's" loss, as in the plain
version, would skip other steps on other numbers of workers. Step 3 shows it: (0.10, 3.50) has a mean of 1.80.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

LOSSES = [(0.42, 3.90), (0.42, float("nan")), (0.10, 3.50)]
"""Of lane 0 and lane 1, step by step."""


def main() -> None:
    recipe = paceline.Recipe(
        batch=2,
        micro_batch=1,
        lanes=2,
        epochs=1,
        order="sequential",
        skip_loss_above=2.0,
        on_nonfinite="skip",
        device="cpu",
    )
    run = paceline.Run(recipe)
    model = nn.Linear(1, 1, bias=False)  # its loss is its input, as long as its only weight is 1.0
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run.track(model=model, optimizer=optimizer)

    def train_step(step: paceline.Step) -> None:
        for (loss_B1,) in step:
            step.backward(model(loss_B1).sum(), weight=len(loss_B1))
        step.update(optimizer)

    skipped = 0
    for done in run.steps(TensorDataset(torch.tensor(LOSSES).view(-1, 1)), train_step):
        lanes = " and ".join(f"{loss:.2f}" for loss in done.lane_losses)
        verdicts = run.gather("skipped" if done.skipped else "taken")
        run.print(f"step {done.step}: {lanes}, mean {done.loss:.2f}:", *verdicts)
        skipped += done.skipped
    run.print(f"{skipped} of {run.position} skipped, weights {run.gather(round(model.weight.item(), 4))}")


if __name__ == "__main__":
    main()
