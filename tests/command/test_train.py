"""`paceline train` as a user runs it, on ``examples/tiny.yaml``: every road to the end leads to the same bits."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from driving import TINY, Ended, paceline, reached, result, start, torchrun, wait_for, write_tiny

from paceline.checkpoint import Store
from paceline.cli import main
from paceline.data.order import Plan
from paceline.data.tokens import Corpus
from paceline.events import read_events
from paceline.parsing import parse

OFTEN = ("--execution.checkpoint_every", "1", "--execution.log_every", "1", "--execution.evaluate_every", "null")
"""Something happens at every step, to be met by whoever interrupts."""

TASKS = '''
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline.tasks import Task


class Regression(Task):
    """64 samples, of which one is bad: its loss is NaN, or it raises."""

    def __init__(self, bad: int = 13, how: str = "nan") -> None:
        self.bad, self.how = bad, how

    def build_model(self):
        return nn.Linear(4, 1)

    def train_data(self):
        x_BF = torch.arange(256.0).reshape(64, 4).sin()
        return TensorDataset(torch.arange(64), x_BF, x_BF.sum(1, keepdim=True))

    def loss(self, model, batch):
        number_B, x_BF, y_B1 = batch
        loss = (model(x_BF) - y_B1).square().sum()
        if (number_B == self.bad).any():
            if self.how == "raise":
                print("raised at", time.time(), flush=True)
                raise RuntimeError(f"sample {self.bad} is bad")
            loss = loss * float("nan")
        return loss, len(y_B1)
'''

REGRESSION = """
task: {class_path: mine.Regression}
recipe: {batch: 16, micro_batch: 1, lanes: 8, steps: 6, order: sequential}
execution: {log_every: 1}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, device: str) -> Path:
    """A working directory: the example, and a task module of the user's own."""
    path = tmp_path_factory.mktemp("place")
    write_tiny(path, device)
    (path / "tasks").mkdir()
    (path / "tasks" / "mine.py").write_text(TASKS)
    (path / "regression.yaml").write_text(REGRESSION.replace("{batch", f"{{device: {device}, batch"))
    return path


def tiny(place: Path, run_dir: str, workers: int, *words: str) -> list[str]:
    return ["train", "tiny.yaml", "--run-dir", str(place / run_dir), "-n", str(workers), *words]


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """The run that nothing happened to, on 2 workers, in a fresh interpreter; its data is prepared on first use."""
    paceline(*tiny(place, "whole", 2), cwd=place, anew=True).check()
    return place / "whole"


@pytest.fixture(scope="module")
def digest(whole: Path) -> str:
    """The bits that every other run must end with."""
    return str(result(whole)["digest"])


def test_the_run_is_complete(whole: Path, device: str) -> None:
    told = result(whole)
    assert (told["status"], told["step"], told["steps"], told["workers"]) == ("done", 20, 20, 2)
    steps = read_events(whole / "events.jsonl", "step")
    assert [event["step"] for event in steps] == [5, 10, 15, 20]
    assert steps[-1]["loss"] < steps[0]["loss"]
    scores = [event["bits_per_byte"] for event in read_events(whole / "events.jsonl", "evaluate")]
    assert len(scores) == 2 and scores[1] < scores[0] < 8
    assert [event["step"] for event in read_events(whole / "events.jsonl", "checkpoint")] == [10, 20]
    assert len(json.loads((whole / "workers.json").read_text())["workers"]) == 2
    assert parse([str(whole / "config.yaml")]).recipe.device == device


def test_the_example_has_a_short_step_on_the_way(whole: Path, place: Path) -> None:
    settings = parse([str(TINY)])
    data = Corpus.open(place / "data" / "tiny").train(settings.task.init_args["context"])
    plan = Plan.of(settings.recipe, len(data))
    assert plan.steps_per_epoch < 20
    last = sum(len(micro) for lane in range(8) for micro in plan.lane(plan.steps_per_epoch - 1, lane))
    assert 0 < last < settings.recipe.batch


def test_torchrun_does_the_same_run(place: Path, digest: str) -> None:
    words = ("-m", "paceline", "train", "tiny.yaml", "--run-dir", str(place / "torchrun"))
    torchrun(2, *words, cwd=place).wait().check()
    told = result(place / "torchrun")
    assert (told["digest"], told["workers"], told["status"]) == (digest, 2, "done")


def test_a_stopped_run_goes_on_with_other_workers(place: Path, digest: str) -> None:
    run_dir = place / "stopped"
    paceline(*tiny(place, "stopped", 3, "--execution.stop_at", "7"), cwd=place).check()
    assert (result(run_dir)["status"], result(run_dir)["step"]) == ("stopped", 7)
    ended = paceline(*tiny(place, "stopped", 1, "--resume"), cwd=place).check()
    assert "goes on from step 7" in ended.out
    assert (result(run_dir)["status"], result(run_dir)["digest"]) == ("done", digest)


def test_a_resume_with_nothing_left_changes_nothing(place: Path, whole: Path) -> None:
    shutil.copytree(whole, place / "again")
    paceline(*tiny(place, "again", 1, "--resume"), cwd=place).check()
    assert result(place / "again") == result(whole) | {"workers": 1}
    names = [path.name for path in (place / "again" / "checkpoints").iterdir()]
    assert sorted(names) == sorted(path.name for path in (whole / "checkpoints").iterdir())


def test_signals_end_in_a_checkpoint_and_their_own_codes(place: Path, digest: str) -> None:
    run_dir = place / "signals"
    resume: tuple[str, ...] = ()
    legs = [(2, signal.SIGTERM, 3, 75, "preempted"), (1, signal.SIGINT, 10, 130, "interrupted")]
    for workers, number, step, code, status in legs:
        running = start(*tiny(place, "signals", workers, *resume, *OFTEN), cwd=place)
        wait_for(partial(reached, run_dir, step), running)
        running.process.send_signal(number)
        running.wait().check(code)
        told = result(run_dir)
        assert told["status"] == status and step <= told["step"] < 20
        resume = ("--resume", "must")
    paceline(*tiny(place, "signals", 2, *resume, *OFTEN), cwd=place).check()
    assert result(run_dir)["digest"] == digest
    starts = read_events(run_dir / "events.jsonl", "start")
    assert [event["workers"] for event in starts] == [2, 1, 2]


# kill -9


def kill_and_resume(place: Path, name: str, moments: random.Random, *, inside_a_save: bool) -> tuple[str, bool]:
    """One run, killed once and resumed on other workers; its digest, and whether a save was cut off by the kill."""
    before, after = moments.sample([1, 2, 3], 2)
    run_dir, step = place / name, moments.randrange(1, 17)
    running = start(*tiny(place, name, before, *OFTEN), cwd=place)
    wait_for(partial(reached, run_dir, step), running)
    if inside_a_save:
        wait_for(lambda: any((run_dir / "checkpoints").glob("*.tmp-*")), running)
    else:
        time.sleep(moments.uniform(0, 0.2))
    running.kill()
    assert not (run_dir / "result.json").exists(), "killed too late to show anything"
    cut_off = any((run_dir / "checkpoints").glob("*.tmp-*"))
    paceline(*tiny(place, name, after, "--resume", *OFTEN), cwd=place).check()
    assert not any((run_dir / "checkpoints").glob("*.tmp-*"))
    return str(result(run_dir)["digest"]), cut_off


def test_killed_runs_end_with_the_same_bits(request: pytest.FixtureRequest, place: Path, digest: str) -> None:
    """Half of the kills aim at a save."""
    long = request.config.getoption("--long")
    kills = 20 if long else 2
    moments = random.Random(2024)
    outcomes = [kill_and_resume(place, f"killed-{i}", moments, inside_a_save=i % 2 == 1) for i in range(kills)]
    assert [ended for ended, _ in outcomes] == [digest] * kills
    if long:
        assert sum(cut_off for _, cut_off in outcomes) >= 3, "no save was ever cut off: aim better"


# damage

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
}


def test_a_damaged_checkpoint_is_passed_over(
    request: pytest.FixtureRequest, place: Path, whole: Path, digest: str
) -> None:
    newest = whole / "checkpoints" / "step-00000020"
    assert sorted(path.name for path in newest.iterdir()) == sorted(FILES)
    kinds = [(file, damage) for file in FILES for damage in DAMAGES]
    if not request.config.getoption("--long"):
        kinds = [("optimizer.safetensors", "flipped")]
    for file, damage in kinds:
        run_dir = place / f"damaged-{file}-{damage}"
        shutil.copytree(whole, run_dir)
        DAMAGES[damage](run_dir / "checkpoints" / newest.name / file)
        ended = paceline(*tiny(place, run_dir.name, 1, "--resume"), cwd=place).check()
        assert f"passed over {newest.name}: {file}" in ended.out and "goes on from step 10" in ended.out
        assert result(run_dir)["digest"] == digest


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    """A file system of its own, too small; skips where nobody may mount one."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_is_an_error_and_costs_no_checkpoint(place: Path, digest: str) -> None:
    disk = place / "disk"
    with small_disk(disk, "2m"):
        words = [*tiny(place, "disk/run", 2, *OFTEN), "--execution.keep", "100"]
        ended = paceline(*words, cwd=place).check(1)
        assert ended.error.startswith("cannot save the checkpoint of step ")
        assert "No space left on device" in ended.error and "need" in ended.error and "Free space" in ended.error
        loaded = Store(disk / "run" / "checkpoints").load(None)
        assert loaded is not None and loaded.step >= 1 and not loaded.passed_over
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        ended = paceline(*words, "-n", "1", "--resume", "must", cwd=place).check()
        assert f"goes on from step {loaded.step}" in ended.out
        assert result(disk / "run")["digest"] == digest


# a bad sample, bad code


def regression(place: Path, run_dir: str, workers: int, *words: str) -> Ended:
    command = ["train", "regression.yaml", "--run-dir", str(place / run_dir), "-n", str(workers), *words]
    return paceline(*command, cwd=place, extra={"PYTHONPATH": str(place / "tasks")})


def test_a_nan_on_one_lane_is_an_error_of_the_whole_run(place: Path) -> None:
    ended = regression(place, "nan-raise", 2).check(1)
    assert "step 1 is not finite: found the loss of lane 5, need finite losses" in ended.error
    assert "on_nonfinite: skip" in ended.error


def test_a_nan_on_one_lane_is_skipped_by_all(place: Path) -> None:
    digests = []
    for workers in (1, 2):
        run_dir = place / f"nan-skip-{workers}"
        regression(place, run_dir.name, workers, "--recipe.on_nonfinite", "skip").check()
        skipped = [event["step"] for event in read_events(run_dir / "events.jsonl", "step") if event["skipped"]]
        assert skipped == [1, 5], "4 steps an epoch, the bad sample in the first of each"
        digests.append(result(run_dir)["digest"])
    assert digests[0] == digests[1]


def test_an_exception_in_one_worker_is_shown_once_and_ends_all(place: Path) -> None:
    ended = regression(place, "raises", 2, "--task.how", "raise").check(1)
    assert ended.err.count("Traceback (most recent call last)") == 1
    assert ended.err.count("RuntimeError: sample 13 is bad") == 1
    assert 'mine.py", line' in ended.err
    raised_at = float(ended.out.rpartition("raised at ")[2].split()[0])  # the other worker prints too
    assert ended.time - raised_at < 15, "seconds, not a timeout; this allows for a busy machine"


# refused before anything is trained


def refused(words: list[str], place: Path) -> str:
    """The error of a command that must end with code 2."""
    return paceline(*words, cwd=place).check(2).error


def refused_at_once(words: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The same for what no worker is started for: in this process, which has paid for its imports."""
    with contextlib.chdir(place):
        assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("paceline: error: ") and told.err.count("\n") == 1
    return told.err


def test_an_existing_run_is_refused_with_both_ways_out(
    place: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = result(whole)
    error = refused_at_once(tiny(place, "whole", 1), place, capsys)
    assert "--resume" in error and "--run-dir" in error
    assert result(whole) == before


def test_resume_must_needs_a_checkpoint(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused_at_once(tiny(place, "nothing", 1, "--resume", "must"), place, capsys)
    assert "no checkpoint" in error and "--resume auto" in error
    assert not (place / "nothing").exists()


def test_another_identity_is_refused_with_its_fields(place: Path, whole: Path) -> None:
    words = tiny(place, "whole", 1, "--resume", "--recipe.seed", "1", "--task.dropout", "0.2")
    config = (whole / "config.yaml").read_text()
    error = refused(words, place)
    assert "recipe.seed: 0 there, 1 here" in error and "task.init_args.dropout: 0.1 there, 0.2 here" in error
    assert "init_from" in error
    assert (whole / "config.yaml").read_text() == config


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--recipe.batch", "30"], ["batch=30", "Use batch=24 or 48"]),
        (["-n", "9"], ["lanes=8, workers=9", "Use -n 8 or fewer"]),
    ],
)
def test_a_recipe_that_cannot_be_dealt(
    place: Path, words: list[str], says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused_at_once([*tiny(place, "never", 2), *words], place, capsys)
    for part in says:
        assert part in error
    assert not (place / "never").exists()


@pytest.mark.parametrize(
    ("workers", "words", "says"),
    [
        (2, ["--task.context", "100000"], ["100000", "context"]),
        (1, ["--task.vocabulary", "300"], ["vocabulary=300, 257 in data/tiny"]),
    ],
)
def test_a_task_that_does_not_fit_its_data(
    place: Path, digest: str, workers: int, words: list[str], says: list[str]
) -> None:
    error = refused([*tiny(place, "never", workers), *words], place)
    for part in says:
        assert part in error, error
    assert not (place / "never" / "checkpoints").exists()


def test_a_run_directory_that_cannot_be_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "file").write_text("in the way")
    error = refused_at_once(tiny(place, "file/run", 1), place, capsys)
    assert "cannot use the run directory" in error and "--run-dir" in error


# what is done with a run


def test_a_new_run_starts_from_the_weights_of_another(place: Path, whole: Path) -> None:
    words = ("--recipe.init_from", str(whole), "--execution.stop_at", "1", "--execution.log_every", "1")
    paceline(*tiny(place, "from", 1, *words), cwd=place).check()
    first = read_events(place / "from" / "events.jsonl", "step")[0]
    trained = read_events(whole / "events.jsonl", "step")
    assert first["step"] == 1 and first["loss"] < trained[0]["loss"]
    assert abs(first["loss"] - trained[-1]["loss"]) < 0.5


def test_greedy_samples_are_the_same_each_time(place: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sample", str(whole), "--prompt", "def ", "--tokens", "80", "--temperature", "0"]
    first = paceline(*words, cwd=place).check().out
    with contextlib.chdir(place):
        assert main(words) == 0
    assert capsys.readouterr().out == first
    assert first.startswith("def ") and len(first) > 20
