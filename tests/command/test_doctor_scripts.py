"""The doctor before whole training scripts in the style of public ones, right and wrong. Some of the right ones only
look wrong: they lock a file, resume into the wrapper, go backward for several losses, pad their shards by hand.

A line that a finding belongs to ends with ``# expect: id``. Where a mistake has several places that it may be told at,
each of them is marked, and one is enough.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from paceline.doctor.examine import Limits, examine
from paceline.doctor.findings import Finding

SCRIPTS = Path(__file__).resolve().parents[1] / "doctor_scripts"
RUN = {"right/resumed_pretraining.py", "wrong/accumulate.py", "wrong/engine_package"}
"""Those that are run, too, each time, of a mistake in data, in gradients and in files; the others with ``--long``."""

PATIENCE_S = 120.0
"""So long may a run take on a busy machine; none of them hangs."""


def of(kind: str) -> list[str]:
    return [f"{kind}/{path.name}" for path in sorted((SCRIPTS / kind).iterdir()) if not path.name.startswith("_")]


def entry(name: str) -> Path:
    """The file that torchrun would be given."""
    path = SCRIPTS / name
    return path if path.is_file() else next(path / main for main in ("main.py", "train.py") if (path / main).exists())


def expected(name: str) -> dict[str, set[tuple[Path, int]]]:
    """By rule the places that it may be told at."""
    places: dict[str, set[tuple[Path, int]]] = defaultdict(set)
    path = SCRIPTS / name
    for file in [path] if path.is_file() else path.glob("*.py"):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if match := re.search(r"# expect: ([\w-]+)$", line):
                places[match[1]].add((file, number))
    return dict(places)


def by_rule(findings: Iterable[Finding]) -> dict[str, set[tuple[Path, int]]]:
    """What is more than advice."""
    told: dict[str, set[tuple[Path, int]]] = defaultdict(set)
    for finding in findings:
        if finding.level != "advice":
            told[finding.id].add((Path(finding.path).resolve(), finding.line))
    return dict(told)


def scripts_to_run(names: list[str]) -> list[object]:
    return [name if name in RUN else pytest.param(name, marks=pytest.mark.long) for name in names]


def test_there_are_ten_wrong_ones_and_more_right_ones() -> None:
    right, wrong = of("right"), of("wrong")
    assert len(right) > len(wrong) == 10
    assert not any(expected(name) for name in right)
    assert all(1 <= len(expected(name)) <= 3 for name in wrong)
    assert set(right + wrong) >= RUN


@pytest.mark.parametrize("name", of("right"))
def test_reading_leaves_a_right_script_alone(name: str) -> None:
    told = examine(entry(name))
    assert told.looked
    assert by_rule(told.findings) == {}


@pytest.mark.parametrize("name", of("wrong"))
def test_reading_finds_the_mistakes_where_they_are_and_no_others(name: str) -> None:
    wanted, told = expected(name), by_rule(examine(entry(name)).findings)
    assert set(told) == set(wanted)
    assert {rule: places - wanted[rule] for rule, places in told.items() if places - wanted[rule]} == {}


@pytest.mark.parametrize("name", scripts_to_run(of("right")))
def test_running_leaves_a_right_script_alone(name: str) -> None:
    told = examine(entry(name), limits=Limits(timeout_s=PATIENCE_S))
    assert by_rule(told.findings) == {}


@pytest.mark.parametrize("name", scripts_to_run(of("wrong")))
def test_running_finds_the_mistakes_where_they_are_and_no_others(name: str) -> None:
    wanted, told = expected(name), by_rule(examine(entry(name), limits=Limits(timeout_s=PATIENCE_S)).findings)
    assert set(told) == set(wanted)
    assert {rule: places - wanted[rule] for rule, places in told.items() if places - wanted[rule]} == {}
