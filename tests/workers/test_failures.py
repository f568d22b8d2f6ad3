"""When a worker fails the others end within seconds, the first failure is the one that is shown, nothing is left."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import jobs
import psutil
import pytest

from paceline.config import Execution, Recipe
from pool import Outcome, Pool, WorkersFailedError

LONG = Execution(timeout_s=300)  # what is quicker than this did not wait for it
SOON_S = 20  # generous: the machine may be busy


def first_to_last(outcomes: list[Outcome]) -> list[Outcome]:
    return WorkersFailedError(outcomes).failures


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("job", ["before its first backward", "between the loop and the update"])
def test_an_exception_on_one_worker_ends_the_others_with_an_echo(pool: Pool, workers: int, job: str) -> None:
    begun = time.monotonic()
    if job == "before its first backward":
        outcomes = pool.attempt(jobs.fail_on, 1, 2, LONG, workers=workers)
    else:
        outcomes = pool.attempt(jobs.fail_after_the_exchange, 1, LONG, workers=workers)
    assert time.monotonic() - begun < SOON_S
    first, *echoes = first_to_last(outcomes)
    assert (first.rank, first.error) == (1, "ValueError")
    assert "mistake on worker 1" in first.message
    assert "train_step" in first.trace
    assert [echo.error for echo in echoes] == ["TeamError"] * (workers - 1)
    for echo in echoes:
        assert f"worker {echo.rank} lost touch" in echo.message
        assert "Look for the first worker that failed" in echo.message


@pytest.mark.parametrize(("workers", "killed"), [(2, 0), (3, 1), (4, 0)])
def test_a_killed_worker_ends_the_others(pool: Pool, workers: int, killed: int) -> None:
    begun = time.monotonic()
    outcomes = pool.attempt(jobs.fail_on, killed, 2, LONG, "kill", workers=workers)
    assert time.monotonic() - begun < SOON_S
    assert outcomes[killed].error == "died"
    assert "-9" in outcomes[killed].message
    assert {outcome.error for outcome in outcomes if outcome.rank != killed} == {"TeamError"}


def test_a_worker_that_does_not_answer_is_missed_after_the_timeout(pool: Pool) -> None:
    outcomes = pool.attempt(jobs.late_by, 8.0, Execution(timeout_s=2), workers=2)
    assert outcomes[0].error == "TeamError"
    assert "2 s" in outcomes[0].message
    assert outcomes[0].at < outcomes[1].at


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_not_a_number_in_one_lane_raises_on_every_worker(pool: Pool, workers: int) -> None:
    recipe = Recipe(batch=16, micro_batch=2, steps=5, order="sequential")
    outcomes = pool.attempt(jobs.train_poisoned, recipe, LONG, 16 + 5, workers=workers)
    assert [outcome.error for outcome in outcomes] == ["NonFiniteError"] * workers
    (message,) = {outcome.message for outcome in outcomes}
    assert "step 2" in message
    assert "lane 5" in message


def test_not_a_number_in_one_lane_is_skipped_by_every_worker(pool: Pool) -> None:
    recipe = Recipe(batch=16, micro_batch=2, steps=4, order="sequential", on_nonfinite="skip")
    (expected,) = pool.run(jobs.train_poisoned, recipe, LONG, 16 + 5, workers=1)
    assert expected["skipped"] == [2]
    for workers in (3, 8):
        assert pool.run(jobs.train_poisoned, recipe, LONG, 16 + 5, workers=workers) == [expected] * workers


def test_more_workers_than_lanes_are_refused_by_each(pool: Pool) -> None:
    recipe = Recipe(batch=8, micro_batch=2, lanes=2, steps=5)
    for outcome in pool.attempt(jobs.train_poisoned, recipe, LONG, 0, workers=3):
        assert outcome.error == "ConfigError"
        assert "lanes=2, workers=3" in outcome.message
        assert "-n 2 or fewer" in outcome.message


def test_another_number_of_workers_than_configured_is_refused(pool: Pool) -> None:
    recipe = Recipe(batch=16, micro_batch=2, steps=5)
    for outcome in pool.attempt(jobs.train_poisoned, recipe, Execution(workers=4), 0, workers=3):
        assert outcome.error == "ConfigError"
        assert "3 workers started, execution.workers=4" in outcome.message


def test_another_architecture_on_one_worker_is_named_by_its_first_parameter(pool: Pool) -> None:
    outcomes = pool.attempt(jobs.differ_in_architecture, LONG, workers=3)
    for outcome in outcomes:
        assert outcome.error == "UsageError"
        assert "1.weight: float32[4, 4] on worker 0, float32[3, 4] on worker 1" in outcome.message


def test_states_that_drifted_apart_are_found_by_the_digest(pool: Pool) -> None:
    for outcome in pool.attempt(jobs.differ_in_untracked_ways, LONG, workers=2):
        assert outcome.error == "UsageError"
        assert "the workers' states differ" in outcome.message


def test_loader_processes_die_with_a_killed_worker(pool: Pool, tmp_path: Path) -> None:
    outcomes = pool.attempt(
        jobs.die_with_loaders, str(tmp_path), 1, Execution(loader_workers=2, timeout_s=300), workers=2
    )
    assert [outcome.error for outcome in outcomes] == ["TeamError", "died"]
    pids = [int(pid) for pid in (tmp_path / "loaders").read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + SOON_S
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.02)


UNFINISHED = """
import builtins
import torch
from paceline.data.loader import Loader
from paceline.data.order import Plan

data = torch.utils.data.TensorDataset(torch.zeros(29))
plan = Plan(samples=29, batch=12, micro_batch=2, lanes=3, tail="short", order="cipher", seed=4)
loader = Loader(data, seed=0, collate=None, device=torch.device("cpu"), loader_workers=1, threads=1)
builtins.kept = loader.train(plan, range(3), range(1000))  # as a traceback would keep it, to the very end
next(builtins.kept)
"""


def test_an_unfinished_loader_does_not_hold_up_the_end_of_its_process() -> None:
    """Loader processes ignore the SIGTERM by which multiprocessing ends them, and it waits for them without end."""
    done = subprocess.run([sys.executable, "-c", UNFINISHED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# The pool itself: a harness that hides a failure is worse than none.


def test_the_pool_shows_every_traceback_the_first_failure_first(pool: Pool) -> None:
    with pytest.raises(WorkersFailedError) as caught:
        pool.run(jobs.fail_on, 1, 2, LONG, workers=3)
    text = str(caught.value)
    assert text.startswith("3 of 3 workers failed\n--- worker 1: ValueError a mistake on worker 1")
    assert text.count("--- worker") == 3
    assert text.count("train_step") >= 3


def test_the_pool_keeps_its_processes_and_replaces_those_that_failed(pool: Pool) -> None:
    before = pool.run(jobs.nothing, workers=3)
    assert pool.run(jobs.nothing, workers=3) == before
    pool.attempt(jobs.fail_on, 0, 0, LONG, "kill", workers=2)
    after = pool.run(jobs.nothing, workers=3)
    assert set(after) & set(before) == {before[2]}


def test_the_pool_ends_a_job_at_its_deadline_and_shows_where_it_was(pool: Pool) -> None:
    (outcome,) = pool.attempt(jobs.wait_for_ever, workers=1, deadline_s=1)
    assert outcome.error == "late"
    assert "wait_for_ever" in outcome.trace


def test_the_pool_fails_a_job_that_leaves_something_behind(pool: Pool) -> None:
    (outcome,) = pool.attempt(jobs.leak_a_thread, workers=1, grace_s=1.0)
    assert outcome.error == "leak"
    assert "thread forgotten" in outcome.message
