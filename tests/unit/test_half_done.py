"""Nothing half-done is used and nothing is carried: steps that fail, loops that are left, saves that end late."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from paceline import Execution, Recipe, Run, Step
from paceline.determinism import content_digest
from paceline.errors import CheckpointError, UsageError

pytestmark = pytest.mark.usefixtures("process_state")

RECIPE = Recipe(batch=8, micro_batch=2, lanes=2, steps=4)
DATA = TensorDataset(*torch.randn(2, 32, 3, generator=torch.Generator().manual_seed(1)))


class Noisy(Dataset[Any]):
    """Draws for each sample, so that loading in the run's own process moves its generators."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(3), torch.randn(3)


class Trained:
    """A model with running statistics, and all that a step of it needs."""

    def __init__(self, run: Run) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        run.track(model=self.model, optimizer=self.optimizer)

    def step(self, step: Step) -> None:
        for x_BF, y_BF in step:
            step.backward((self.model(x_BF) - y_BF).square().sum(), weight=len(x_BF))
        step.update(self.optimizer)


def undisturbed() -> str:
    with Run(RECIPE) as run:
        for _ in run.steps(DATA, Trained(run).step):
            pass
        return run.digest()


@pytest.mark.parametrize("resumed", [False, True])
def test_what_is_drawn_before_the_loop_is_keyed(tmp_path: Path, resumed: bool) -> None:
    def drawn(execution: Execution, upto: int | None = None) -> list[float]:
        factors: list[float] = []
        with Run(RECIPE, execution, resume="auto") as run:
            mine = Trained(run)

            def step(step: Step) -> None:
                first = float(torch.rand(()))
                step.total(lambda batch: len(batch[0]))
                factors.append(first + float(torch.rand(())))
                mine.step(step)

            for done in run.steps(Noisy(), step):
                if done.step == upto:
                    run.save()
                    break
        return factors

    expected = drawn(Execution())
    assert len(set(expected)) == RECIPE.steps
    if resumed:
        there = Execution(run_dir=str(tmp_path / "run"))
        assert drawn(there, upto=2) + drawn(there) == expected
    else:
        assert drawn(Execution(loader_workers=2)) == expected


def test_a_parameter_that_was_frozen_stays_where_it_is() -> None:
    with Run(RECIPE) as run:
        mine = Trained(run)
        next(iter(run.steps(DATA, mine.step)))
        first = mine.model[0].requires_grad_(False)
        before = first.weight.clone()  # type: ignore[operator]
        for _ in run.steps(DATA, mine.step):
            pass
        assert torch.equal(first.weight, before)  # type: ignore[arg-type]


def test_a_backward_that_failed_cannot_be_repeated() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise MemoryError("no room")

    with Run(RECIPE) as run:
        mine = Trained(run)

        def step(step: Step) -> None:
            for x_BF, _ in step:
                try:
                    failing: Tensor = Fails.apply(mine.model(x_BF))  # type: ignore[no-untyped-call]
                    step.backward(failing.sum(), weight=len(x_BF))
                except MemoryError:
                    step.backward(mine.model(x_BF).sum(), weight=len(x_BF))

        with pytest.raises(UsageError, match=r"a step\.backward that has failed"):
            list(run.steps(DATA, step))


@pytest.mark.parametrize("micro_batch", [0, 1, 3])
def test_a_step_that_failed_leaves_no_trace(micro_batch: int) -> None:
    with Run(RECIPE) as run:
        mine = Trained(run)
        failed: list[int] = []

        def step(step: Step) -> None:
            if step.number == 2 and not failed:
                for number, (x_BF, y_BF) in enumerate(step):
                    loss = (mine.model(x_BF) - y_BF).square().sum()
                    if number == micro_batch:
                        failed.append(number)
                        raise ConnectionError("the user's own")
                    step.backward(loss, weight=len(x_BF))
            mine.step(step)

        with pytest.raises(ConnectionError):
            list(run.steps(DATA, step))
        assert run.position == 2
        for _ in run.steps(DATA, step):
            pass
        assert run.digest() == undisturbed()


def test_one_loop_at_a_time() -> None:
    with Run(RECIPE) as run:
        mine = Trained(run)
        first = run.steps(DATA, mine.step)
        next(first)
        next(iter(run.steps(DATA, mine.step)))
        with pytest.raises(UsageError, match="found step 2 taken by another one since step 1"):
            next(first)


def test_a_loop_that_was_left_goes_on_in_another() -> None:
    with Run(RECIPE) as run:
        mine = Trained(run)
        for done in run.steps(DATA, mine.step):
            if done.step == 2:
                break
        for _ in run.steps(DATA, mine.step):
            pass
        assert run.digest() == undisturbed()


class Tags:
    """Something tracked whose state becomes a set one day, which no checkpoint holds."""

    tags: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"tags": self.tags}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("never saved")


def test_a_save_that_failed_is_told_at_the_end_at_the_latest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot save tags"), Run(RECIPE, Execution(run_dir=str(tmp_path))) as run:
        tags = Tags()
        run.track(tags=tags)
        run.digest()
        tags.tags = {"a", "b"}
        run.save(wait=False)


def test_a_save_in_the_background_is_in_the_log_when_the_run_has_ended(tmp_path: Path) -> None:
    with Run(RECIPE, Execution(run_dir=str(tmp_path))) as run:
        Trained(run)
        run.save(wait=False)
    kinds = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert kinds == ["start", "checkpoint"]


def test_what_is_saved_is_known_after_a_resume_with_nothing_left(tmp_path: Path) -> None:
    saved = []
    for _ in range(2):
        with Run(RECIPE, Execution(run_dir=str(tmp_path)), resume="auto") as run:
            for _done in run.steps(DATA, Trained(run).step):
                pass
            saved.append(run.saved)
    assert saved[0] == saved[1] == tmp_path / "checkpoints" / "step-00000004"


def test_another_dataset_in_one_run_is_not_told_as_a_resume() -> None:
    with Run(RECIPE) as run:
        mine = Trained(run)
        next(iter(run.steps(DATA, mine.step)))
        with pytest.raises(CheckpointError, match=r"cannot go on with the run: .* that of the steps before"):
            next(iter(run.steps(TensorDataset(*torch.zeros(2, 32, 3)), mine.step)))


@pytest.mark.parametrize("resume", ["yes", "", 1])
def test_a_way_to_resume_that_is_none(resume: Any) -> None:
    with pytest.raises(Exception, match="never or must"):
        Run(RECIPE, resume=resume).close()


ODD: list[Any] = [
    np.array(["a", "b"]),
    np.array([{}, None], dtype=object),
    torch.eye(2).to_sparse(),
    {"x": [np.float64(1), {1, 2}, b"x", object()]},
    np.zeros((0, 3)),
]


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_odd_batches_have_a_digest(value: Any) -> None:
    assert content_digest(value) == content_digest(value)
    assert content_digest([value]) != content_digest([value, value])
