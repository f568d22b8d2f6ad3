"""Real data that is learnt: one digest for any number of workers, any interruption, and digits that are told apart."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jobs
import pytest

from paceline.config import Execution, Recipe, Resume
from paceline.parsing import parse
from paceline.tasks import Digits
from paceline.train import train
from pool import Pool

EXAMPLE = parse([str(Path(__file__).parents[2] / "examples" / "digits.yaml")])
"""Augmentation, BatchNorm, dropout, two loader workers, four lanes."""

SHORT_STEPS = 14
"""More than an epoch: the twelfth step is short."""

DEADLINE_S = 240.0
"""For a run of seconds: only what hangs runs into it."""


def learn(recipe: Recipe, execution: Execution, resume: Resume = "never") -> dict[str, Any]:
    """``train`` on the digits; on worker 0 the digest and the last scores on held-out images, to the last bit."""
    recorder = jobs.Recorder()
    task = EXAMPLE.task.make()
    assert isinstance(task, Digits)
    assert train(task, recipe, execution, resume=resume, sinks=[recorder]) == 0
    told = {event["event"]: event for event in recorder.events}
    scores = {name: float(told["evaluate"][name]).hex() for name in ("loss", "accuracy")} if told else {}
    return {"digest": told["end"]["digest"], "step": told["end"]["step"], **scores} if told else {}


def recipe_of(device: Any, steps: int | None = EXAMPLE.recipe.steps) -> Recipe:
    return dataclasses.replace(EXAMPLE.recipe, device=device, steps=steps)


def execution(run_dir: Path | None = None, **changes: Any) -> Execution:
    where = str(run_dir) if run_dir else None
    return dataclasses.replace(EXAMPLE.execution, run_dir=where, timeout_s=120, **changes)


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, device: str) -> dict[str, Any]:
    """On one worker, which loads its samples itself."""
    result: dict[str, Any]
    (result,) = pool.run(
        learn, recipe_of(device, SHORT_STEPS), execution(loader_workers=0), workers=1, deadline_s=DEADLINE_S
    )
    assert result["step"] == SHORT_STEPS
    return result


long = pytest.mark.long


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=long), pytest.param(3, marks=long), 4])
def test_digits_give_one_digest(pool: Pool, device: str, undisturbed: dict[str, Any], workers: int) -> None:
    assert EXAMPLE.execution.loader_workers == 2
    recipe = recipe_of(device, SHORT_STEPS)
    assert pool.run(learn, recipe, execution(), workers=workers, deadline_s=DEADLINE_S)[0] == undisturbed


def interrupted_twice(pool: Pool, directory: Path, recipe: Recipe, workers: tuple[int, int, int]) -> dict[str, Any]:
    """The same run on three teams, one after the other."""
    assert recipe.steps is not None
    result: dict[str, Any] = {}
    stops = (recipe.steps // 3, 2 * recipe.steps // 3, None)
    for count, stop_at, resume in zip(workers, stops, ("never", "must", "must"), strict=True):
        how = execution(directory, stop_at=stop_at)
        result = pool.run(learn, recipe, how, resume, workers=count, deadline_s=DEADLINE_S)[0]
        assert result["step"] == (stop_at or recipe.steps)
    return result


@pytest.mark.parametrize("workers", [pytest.param((4, 1, 3), marks=long), (1, 3, 2)], ids=str)
def test_interrupted_twice_and_resumed_on_other_workers(
    pool: Pool, device: str, tmp_path: Path, undisturbed: dict[str, Any], workers: tuple[int, int, int]
) -> None:
    recipe = recipe_of(device, SHORT_STEPS)
    assert interrupted_twice(pool, tmp_path, recipe, workers) == undisturbed


@pytest.fixture(scope="module")
def whole(pool: Pool, device: str) -> dict[str, Any]:
    """The whole example, on two workers as a user would run it here."""
    result: dict[str, Any] = pool.run(learn, recipe_of(device), execution(), workers=2, deadline_s=DEADLINE_S)[0]
    return result


def test_digits_are_told_apart(whole: dict[str, Any]) -> None:
    assert float.fromhex(whole["accuracy"]) >= 0.97


@long
def test_the_whole_run_may_be_interrupted_too(pool: Pool, device: str, tmp_path: Path, whole: dict[str, Any]) -> None:
    assert interrupted_twice(pool, tmp_path, recipe_of(device), (3, 1, 4)) == whole


@long
@pytest.mark.parametrize("workers", [1, 3, 4])
def test_the_whole_run_gives_one_digest(pool: Pool, device: str, whole: dict[str, Any], workers: int) -> None:
    assert pool.run(learn, recipe_of(device), execution(), workers=workers, deadline_s=DEADLINE_S)[0] == whole
