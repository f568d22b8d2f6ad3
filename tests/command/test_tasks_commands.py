"""The tasks that come with Paceline, trained by command from their examples: to the end, resumed, mistaken."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from driving import TINY, paceline, result, write_tiny
from safetensors.torch import load_file

from paceline.events import read_events
from paceline.parsing import parse

EXAMPLES = ["causal_lm.yaml", "digits.yaml", "tabular.yaml"]
STEPS = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("place")
    for name in EXAMPLES:
        shutil.copy(TINY.parent / name, path)
    return path


@pytest.mark.parametrize(
    "name", [name if name == "tabular.yaml" else pytest.param(name, marks=pytest.mark.long) for name in EXAMPLES]
)
def test_an_example_is_trained_and_resumed(
    place: Path, device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = place / "runs" / Path(name).stem
    words = ["train", name, "--recipe.steps", str(STEPS), "--recipe.device", device]
    words += ["--execution.checkpoint_every", str(STEPS // 2)]
    paceline(*words, "-n", "2", cwd=place).check()
    whole = result(run_dir)
    assert (whole["status"], whole["step"], whole["workers"]) == ("done", STEPS, 2)
    shutil.rmtree(checkpoint(run_dir, STEPS))
    paceline(*words, "-n", "1", "--resume", "must", cwd=place).check()
    resumed = result(run_dir)
    assert (resumed["digest"], resumed["step"], resumed["workers"]) == (whole["digest"], STEPS, 1)
    first, again = read_events(run_dir / "events.jsonl", "evaluate")
    wanted = {"causal_lm.yaml": "bits_per_byte", "digits.yaml": "accuracy", "tabular.yaml": "r2"}[name]
    assert first[wanted] == again[wanted]

    monkeypatch.chdir(place)  # where the configuration's paths begin
    model = parse([str(run_dir / "config.yaml")]).task.make().build_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(load_file(checkpoint(run_dir, STEPS) / "model.safetensors"), strict=True)
    assert any(not torch.equal(value, before[key]) for key, value in model.state_dict().items())


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def test_a_table_of_ones_own(place: Path, device: str) -> None:
    rows = "".join(f"{number},{number % 7},{3 * number - 2 * (number % 7) + 5}\n" for number in range(200))
    (place / "mine.csv").write_text(f"a,b,y\n{rows}")
    words = ["-n", "1", "--task.data", "mine.csv", "--task.target", "y", "--task.layers", "0"]
    words += ["--recipe.optimizer.lr", "0.05", "--recipe.device", device, "--run-dir", "mine"]
    paceline("train", "tabular.yaml", *words, cwd=place).check()
    assert read_events(place / "mine" / "events.jsonl", "evaluate")[-1]["r2"] > 0.99
    (place / "mine.csv").write_text(f"a,b,y\n{rows}".replace("\n7,0,26\n", "\n7,zero,26\n"))
    told = paceline("train", "tabular.yaml", *words[:-1], "other", cwd=place).check(2).error
    assert told.startswith("cannot use the column 'b' of mine.csv, line 9: found 'zero', need a finite number. ")


MISTAKES: dict[str, tuple[list[str], str]] = {
    "an argument": (["digits.yaml", "--task.dropout", "2"], "found dropout=2.0, need a probability"),
    "a model": (["causal_lm.yaml", "--task.model_type", "lama"], r"need one of the .* Did you mean 'llama'\?"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_from_any_number_of_workers(place: Path, mistake: str) -> None:
    words, message = MISTAKES[mistake]
    told = paceline("train", *words, "-n", "2", "--run-dir", f"runs/{mistake}", cwd=place).check(2).error
    assert re.search(message, told)


def test_a_language_model_imports_nothing_of_the_other_tasks(tmp_path: Path, device: str) -> None:
    config = write_tiny(tmp_path, device)
    words = ["train", config.name, "-n", "1", "--recipe.steps", "1"]
    ended = paceline(*words, cwd=tmp_path, extra={"PYTHONPROFILEIMPORTTIME": "1"}, anew=True).check()
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", ended.err, re.MULTILINE))
    assert imported >= {"torch", "paceline.tasks.causal_lm", "paceline.loop"}
    assert not imported & {"sklearn", "transformers", "scipy", "pandas"}
