"""What a run concludes about files and what is printed.

Each test holds a right way and the wrong one that it resembles, as the ranks would tell of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.doctor.watching import (
    checks_files,
)
from told import Ranks, ids


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks.beside(tmp_path)


@pytest.mark.parametrize(
    ("mode", "locked", "wrong"),
    [("write", False, True), ("write", True, False), ("update", False, False), ("exclusive", False, False)],
)
def test_a_file_that_is_locked_or_shared_is_not_a_save(ranks: Ranks, mode: str, locked: bool, wrong: bool) -> None:
    ranks.tell("open", path="/project/data.lock", mode=mode, own=True)
    if locked:
        ranks.tell("lock", path="/project/data.lock")
    assert ids(ranks.found(checks_files.other_files_on_all_ranks)) == ["save-on-all-ranks"] * wrong


@pytest.mark.parametrize(("lost", "whole", "wrong"), [(False, True, False), (True, False, True), (True, True, True)])
def test_a_wrappers_keys_are_wrong_for_a_plain_model_only(ranks: Ranks, lost: bool, whole: bool, wrong: bool) -> None:
    ranks.tell("save", lines=(3,), path="/project/last.pt", prefixed=True)
    ranks.tell("load-state", lines=(4,), ddp=None if lost else 0, lost=lost, whole=whole)
    found = ranks.found(checks_files.module_prefix_checkpoint)
    assert [(finding.id, finding.line) for finding in found] == [("module-prefix-checkpoint", 3)] * wrong


def test_a_wrappers_keys_that_nobody_loads_are_no_mistake_of_this_run(ranks: Ranks) -> None:
    ranks.tell("save", path="/project/last.pt", prefixed=True)
    assert ranks.found(checks_files.module_prefix_checkpoint) == []


def test_what_prints_for_others_is_told_where_they_ask_for_it(ranks: Ranks) -> None:
    """A print that was put in place of Python's own hands on what it was given."""
    ranks.path.write_text(
        "def print(*args, **kwargs):\n    builtin_print(*args, **kwargs)\nprint('loss')\nprint('done')\n"
    )
    for line in (3, 3, 4, 4):
        ranks.tell("print", lines=(2, line), text="loss")
    assert [finding.line for finding in ranks.found(checks_files.print_on_all_ranks)] == [3, 4]


@pytest.mark.parametrize(("line", "wrong"), [("print(loss)", True), ("print(f'cuda:{i} is there')", False)])
def test_a_line_that_tells_whose_it_is_may_come_from_every_rank(ranks: Ranks, line: str, wrong: bool) -> None:
    ranks.path.write_text(f"{line}\n")
    ranks.tell("print", text="1.0").tell("print", text="0.9")
    assert ids(ranks.found(checks_files.print_on_all_ranks)) == ["print-on-all-ranks"] * wrong


@pytest.mark.parametrize(
    ("load_first", "load_syncs", "save_syncs", "wrong"),
    [(True, 1, 9, False), (False, 9, 9, True), (False, 8, 9, True), (False, 10, 9, False), (True, 9, 9, True)],
    ids=["a state to resume from", "not met since", "behind", "met since", "at the same time"],
)
def test_who_loads_before_a_save_that_comes_much_later(
    ranks: Ranks, load_first: bool, load_syncs: int, save_syncs: int, wrong: bool
) -> None:
    for kind in ("load", "save") if load_first else ("save", "load"):
        only_zero: tuple[dict[str, Any] | None, ...] = ({"prefixed": False}, None)
        if kind == "save":
            ranks.tell("save", *only_zero, syncs=save_syncs, path="/project/last.pt")
        else:
            ranks.tell("load", syncs=load_syncs, path="/project/last.pt", mapped=True)
    assert ids(ranks.found(checks_files.load_without_barrier)) == ["load-without-barrier"] * wrong


@pytest.mark.parametrize(("of_a_model", "level"), [(True, "warning"), (False, "advice")])
def test_a_load_without_a_device_matters_for_what_a_model_gets(ranks: Ranks, of_a_model: bool, level: str) -> None:
    ranks.tell("asks", what="gpus", value=False).tell("load", path="/project/x.pt", mapped=False)
    if of_a_model:
        ranks.tell("load-state", ddp=0, lost=False, whole=True)
    assert [finding.level for finding in ranks.found(checks_files.load_without_map_location)] == [level]
