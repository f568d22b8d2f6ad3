"""A small GAN: two networks, two optimizers, and in each step two transactions over the same samples.

    python examples/gan.py
    paceline launch -n 3 examples/gan.py

`run.steps(data, d_step, g_step)` runs first the discriminator's step, then the generator's. The noise is drawn inside
the loop over the micro-batches, where random numbers are seeded by step, phase, lane and micro-batch: so the digest
is the same for any number of workers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))


def main() -> None:
    run = paceline.Run(paceline.Recipe(batch=32, micro_batch=8, lanes=4, steps=90, device="cpu"))
    torch.manual_seed(0)
    points_N2 = torch.randn(2048, 2) * 0.5 + torch.tensor([2.0, -1.0])  # what the generator is to imitate
    g, d = make_net(), nn.Sequential(make_net(), nn.Linear(2, 1))
    g_optimizer = torch.optim.Adam(g.parameters(), lr=2e-3, betas=(0.5, 0.9))
    d_optimizer = torch.optim.Adam(d.parameters(), lr=2e-3, betas=(0.5, 0.9))
    run.track(g=g, d=d, g_optimizer=g_optimizer, d_optimizer=d_optimizer)

    def says(points_B2: Tensor, *, real: bool) -> Tensor:
        """How far the discriminator is from saying so, summed over the points."""
        logits_B1 = d(points_B2)
        return F.binary_cross_entropy_with_logits(logits_B1, torch.full_like(logits_B1, float(real)), reduction="sum")

    def d_step(step: paceline.Step) -> None:
        for (real_B2,) in step:
            fake_B2 = g(torch.randn_like(real_B2)).detach()
            step.backward(says(real_B2, real=True) + says(fake_B2, real=False), weight=len(real_B2))
        step.update(d_optimizer)

    def g_step(step: paceline.Step) -> None:
        for (real_B2,) in step:
            step.backward(says(g(torch.randn_like(real_B2)), real=True), weight=len(real_B2))
        step.update(g_optimizer)

    for of_d, of_g in run.steps(TensorDataset(points_N2), d_step, g_step):
        if of_g.step % 30 == 0:
            with torch.no_grad():
                x, y = g(torch.randn(1000, 2)).mean(0).tolist()
            run.print(f"step {of_g.step}: losses {of_d.loss:.2f} and {of_g.loss:.2f}, mean ({x:.2f}, {y:.2f})")
    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
