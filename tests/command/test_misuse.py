"""Misuse is an error in four beats on every worker within seconds, at the user's line, and never a hang.

The mistakes are in `mistakes`. Those after whose error a team can go on are made one after the other by one command;
those that end the team, by processes of the pool; the most different ones by a command each, as a user starts it.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import mistakes
import pytest
from driving import Ended, paceline, script, torchrun

from pool import Outcome, Pool

SCRIPT = Path(mistakes.__file__)
SOON_S = 10.0
"""From the moment the script gets to its mistake, on a busy machine."""

# case -> what is found, and how to mend it.
GO_ON = {
    "no_weight": ("no weight", "Pass step.backward(loss, weight=len(batch))"),
    "no_backward": ("a micro-batch without step.backward", "Call it in every turn of the loop"),
    "no_loop": ("nothing was done with the step yet", "Call it once, behind `for batch in step`"),
    "no_update": ("the loop over the step has ended, without step.update", "Let the train step end with step.update"),
    "second_backward": ("step.backward was called already", "Add up the losses of a micro-batch"),
    "backward_before_the_loop": ("nothing was done with the step yet", "once in each turn of `for batch in step`"),
    "backward_after_the_loop": ("the loop over the step has ended", "once in each turn of `for batch in step`"),
    "backward_outside_of_the_steps": ("step.update was called already", "once in each turn of `for batch in step`"),
    "plain_backward": ("loss.backward() inside step", "Add up losses first"),
    "mean_of_rows": ("a loss of shape (2,)", "Use reduction='sum', or loss.sum()"),
    "total_in_the_loop": ("the loop over the step has not ended", "Move step.total before `for batch in step`"),
    "untracked_parameters": ("2 parameters whose gradients would be this worker's alone", "Track every module"),
    "untracked_optimizer": ("a SGD that is not tracked", "run.track(model=model, optimizer=optimizer)"),
    "untracked_scheduler": ("a StepLR that is not tracked", "schedulers likewise"),
    "sparse_gradients": ("sparse gradients of a Embedding", "Leave out sparse=True"),
    "sync_batch_norm": ("1 (SyncBatchNorm)", "Use BatchNorm, whose statistics are per lane"),
    "batch_norm_over_one": (
        "1 (BatchNorm1d) and recipe.micro_batch=1",
        "Use a larger recipe.micro_batch, or GroupNorm",
    ),
    "data_parallel": ("a DataParallel", "start one worker per GPU with `paceline launch -n N`"),
    "distributed_data_parallel": ("a DistributedDataParallel", "Track model.module"),
    "wrapped_behind_the_runs_back": ("a DistributedDataParallel around it", "Leave out the wrapper"),
    "lazy_parameters": ("weight, a lazy parameter without a shape", "Give the module its sizes"),
    "complex_parameters": ("weight, a parameter of torch.complex64", "torch.view_as_complex"),
    "nothing_tracked": ("no tracked parameter that requires a gradient", "before run.steps"),
    "no_state": ("a float", "make it a function of the step"),
    "no_function": ("one that is no function", "Write run.steps(dataset, train_step)"),
    "a_stream": ("an object of iterator", "a stream can be written to a file first"),
    "sum_of_floats": ("0.5 (float)", "Count in integers"),
    "gather_a_lock": ("lock: cannot pickle '_thread.lock' object", "Gather numbers, text, tensors"),
    "gather_after_the_end": ("a run that has ended", "Move the call before run.close()"),
    "gather_after_an_end_that_failed": ("a run that has ended", "Move the call before run.close()"),
    "no_recipe": ("batch=8, lanes=16, micro_batch=8", "Use batch=128"),
    "launch_in_a_worker": ("a process that is a worker already", "use paceline.Run here"),
    "other_architecture": (
        "1.weight: float32[2, 4] on worker 0, float32[3, 4] on worker 1",
        "without looking at the rank",
    ),
    "other_names": (
        "model, optimizer, teacher tracked on worker 0, model, optimizer on worker 1",
        "Take run.track out of",
    ),
    "other_optimizer": ("another state on worker 1 than on worker 0", "Make it without looking at the rank"),
    "other_buckets": ("in 4 buckets on worker 0", "without looking at the rank"),
    "frozen_on_one": (
        "3 trainable parameters of 14 numbers in 1 buckets on worker 0, 4 trainable",
        "Freeze and unfreeze",
    ),
    "unfrozen_on_one": (
        "4 trainable parameters of 30 numbers in 1 buckets on worker 0, 3 trainable",
        "Freeze and unfreeze",
    ),
    "other_length": ("samples: 18 on worker 0, 17 on worker 1", "Give run.steps the whole dataset"),
    "other_length_evaluated": ("18 samples on worker 0, 17 on worker 1", "Give run.evaluate the whole dataset"),
    "other_content": ("content of the first sample and some others", "Give run.steps the whole dataset"),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    """By case and rank, what two workers met that made one mistake after the other."""
    words = ["launch", "-n", "2", str(SCRIPT), ",".join(GO_ON)]
    ended = paceline(*words, cwd=tmp_path_factory.mktemp("mistakes"), anew=True).check()
    assert "Traceback" not in ended.out + ended.err
    lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    return {(line["case"], line["rank"]): line for line in lines}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", GO_ON)
def test_a_mistake_is_told_in_four_beats_at_its_line(
    told: dict[tuple[str, int], dict[str, Any]], case: str, rank: int
) -> None:
    met = told[case, rank]
    found, fix = GO_ON[case]
    assert met["error"] == ("ConfigError" if case == "no_recipe" else "UsageError"), met
    assert found in met["found"]
    assert fix in met["fix"]
    assert met["problem"] and met["needed"]
    assert met["place"].startswith(f"{SCRIPT}, line {mistakes.line_of(case, 'here')}, in ")
    assert met["seconds"] < SOON_S


# Those that end the team: where the two workers were, by call and mark of the line.
PARTED = {
    "sum_on_main": ("run.sum (here)", "step 2"),
    "evaluate_on_main": ("run.evaluate (here)", "step 2"),
    "digest_on_main": ("run.digest (here)", "run.max (there)"),
    "save_on_main": ("run.save (here)", "step 3"),
    "gather_on_main_in_the_step": ("run.gather (here)", "step 2"),
    "total_on_main": ("step.total of step 1", "step 1"),
    "steps_on_main": ("run.steps (here)", "run.gather (there)"),
    "end_of_the_block_on_main": ("the end of the run (here)", "run.gather (there)"),
    "break_then_evaluate": ("step 3", "run.evaluate (here)"),
    "break_then_steps": ("step 3", "run.steps (here)"),
}


def make(case: str, directory: Path) -> None:
    """In a process of the pool; leaves in a file when the mistake was reached, and when the error came."""
    os.chdir(directory)
    try:
        mistakes.provoke(case)
    finally:
        (directory / f"times-{os.environ['RANK']}").write_text(f"{mistakes.last_arrival()} {time.time()}")


def made(pool: Pool, case: str, directory: Path) -> list[Outcome]:
    """How the two workers ended, all soon after the mistake."""
    outcomes = pool.attempt(make, case, directory, workers=2, deadline_s=60)
    arrived, met = zip(*((directory / f"times-{rank}").read_text().split() for rank in (0, 1)), strict=True)
    assert max(map(float, met)) - max(map(float, arrived)) < SOON_S
    return outcomes


@pytest.mark.parametrize("case", PARTED)
def test_workers_that_part_are_told_where_each_is(pool: Pool, tmp_path: Path, case: str) -> None:
    first, second = (_with_lines(case, call) for call in PARTED[case])
    for outcome in made(pool, case, tmp_path):
        assert outcome.error == "UsageError", outcome.trace
        assert f"the workers have parted: found worker 0 in {first}, worker 1 in {second}, need the same calls" in (
            outcome.message
        )
        assert "Take calls of the run out of `if" in outcome.message
        assert f'File "{SCRIPT}", line ' in outcome.trace


def _with_lines(case: str, call: str) -> str:
    return re.sub(r"\((here|there)\)", lambda mark: f"({SCRIPT.name}:{mistakes.line_of(case, mark[1])})", call)


def test_recipes_with_other_lanes(pool: Pool, tmp_path: Path) -> None:
    """Which exchange messages of another length."""
    for outcome in made(pool, "other_lanes", tmp_path):
        assert outcome.error == "ConfigError", outcome.trace
        assert "found lanes=2 on worker 0, 4 on worker 1" in outcome.message
        assert f'File "{SCRIPT}", line {mistakes.line_of("other_lanes", "here")}' in outcome.trace


def test_a_loop_over_a_step_that_one_worker_leaves(pool: Pool, tmp_path: Path) -> None:
    echo, first = made(pool, "break_in_the_step", tmp_path)
    assert (echo.error, first.error) == ("TeamError", "UsageError")
    assert "found the loop over the step has not ended" in first.message
    assert f'File "{SCRIPT}", line {mistakes.line_of("break_in_the_step", "here")}' in first.trace


# As a user starts it. Per case: the exit code, what the error says, which workers it shows at the line of the mistake,
# and what those raise that catch it; an error at the very end of a script cannot be caught.
COMMANDS: dict[str, tuple[int, str, set[int], list[str]]] = {
    "plain_backward": (1, "found loss.backward() inside step", {0, 1}, ["UsageError", "UsageError"]),
    "other_recipe": (2, "found seed=0 on worker 0, 1 on worker 1", {0, 1}, ["ConfigError", "ConfigError"]),
    "other_architecture": (1, "1.weight: float32[2, 4] on worker 0", {0, 1}, ["UsageError", "UsageError"]),
    "batch_norm_over_a_tail_of_one": (1, "found BatchNorm over a single value", {0}, ["TeamError", "UsageError"]),
    "gather_on_main": (1, "worker 0 in run.gather (here), worker 1 in step 2,", {0}, ["UsageError", "UsageError"]),
    "gather_on_main_at_last": (
        1,
        "worker 0 in run.gather (here), worker 1 in the end of the run,",
        {0},
        ["UsageError"],
    ),
    "break_then_end": (1, "worker 0 in step 3, worker 1 in the end of the run,", set(), ["UsageError"]),
    "break_then_exit": (1, "worker 0 in step 3, worker 1 in the end of the run,", set(), ["UsageError"]),
}


def soon(ended: Ended) -> bool:
    return ended.time - max(float(time) for time in re.findall(r"^arrived (.+)$", ended.out, re.MULTILINE)) < SOON_S


SHORT = {"plain_backward", "batch_norm_over_a_tail_of_one", "gather_on_main_at_last", "break_then_exit"}
"""Those that run without ``--long`` too."""


@pytest.mark.parametrize(
    "case", [case if case in SHORT else pytest.param(case, marks=pytest.mark.long) for case in COMMANDS]
)
def test_a_script_with_a_mistake_ends_with_one_error_and_the_line(tmp_path: Path, case: str) -> None:
    code, says, workers, caught = COMMANDS[case]
    ended = paceline("launch", "-n", "2", str(SCRIPT), case, cwd=tmp_path).check(code)
    assert _with_lines(case, says) in ended.error
    assert soon(ended)
    for rank in workers:
        assert f"  worker {rank} at {SCRIPT}, line {mistakes.line_of(case, 'here')}, in " in ended.err
    assert sorted(re.findall(r"^met (\w+)$", ended.out, re.MULTILINE)) == caught
    echoes = caught.count("TeamError")
    assert ended.err.count("1 other worker ended because of it") == echoes  # and nobody was ended for being late


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("no_weight", "found no weight"),
        ("gather_on_main_at_last", "worker 0 in run.gather (here), worker 1 in the end"),
    ],
)
def test_under_torchrun_too(tmp_path: Path, case: str, says: str) -> None:
    """It ends the others as soon as one has failed, so that not each may come to say why."""
    ended = torchrun(2, str(SCRIPT), case, cwd=tmp_path, extra={"OMP_NUM_THREADS": "1"}).wait().check(1)
    assert soon(ended)
    told = re.findall(r"^paceline: worker [01]: error: (.+)$", ended.err, re.MULTILINE)
    assert told and all(_with_lines(case, says) in line for line in told)
    assert f"  at {SCRIPT}, line {mistakes.line_of(case, 'here')}, in " in ended.err
    before_its_own, _, _ = ended.err.partition("torch/distributed/elastic")
    assert "Traceback" not in before_its_own


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            "paceline.launch(lambda: lock, workers=2)",
            "cannot hand <lambda> to the workers: found TypeError: cannot pickle",
        ),
        (
            "paceline.launch(threading.Lock, workers=1)",
            "cannot hand back what allocate_lock returns: found lock: cannot",
        ),
        ("paceline.Run(paceline.Recipe(steps=1)).sum(0.5)", "cannot add up over workers: found 0.5 (float)"),
    ],
)
def test_a_plain_script_with_a_mistake(tmp_path: Path, call: str, says: str) -> None:
    """Without a supervisor: an error that nobody catches is told all the same, and without a traceback."""
    (tmp_path / "plain.py").write_text(f"import threading, paceline\nlock = threading.Lock()\n{call}\n")
    ended = script("plain.py", cwd=tmp_path).wait().check(1)
    assert ended.error.startswith(says)
