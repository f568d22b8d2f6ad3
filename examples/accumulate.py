"""Gradients of several micro-batches before one update, with very unequal numbers of tokens.

    python examples/accumulate.py
    paceline launch -n 2 examples/accumulate.py

A loss is a sum and a weight: `step.backward(loss, weight=tokens)`. Gradients are added up over micro-batches and
lanes and divided once, by all tokens: as in one big batch, however the tokens are spread. Nothing has to be told to
wait: inside the loop gradients are on their way, and touching them is an error; behind it they are those of all.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline

TOKENS = [1000, 7, 3, 40]
"""In each sequence; lane 0 gets the first and third, lane 1 the others."""


class Sequences(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Features and targets of some tokens; the targets of each sequence have a mean of their own."""

    def __len__(self) -> int:
        return len(TOKENS)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x_TF = torch.randn(TOKENS[index], 8, generator=generator)
        return x_TF, torch.randn(TOKENS[index], 1, generator=generator) + index


def joined(sequences: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Sequences one behind the other, whatever their lengths."""
    return torch.cat([x_TF for x_TF, _ in sequences]), torch.cat([y_T1 for _, y_T1 in sequences])


def flat_grad(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def one_big_batch(net: nn.Module) -> Tensor:
    """The gradient of all tokens at once, in float64: what the others should be."""
    whole, data = copy.deepcopy(net).double(), Sequences()
    x_TF, y_T1 = joined([data[i] for i in range(len(data))])
    F.mse_loss(whole(x_TF.double()), y_T1.double()).backward()
    return flat_grad(whole)


def main() -> None:
    run = paceline.Run(paceline.Recipe(batch=4, micro_batch=1, lanes=2, steps=1, order="sequential", device="cpu"))
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    wanted = one_big_batch(model)
    grads: list[Tensor] = []

    def train_step(step: paceline.Step) -> None:
        for x_TF, y_T1 in step:
            step.backward(F.mse_loss(model(x_TF), y_T1, reduction="sum"), weight=len(x_TF))
        grads.append(flat_grad(model))
        step.update(optimizer)

    for done in run.steps(Sequences(), train_step, collate=joined):
        different = len({str(theirs.tolist()) for theirs in run.gather(grads[-1])})
        error = float((grads[-1] - wanted).norm() / wanted.norm())
        run.print(f"gradients of {run.world_size} workers behind the loop: {different} different")
        run.print(f"{done.weight:g} tokens: relative error {error:.1e} against one big batch")
    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
