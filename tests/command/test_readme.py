"""What the README shows is what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.parsing import parse

README = Path(__file__).resolve().parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.usefixtures("process_state")
def test_the_loop_trains(capsys: pytest.CaptureFixture[str]) -> None:
    (loop,) = blocks("python")
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2560, 4, generator=generator), torch.randint(2, (2560,), generator=generator)
    data = TensorDataset(x, y)
    names: dict[str, Any] = {"Net": lambda: nn.Linear(4, 2), "dataset": data, "test_set": data}
    exec(compile(loop, str(README), "exec"), names)
    assert re.fullmatch(r"100: 0\.\d{4}\n\{'accuracy': 0\.\d+\}\n", capsys.readouterr().out)
    assert names["run"].position == 120  # 3 epochs of 40 steps


def test_every_program_of_the_building_blocks_is_there_and_told() -> None:
    text = README.read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `(\w+\.py)` \|", text, re.MULTILINE))
    there = {path.name for path in README.with_name("examples").glob("*.py")} - {
        "__init__.py",
        "demo.py",
        "plain_ddp.py",
    }
    assert told == there


def test_the_configuration_is_one(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    (tmp_path / "run.yaml").write_text(text)
    settings = parse([str(tmp_path / "run.yaml")])
    assert settings.recipe.steps == 200 and settings.task.init_args["width"] == 256
