"""BatchNorm, what it means here, and GroupNorm as the way out for small micro-batches.

    python examples/normalisation.py
    paceline launch -n 3 examples/normalisation.py

BatchNorm normalises each micro-batch by its own mean and variance. Its running statistics are kept per lane: each
starts a step from the same ones, afterwards they become the mean over the lanes, in the fixed tree. So they are the
same bits for any number of workers. What the micro-batch is, the recipe says; with few samples in it the statistics
are noisy, as the spread below shows, and the noise does not go away with more workers.

torch's SyncBatchNorm normalises over the micro-batches of all workers instead. It needs a GPU, its bits depend on the
number of workers, and it waits for all of them in every layer: a run refuses it. GroupNorm looks at one sample at a
time, so neither the micro-batch nor the workers come into it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def make_net(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), norm, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 8 * 8, 2))


def spread(model: nn.Module, images_N1HW: torch.Tensor, micro_batch: int) -> float:
    """How much the first image's output moves with the company it is normalised in: the largest deviation."""
    model.train()
    with torch.no_grad():
        outputs = [
            model(torch.cat([images_N1HW[:1], others_B1HW]))[0]
            for others_B1HW in images_N1HW[1:].split(micro_batch - 1)
        ]
    return torch.stack(outputs).std(0).max().item()


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    images_N1HW = torch.randn(256, 1, 8, 8, generator=generator) + torch.randn(256, 1, 1, 1, generator=generator)
    labels_N = (images_N1HW.mean((1, 2, 3)) > 0).long()
    for name, norm, micro_batch in [
        ("BatchNorm", nn.BatchNorm2d(8), 2),
        ("BatchNorm", nn.BatchNorm2d(8), 16),
        ("GroupNorm", nn.GroupNorm(2, 8), 2),
    ]:
        run = paceline.Run(paceline.Recipe(batch=64, micro_batch=micro_batch, lanes=4, steps=8))
        torch.manual_seed(0)
        model = make_net(norm).to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        run.track(model=model, optimizer=optimizer)

        def train_step(
            step: paceline.Step, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer
        ) -> None:
            for images_B1HW, labels_B in step:
                step.backward(F.cross_entropy(model(images_B1HW), labels_B, reduction="sum"), weight=len(labels_B))
            step.update(optimizer)

        for _ in run.steps(TensorDataset(images_N1HW, labels_N), train_step):
            pass
        digest = run.digest()  # the weights and the running statistics
        moves = spread(model, images_N1HW, micro_batch)
        run.print(f"{name}, micro-batches of {micro_batch}: an output moves by {moves:.3f}, digest {digest}")
        run.close()


if __name__ == "__main__":
    main()
