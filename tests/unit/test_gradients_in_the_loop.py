"""In the loop over a step gradients are parts of a sum, others on each number of workers: nobody may touch them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from paceline import Recipe, Run, Step
from paceline.errors import UsageError

pytestmark = pytest.mark.usefixtures("process_state")

Touch = Callable[[Any, torch.optim.Optimizer, Run], object]
DATA = TensorDataset(*torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(1)))


def trained(
    inside: Touch = lambda *_: None,
    behind: Touch = lambda *_: None,
    after: Touch = lambda *_: None,
    data: Dataset[Any] = DATA,
    lanes: int = 2,
    compiled: bool = False,
) -> str:
    recipe = Recipe(batch=4 * lanes, micro_batch=4 if lanes == 1 else 2, lanes=lanes, steps=3)
    with Run(recipe) as run:
        model = nn.Linear(3, 3)
        # All of torch's compiler but the kernels, for a function of ours: it does not look into one of torch's.
        forward = torch.compile(lambda x_BF: model(x_BF), backend="eager", fullgraph=True) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)

        def step(step: Step) -> None:
            for x_BF, y_BF in step:
                step.backward((forward(x_BF) - y_BF).square().sum(), weight=len(x_BF))
                inside(model, optimizer, run)
            behind(model, optimizer, run)
            step.update(optimizer)
            after(model, optimizer, run)

        for _ in run.steps(data, step):
            pass
        return run.digest()


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(
    "touch",
    [
        lambda model, optimizer, run: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model, optimizer, run: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model, optimizer, run: model.weight.grad.mul_(2),
        lambda model, optimizer, run: model.weight.grad.norm(),
        lambda model, optimizer, run: optimizer.zero_grad(set_to_none=False),
    ],
    ids=["clip norm", "clip value", "scale", "read", "zero"],
)
def test_touching_them_is_an_error(touch: Touch, lanes: int) -> None:
    with pytest.raises(UsageError, match="cannot touch gradients here"):
        trained(inside=touch, lanes=lanes)


def test_the_compiler_looks_at_all_that_parameters_have_and_may() -> None:
    """It does so in the first forward, inside of the loop."""
    assert trained(compiled=True) == trained()
    with pytest.raises(UsageError, match="cannot touch gradients here"):
        trained(inside=lambda model, optimizer, run: model.weight.grad.norm(), compiled=True)


def test_taking_them_off_in_the_loop_changes_nothing() -> None:
    assert trained(inside=lambda model, optimizer, run: optimizer.zero_grad()) == trained()


@pytest.mark.parametrize("where", ["inside", "behind", "after"])
def test_an_optimizer_steps_in_update_alone(where: str) -> None:
    at: dict[str, Any] = {where: lambda model, optimizer, run: optimizer.step()}
    with pytest.raises(UsageError, match=r"found SGD\.step\(\) outside of step\.update"):
        trained(**at)


def test_gradients_that_are_taken_away_behind_the_loop_are_missed() -> None:
    with pytest.raises(UsageError, match="found no gradient in the optimizer's parameters, though the step has some"):
        trained(behind=lambda model, optimizer, run: optimizer.zero_grad())


@pytest.mark.parametrize("call", ["sum", "gather", "digest", "save", "evaluate"])
def test_no_calls_of_the_run_in_the_loop(call: str) -> None:
    """On two workers they might pair up by luck, on three they would not."""
    calls: dict[str, Touch] = {
        "sum": lambda model, optimizer, run: run.sum(1),
        "gather": lambda model, optimizer, run: run.gather(1),
        "digest": lambda model, optimizer, run: run.digest(),
        "save": lambda model, optimizer, run: run.save(),
        "evaluate": lambda model, optimizer, run: run.evaluate(DATA, lambda batch: {"a": (1.0, 1.0)}),
    }
    with pytest.raises(UsageError, match="cannot call run"):
        trained(inside=calls[call])


@pytest.mark.parametrize("where", ["behind", "after"])
def test_no_save_in_a_train_step(where: str) -> None:
    """It would hold the state of the step under the number of the one before."""
    at: dict[str, Any] = {where: lambda model, optimizer, run: run.save()}
    with pytest.raises(UsageError, match=r"cannot call run\.save .*found a step that has not ended"):
        trained(**at)


class Keeps(Dataset[tuple[Tensor, Tensor]]):
    """A dataset with a generator of its own."""

    def __init__(self) -> None:
        self.drawn = np.random.default_rng(0)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.drawn.random(3)).float(), torch.zeros(3)


def test_a_dataset_that_gives_another_sample_each_time_is_found_out() -> None:
    with pytest.raises(UsageError, match="found samples that differ when they are read again"):
        trained(data=Keeps())
