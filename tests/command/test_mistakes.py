"""What a user can get wrong around a run, as the command line answers it: one error, the right code, nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.config import Resume
from paceline.errors import PacelineError
from paceline.parsing import parse
from paceline.train import train
from resident import Resident

PROGRAM = [sys.executable, "-m", "paceline"]
DEADLINE_S = 240.0

TASK = """
from __future__ import annotations
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from paceline.tasks import Task


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


class Small(Task):
    def __init__(self, mistake: str = "none") -> None:
        self.mistake = mistake

    def build_model(self) -> nn.Module:
        models = {"no model": lambda: None, "lazy": lambda: nn.LazyLinear(2), "complex": self._complex}
        return models.get(self.mistake, lambda: nn.Linear(4, 2))()

    def _complex(self) -> nn.Module:
        return nn.Linear(4, 2, dtype=torch.complex64)

    def train_data(self) -> Dataset:
        data = TensorDataset(torch.arange(40.0).reshape(10, 4) / 40)
        return {"no data": None, "stream": Stream()}.get(self.mistake, data)

    def valid_data(self) -> Dataset | None:
        return None if self.mistake == "nothing held out" else TensorDataset(torch.ones(3, 4))

    def loss(self, model: nn.Module, batch):
        loss = model(batch[0]).square()
        returned = {
            "one value": loss.sum(),
            "three values": (loss.sum(), 1, {}),
            "nothing": None,
            "weight below 0": (loss.sum(), -1),
            "weight nan": (loss.sum(), float("nan")),
            "weights": (loss.sum(), torch.ones(1)),
            "a number": (loss.sum().item(), 1),
            "detached": (loss.sum().detach(), 1),
        }
        return returned.get(self.mistake, (loss.sum(), len(batch[0])))
"""

CONFIG = """
task: {class_path: small_task.Small}
recipe: {batch: 2, micro_batch: 1, lanes: 2, steps: 4, device: cpu, optimizer: {weight_decay: 0.0}}
execution: {workers: 1, log_every: 1}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a user's own task and its configuration."""
    folder = tmp_path_factory.mktemp("mistakes with space")
    (folder / "small_task.py").write_text(TASK, encoding="utf-8")
    (folder / "run.yaml").write_text(CONFIG, encoding="utf-8")
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch, process_state: None) -> Path:
    """The same, as the current directory of a test that trains in this process."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    return place


def train_alone(*words: str) -> int:
    """The one worker of a run, in this process."""
    resume: Resume = "auto" if "--resume" in words else "never"
    settings = parse([word for word in words if word != "--resume"])
    try:
        return train(settings.task.make(), settings.recipe, settings.execution, resume=resume)
    except PacelineError as error:
        print(f"paceline: error: {error}", file=sys.stderr)
        return error.exit_code


MISTAKES = {
    "no model": "Small.build_model returns: found None, need a torch.nn.Module",
    "lazy": "found weight, a lazy parameter without a shape, need parameters that all workers can compare",
    "complex": "found weight, a parameter of torch.complex64, need real parameters",
    "no data": "cannot deal the samples: found None, need a map-style dataset",
    "stream": "cannot deal the samples: found an object of Stream, need a map-style dataset",
    "one value": "Small.loss returns: found an object of Tensor, need a pair",
    "three values": "Small.loss returns: found 3 values, need a pair",
    "nothing": "Small.loss returns: found None, need a pair",
    "weight below 0": "found a weight of -1.0 of lane 0, -1.0 of lane 1, need none below 0",
    "weight nan": "found a weight of nan of lane 0, nan of lane 1, need none below 0",
    "weights": "found a weight of shape (1,), need a single number",
    "a number": "found a loss of type float, need a tensor",
    "detached": "found a loss without a gradient, need a tensor",
}


@pytest.mark.parametrize(("mistake", "complaint"), MISTAKES.items(), ids=list(MISTAKES))
def test_a_task_that_cannot_be_trained_is_told_what_is_needed(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: str, complaint: str
) -> None:
    words = ["run.yaml", "--run-dir", str(tmp_path / "run"), "--task.mistake", mistake]
    assert train_alone(*words) == 1
    said = capsys.readouterr().err
    assert complaint in said and said.count("paceline: error: ") == 1


def test_the_best_needs_a_metric_that_is_measured(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run.yaml", "--run-dir", str(tmp_path / "a"), "--execution.keep_best", "los"]
    assert train_alone(*words) == 0, "a run is worth more than a name"
    assert "keep_best keeps nothing: found no metric 'los'. Did you mean 'loss'?" in capsys.readouterr().err
    words = ["run.yaml", "--run-dir", str(tmp_path / "b"), "--execution.keep_best", "loss"]
    assert train_alone(*words, "--task.mistake", "nothing held out") == 2
    assert "found keep_best='loss', and no held-out data" in capsys.readouterr().err


def test_a_damaged_result_does_not_fail_a_run_that_is_done(here: Path, tmp_path: Path) -> None:
    words = ["run.yaml", "--run-dir", str(tmp_path / "run")]
    assert train_alone(*words) == 0
    whole = json.loads((tmp_path / "run" / "result.json").read_text())
    for damage in ("", "x", "[]", "{}", '{"step": 4}'):
        (tmp_path / "run" / "result.json").write_text(damage)
        assert train_alone(*words, "--resume") == 0
        assert json.loads((tmp_path / "run" / "result.json").read_text())["digest"] == whole["digest"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--recipe.threads", "1025"], "found threads=1025, need at most 1024"),
        (["--execution.timeout_s", "1e300"], "found timeout_s=1e+300, need a number > 0, at most 1e9"),
        (["--execution.bucket_mib", "1e308"], "found bucket_mib=1e+308, need a number > 0, at most 1e9"),
    ],
)
def test_a_number_beyond_what_a_machine_takes(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert main(["train", "run.yaml", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_a_file_that_is_no_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "big.yaml").write_text("some words\n" * 200_000)
    assert main(["train", str(tmp_path / "big.yaml")]) == 2
    assert "found 2,200,000 characters, need YAML of at most 1,048,576" in capsys.readouterr().err


@pytest.mark.parametrize("output", [">&- 2>&- <&-", pytest.param("| true", marks=pytest.mark.long)])
def test_no_reader_of_the_output_is_worth_a_run(place: Path, tmp_path: Path, output: str) -> None:
    words = " ".join([*PROGRAM, "train", "run.yaml", "--run-dir", str(tmp_path / "run")])
    command = f"set -o pipefail; {words} {output}"
    ended = subprocess.run(["bash", "-c", command], cwd=place, capture_output=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert b"Traceback" not in ended.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "done"


def test_a_full_disk_behind_the_output_is_worth_no_run_either(place: Path, tmp_path: Path, resident: Resident) -> None:
    words = ["-m", "paceline", "train", "run.yaml", "--run-dir", str(tmp_path / "run")]
    err = tmp_path / "err"
    assert resident.start(words, place, os.environ, Path("/dev/full"), err).wait() == 0, err.read_text()
    assert "Traceback" not in err.read_text()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "done"


@pytest.mark.parametrize(("output", "code"), [(">&-", 0), (">/dev/full", 1)])
def test_prepare_without_a_place_to_print(tmp_path: Path, output: str, code: int) -> None:
    (tmp_path / "a.txt").write_text("some text")
    command = f"{' '.join(PROGRAM)} prepare a.txt --out out {output}"
    ended = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == code and b"Traceback" not in ended.stderr
    assert (b"cannot write the output: found No space left on device" in ended.stderr) == (code == 1)
    assert (tmp_path / "out" / "index.json").exists()


def test_names_that_the_locale_cannot_print(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    out = os.fsencode(tmp_path) + b"/\xc3\xa9\xff"
    environ = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    ended = subprocess.run(
        [*PROGRAM, "prepare", str(tmp_path / "a.txt"), "--out", out],
        env=environ,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert rb"\xe9\udcff: vocabulary 257" in ended.stdout
