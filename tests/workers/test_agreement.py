"""What only one worker has or meets, in real processes: unlike models become one, a save that fails fails for all."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from torch import Tensor, nn

from paceline.config import Execution, Recipe
from paceline.determinism import seed_by
from paceline.errors import PacelineError
from paceline.run import Run
from paceline.step import Step
from pool import Pool

RECIPE = Recipe(batch=8, micro_batch=1, steps=5)


class Image(nn.Module):
    """Parameters in channels_last, transposed, and empty; statistics; on `jobs.Waves`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, (1, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 5)
        self.head.weight = nn.Parameter(torch.randn(6, 5).t())
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x_BCT: Tensor) -> Tensor:
        x_BCHW = x_BCT[:, :, None].contiguous(memory_format=torch.channels_last)
        logits_BV: Tensor = self.head(self.norm(self.conv(x_BCHW)).tanh().mean((2, 3)))
        return logits_BV


def begin_unlike(execution: Execution) -> dict[str, Any]:
    with Run(dataclasses.replace(RECIPE, micro_batch=2, batch=2 * RECIPE.batch), execution) as run:
        seed_by("other weights on every worker", run.rank)
        model = Image()
        with torch.no_grad():
            model.norm.running_mean.fill_(run.rank)  # type: ignore[union-attr]
        strides = [tensor.stride() for tensor in model.state_dict().values()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        run.track(model=model, optimizer=optimizer)
        first = run.digest()  # an error when workers differ
        for _ in run.steps(jobs.Waves(30), lambda step: learn(step, model, optimizer)):
            pass
        assert [tensor.stride() for tensor in model.state_dict().values()] == strides
        return {"first": first, "last": run.digest(), "mean": float(model.norm.running_mean.mean())}  # type: ignore[union-attr]


def learn(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x_BCT, y_B in step:
        step.backward(nn.functional.cross_entropy(model(x_BCT), y_B, reduction="sum"), weight=len(y_B))
    step.update(optimizer, max_norm=1.0)


def test_channels_last_models_that_start_unlike_train_as_worker_0s(pool: Pool) -> None:
    (alone,) = pool.run(begin_unlike, Execution(), workers=1)
    assert alone["first"] != alone["last"]
    for workers in (2, 3):
        assert pool.run(begin_unlike, Execution(timeout_s=30), workers=workers) == [alone] * workers


class Tags:
    """Something tracked whose state becomes a set one day, which no checkpoint holds."""

    tags: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"tags": self.tags}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("never saved")


def save_what_cannot_be_saved(how: str, execution: Execution) -> tuple[str, str, int, str]:
    """How it ends, and where the team is then: still together."""
    with Run(RECIPE, execution) as run:
        seed_by("model")
        model = nn.Sequential(nn.Flatten(), nn.Linear(24, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tags = Tags()
        run.track(model=model, optimizer=optimizer, tags=tags)
        run.digest()
        tags.tags = {"a", "b"}
        try:
            if how == "save":
                run.save()
            else:
                for _ in run.steps(jobs.Waves(30), lambda step: learn(step, model, optimizer)):
                    pass
        except PacelineError as error:
            return type(error).__name__, str(error), run.position, run.digest()
        raise AssertionError("saved")


@pytest.mark.parametrize(
    ("how", "position", "changes"),
    [
        ("save", 0, {}),
        ("at the end", 5, {}),
        ("in the background", 2, {"checkpoint_every": 1}),  # told with the step after it
        ("amid the steps", 1, {"checkpoint_every": 1, "async_checkpoint": False}),
    ],
)
def test_a_state_that_cannot_be_saved_is_an_error_on_every_worker(
    pool: Pool, tmp_path: Path, how: str, position: int, changes: dict[str, Any]
) -> None:
    execution = Execution(run_dir=str(tmp_path), timeout_s=20, **changes)
    first, second = pool.run(save_what_cannot_be_saved, how, execution, workers=2, deadline_s=60)
    assert first[0] == "CheckpointError"
    assert "cannot save tags" in first[1]
    assert second[:2] == ("TeamError", "worker 0 could not save a checkpoint. See its error.")
    assert first[2] == second[2] == position
    assert first[3] == second[3]
