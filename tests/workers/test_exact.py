"""One digest for any number of workers, any execution, any interruption: dropout, BatchNorm and augmentation on."""

from __future__ import annotations

import dataclasses
import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest

from paceline import launch
from paceline.config import Execution, Optimizer, Recipe, Schedule
from paceline.faults import Faults
from pool import Pool

WORKERS = [1, 2, 3, 4, 8]
FEW = [3]
"""For what is a variation of what all are tried with."""
QUIET = Execution(evaluate_every=2, log_every=1, timeout_s=60)


def recipe_of(device: str = "cpu", **changes: Any) -> Recipe:
    """Over 69 samples: 32, 32 and, in the short last step of an epoch, 5 for 8 lanes."""
    settings: dict[str, Any] = {"batch": 32, "micro_batch": 2, "lanes": 8, "epochs": 2, "device": device}
    settings |= {"optimizer": Optimizer(lr=0.01), "schedule": Schedule(warmup=1)}
    return Recipe(**settings | changes)


def execution(run_dir: Path | None = None, **changes: Any) -> Execution:
    return dataclasses.replace(QUIET, run_dir=str(run_dir) if run_dir else None, **changes)


def assert_same(results: list[Any], expected: dict[str, Any]) -> None:
    assert results[0] | {"kinds": None} == expected | {"kinds": None}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A headerless file of uint16 tokens: 53 samples of 8."""
    path = tmp_path_factory.mktemp("tokens") / "some.bin"
    np.random.default_rng(0).integers(0, 40, 8 * 53 + 1).astype("<u2").tofile(path)
    return str(path)


VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "pad": {"tail": "pad", "order": "permutation"},
    "skip": {"skip_loss_above": 1.62, "max_norm": 0.1},
    "sequential": {"order": "sequential", "tail": "drop", "batch": 16, "micro_batch": 2, "max_norm": None},
    "sgd": {"optimizer": Optimizer(class_path="SGD", lr=0.1, weight_decay=None, init_args={"momentum": 0.9})},
    "lanes": {"lanes": 12, "batch": 24},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_number_of_workers_gives_one_digest(
    pool: Pool, device: str, variant: str, request: pytest.FixtureRequest
) -> None:
    recipe = recipe_of(device, **VARIANTS[variant])
    (expected,) = pool.run(jobs.classify, recipe, execution(), workers=1)
    assert expected["digest"]
    assert len(expected["losses"]) == expected["step"]
    all_counts = variant == "fp32" or (variant == "bf16" and request.config.getoption("--long"))
    for workers in WORKERS[1:] if all_counts else [3, 5] if variant == "lanes" else FEW:
        assert_same(pool.run(jobs.classify, recipe, execution(), workers=workers), expected)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])  # minutes of compiling
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_language_model_gives_one_digest(
    pool: Pool, device: str, tokens: str, precision: str, compiled: bool, request: pytest.FixtureRequest
) -> None:
    # 53 samples: 21 in the last step of an epoch, so that workers meet micro-batches of 1 and of 2 in other orders.
    recipe = recipe_of(device, precision=precision, compile=compiled, batch=32, micro_batch=2)
    (expected,) = pool.run(jobs.language, tokens, recipe, execution(), workers=1, deadline_s=600)
    assert expected["step"] == 4
    assert len(set(expected["losses"].values())) == 4
    for workers in WORKERS[1:] if precision == "fp32" or request.config.getoption("--long") else FEW:
        results = pool.run(jobs.language, tokens, recipe, execution(), workers=workers, deadline_s=600)
        assert_same(results, expected)


def test_other_recipes_give_other_bits(pool: Pool, device: str) -> None:
    """A digest that never changed would prove nothing."""
    recipes = [recipe_of(device, **changes) for changes in VARIANTS.values()]
    recipes += [recipe_of(device, seed=1), recipe_of(device, lanes=4), recipe_of(device, optimizer=Optimizer(lr=0.011))]
    digests = [pool.run(jobs.classify, recipe, execution(), workers=1)[0]["digest"] for recipe in recipes]
    assert len(set(digests)) == len(recipes)
    without = pool.run(_without_dropout, recipe_of(device), execution(), workers=1)[0]["digest"]
    assert without not in digests


def _without_dropout(recipe: Recipe, how: Execution) -> dict[str, Any]:
    return jobs.classify(recipe, how, dropout=0.0)


def test_a_loop_of_ones_own(pool: Pool, device: str) -> None:
    """Other initial weights on every worker, noise on the gradients, an evaluation after each step, 2 loaders."""
    recipe = recipe_of(device, steps=5, epochs=None)
    (expected,) = pool.run(jobs.own_loop, recipe, execution(), workers=1)
    for workers, loader_workers in [(2, 2), (3, 0), (8, 0)]:
        for result in pool.run(jobs.own_loop, recipe, execution(loader_workers=loader_workers), workers=workers):
            assert result == expected


# Every field of Execution in turn: name -> how to run with a value other than the default.

Runner = Callable[[Pool, Path, Recipe], list[Any]]


def with_(workers: int = 2, **changes: Any) -> Runner:
    def run(pool: Pool, directory: Path, recipe: Recipe) -> list[Any]:
        default = Execution(run_dir=str(directory / "run"))
        return pool.run(jobs.classify, recipe, dataclasses.replace(default, **changes), workers=workers)

    return run


def stopped_and_resumed(pool: Pool, directory: Path, recipe: Recipe) -> list[Any]:
    (first, *_) = with_(stop_at=4)(pool, directory, recipe)
    assert (first["step"], first["code"]) == (4, 0)
    resumed = Execution(run_dir=str(directory / "run"))
    return pool.run(jobs.classify, recipe, resumed, "must", workers=2)


def elsewhere(pool: Pool, directory: Path, recipe: Recipe) -> list[Any]:
    results = pool.run(jobs.classify, recipe, Execution(run_dir=None), workers=2)
    assert not list(directory.iterdir())
    return results


def lost(faults: str, **how: Any) -> Runner:
    """Three workers under the supervisor, of which some are lost."""

    def run(_: Pool, folder: Path, recipe: Recipe) -> list[dict[str, Any]]:
        results = launch(jobs.classify, recipe, execution(folder, faults=faults, **how), workers=3)
        assert not Faults.parse(faults).unfired(folder / "faults")
        return results

    return run


EXECUTIONS: dict[str, Runner] = {
    "workers": with_(workers=3),
    "loader_workers": with_(loader_workers=2),
    "checkpoint_every": with_(checkpoint_every=1),
    "async_checkpoint": with_(async_checkpoint=False, checkpoint_every=2),
    "keep": with_(keep=1, checkpoint_every=1),
    "keep_best": with_(keep_best="loss", checkpoint_every=1, evaluate_every=1),
    "evaluate_every": with_(evaluate_every=1),
    "log_every": with_(log_every=1),
    "digest_every": with_(digest_every=1),
    "bucket_mib": with_(bucket_mib=0.0001),
    "overlap": with_(overlap=False, bucket_mib=0.0001),
    "stop_at": stopped_and_resumed,
    "run_dir": elsewhere,
    "tensorboard": with_(tensorboard=True),
    "on_loss": lost("kill worker=1 step=2", on_loss="shrink"),
    "hang_after_s": lost("hang worker=1 step=2", hang_after_s=1.0),
    "recompute": with_(recompute={"layers.*": "selective"}),
    "memory": with_(memory="4GiB", recompute="auto"),
    "faults": lost("kill worker=0 step=2; kill worker=1 step=4"),
    "timeout_s": with_(timeout_s=45.0),
}


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, device: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results = with_()(pool, tmp_path_factory.mktemp("default"), recipe_of(device))
    result: dict[str, Any] = results[0]
    return result


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Execution)])
def test_no_field_of_execution_moves_a_bit(
    pool: Pool, device: str, tmp_path: Path, undisturbed: dict[str, Any], field: str
) -> None:
    result = EXECUTIONS[field](pool, tmp_path, recipe_of(device))[0]
    for key in ("digest", "step"):
        assert result[key] == undisturbed[key]
    last = max(undisturbed["losses"])
    assert result["losses"][last] == undisturbed["losses"][last]
    assert result["held out"][last] == undisturbed["held out"][last]


@pytest.mark.parametrize("chain", [(8, 1, 3), (1, 4, 2)], ids=str)
def test_stopped_twice_and_resumed_on_other_workers(
    pool: Pool, device: str, tmp_path: Path, undisturbed: dict[str, Any], chain: tuple[int, ...]
) -> None:
    for workers, stop_at, resume in zip(chain, (2, 4, None), ("never", "must", "must"), strict=True):
        how = execution(tmp_path, stop_at=stop_at)
        result = pool.run(jobs.classify, recipe_of(device), how, resume, workers=workers)[0]
        assert result["step"] == (stop_at or undisturbed["step"])
    assert result["digest"] == undisturbed["digest"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_to_one_worker_stops_all_after_that_step_with_a_checkpoint(
    pool: Pool, device: str, tmp_path: Path, number: int, code: int
) -> None:
    recipe = recipe_of(device, batch=16, micro_batch=2, epochs=None, steps=8)
    results = pool.run(jobs.stop_by_signal, number, 3, 1, recipe, execution(tmp_path), workers=2)
    assert {result["code"] for result in results} == {code}
    assert results[0]["step"] in (4, 5)  # the signal is told with the step at work, or with the next
    (expected,) = pool.run(jobs.classify, recipe, execution(), workers=1)
    resumed = pool.run(jobs.classify, recipe, execution(tmp_path), "must", workers=3)
    assert resumed[0]["digest"] == expected["digest"]


@pytest.mark.parametrize("compress", ["none", "bf16"])
def test_allreduce_is_close_and_promises_no_bits(pool: Pool, device: str, compress: str) -> None:
    exact = pool.run(jobs.classify, recipe_of(device), execution(), workers=2)[0]
    last = {}
    for workers in (1, 2, 3):
        recipe = recipe_of(device, gradients="allreduce", compress=compress)
        last[workers] = pool.run(jobs.classify, recipe, execution(), workers=workers)[0]
    for one, other in itertools.pairwise([exact, *last.values()]):
        for step, loss in one["losses"].items():
            assert float.fromhex(loss) == pytest.approx(float.fromhex(other["losses"][step]), rel=1e-3)
