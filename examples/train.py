"""Train a small network: 4096 samples, batches of 128 on 4 lanes, 3 epochs. The same bits on 1, 2, 3 and 4 workers.

    python examples/train.py runs/one
    paceline launch -n 3 examples/train.py runs/three
    torchrun --standalone --nproc_per_node=2 examples/train.py runs/two

The workers start from different weights on purpose: tracking the model hands out worker 0's. The model is not
wrapped, so its keys are its own, and the weights in a checkpoint load into the bare model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))


def make_data() -> TensorDataset:
    """4096 points in 32 dimensions, and on which side of a plane each lies."""
    generator = torch.Generator().manual_seed(0)
    x_NF = torch.randn(4096, 32, generator=generator)
    return TensorDataset(x_NF, (x_NF @ torch.randn(32, 1, generator=generator) > 0).float())


def checksum(net: nn.Module) -> str:
    return f"{sum(p.double().sum().item() for p in net.parameters()):.6f}"


def main() -> None:
    run_dir = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/train")
    recipe = paceline.Recipe(batch=128, micro_batch=32, lanes=4, epochs=3, order="permutation", device="cpu")
    run = paceline.Run(recipe, paceline.Execution(run_dir=str(run_dir)))
    torch.manual_seed(run.rank)  # different weights, deliberately
    model = make_net().to(run.device)
    before = run.gather(checksum(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)

    def train_step(step: paceline.Step) -> None:
        for x_BF, y_B1 in step:
            loss = F.binary_cross_entropy_with_logits(model(x_BF), y_B1, reduction="sum")
            step.backward(loss, weight=len(x_BF))
        step.update(optimizer)

    losses: list[float] = []
    for done in run.steps(make_data(), train_step):
        losses.append(done.loss)
        if done.ends_epoch:
            run.print(f"epoch {done.epoch}: {len(losses)} steps, loss {sum(losses) / len(losses):.4f}")
            losses.clear()

    run.print("checksums:", *before, "before,", *run.gather(checksum(model)), "after")
    assert run.saved is not None  # at the end of the steps
    weights = load_file(run.saved / "model.safetensors")
    make_net().load_state_dict(weights)
    run.print("saved:", *weights)
    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
