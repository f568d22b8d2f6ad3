"""Under which conditions a line is reached: what reading knows of it, and what a run makes of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.doctor.circumstances import Circumstances
from paceline.doctor.reading import read
from paceline.doctor.watching import checks_collectives, checks_replicas
from paceline.doctor.watching.records import Place, Run
from paceline.doctor.watching.sources import conditions
from told import Ranks

BEGIN = "import torch.distributed as dist\nrank = dist.get_rank()\n"

# Lines behind BEGIN, from 3 on; what is asked around the barrier, and whether that is of the rank.
WAYS: dict[str, tuple[str, list[tuple[int, str, bool]]]] = {
    "the rank": ("if rank == 0:\n    dist.barrier()", [(3, "rank == 0", True)]),
    "a name that does not say so": (
        "def first():\n    return not rank\nsolo = first()\nif solo:\n    dist.barrier()",
        [(6, "solo", True)],
    ),
    "a field": (
        "class State:\n    def __init__(self):\n        self.leads = rank < 1\n    def save(self):\n"
        "        if self.leads:\n            dist.barrier()\nState().save()",
        [(7, "self.leads", True)],
    ),
    "a name that only sounds so": ("ranking = [1]\nif ranking:\n    dist.barrier()", [(4, "ranking", False)]),
    "behind a return": (
        "def save():\n    if rank != 0:\n        return\n    dist.barrier()\nsave()",
        [(4, "not (rank != 0)", True)],
    ),
    "the other arm": ("if rank == 0:\n    pass\nelse:\n    dist.barrier()", [(3, "not (rank == 0)", True)]),
    "around the call": (
        "def meet():\n    dist.barrier()\nif rank == 0:\n    meet()",
        [(5, "rank == 0", True)],
    ),
    "two of them": (
        "if rank == 0:\n    if len(open('x').read()) > 3:\n        dist.barrier()",
        [(4, "len(open('x').read()) > 3", False), (3, "rank == 0", True)],
    ),
    "the main script": ("if __name__ == '__main__':\n    dist.barrier()", []),
    "a loop": ("while not open('x').read():\n    dist.barrier()", []),
    "behind a break": (
        "for line in open('x'):\n    if len(line) > 9:\n        break\n    dist.barrier()",
        [],
    ),
}


@pytest.mark.parametrize("case", WAYS)
def test_what_is_asked_around_a_line(case: str, tmp_path: Path) -> None:
    body, expected = WAYS[case]
    path = tmp_path / "train.py"
    path.write_text(BEGIN + body + "\n")
    lines = path.read_text().splitlines()
    way = [number for number, line in enumerate(lines, 1) if "dist.barrier()" in line]
    way += [number for number, line in enumerate(lines, 1) if line.strip() in ("meet()", "save()", "State().save()")]
    run = Run(accounts=[], circumstances=read(path).circumstances)
    asked = conditions(run, [Place(str(path), line) for line in way])
    assert [(one.line, one.text, one.of_rank) for one in asked] == expected


def test_the_way_that_was_gone_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(BEGIN + "def meet():\n    dist.barrier()\nmeet()\nif rank == 0:\n    meet()\n")
    run = Run(accounts=[], circumstances=read(path).circumstances)
    for caller, expected in ((5, []), (7, ["rank == 0"]), (9, [])):  # the last one is by a way that nobody has read
        places = [Place(str(path), line) for line in (4, caller)]
        assert [one.text for one in conditions(run, places)] == expected


@pytest.mark.parametrize("condition", ["rank == 0", "engine.isRankZero()", "ranking"])
def test_of_lines_that_reading_never_came_to_the_text_is_asked(condition: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        f"def meet():\n    if {condition}:\n        backend.barrier()\nregister('meet', globals()['meet'])\n"
    )
    run = Run(accounts=[], circumstances=read(path).circumstances)
    (asked,) = conditions(run, [Place(str(path), 3)])
    assert (asked.line, asked.text, asked.of_rank) == (2, condition, condition != "ranking")


def test_who_has_returned_before_a_barrier_is_not_told_as_another_order(ranks: Ranks) -> None:
    ranks.path.write_text(
        BEGIN
        + "def save():\n    if rank != 0:\n        return\n    dist.barrier()\nsave()\nx = dist.all_reduce(rank)\n"
    )
    ranks.tell("collective", {"op": "barrier", "syncs": 0}, None, lines=(6, 7), ranks=[0, 1])
    ranks.tell("collective", None, {"op": "all_reduce", "shape": [1]}, lines=(8,), ranks=[0, 1])
    (finding,) = ranks.found(checks_collectives.meetings_missed)
    assert (finding.id, finding.line) == ("rank-conditional-collective", 6)
    assert "`if not (rank != 0)` (line 4)" in finding.message


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks.beside(tmp_path)


AVERAGES = {
    "a parameter, behind a step": ("for p in model.parameters():\n        dist.all_reduce(p.data)", True),
    "all in one": ("dist.all_reduce(torch.nn.utils.parameters_to_vector(model.parameters()))", True),
    "gradients": ("for p in model.parameters():\n        dist.all_reduce(p.grad)", False),
    "rank 0's": ("for p in model.parameters():\n        dist.broadcast(p.data, 0)", False),
    "a loss": ("dist.all_reduce(loss)", False),
}


@pytest.mark.parametrize("case", AVERAGES)
def test_whether_weights_are_averaged_between_steps(case: str, tmp_path: Path) -> None:
    does, averages = AVERAGES[case]
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "model = torch.nn.Linear(1, 1)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for p in model.parameters():\n    dist.all_reduce(p.data)\n"
        "for step in range(9):\n    loss = model(torch.ones(1, 1)).mean()\n    loss.backward()\n"
        f"    {does}\n    optimizer.step()\n"
    )
    assert read(tmp_path / "train.py").circumstances.averages_weights is averages


@pytest.mark.parametrize("averages", [False, True])
def test_weights_that_are_averaged_may_come_apart_in_between(tmp_path: Path, averages: bool) -> None:
    ranks = Ranks.beside(tmp_path).tell("init").goes().steps(alike=[True])
    ranks.goes().steps({"values": ["b"]}, {"values": ["c"]}, alike=[True])
    run = Run(accounts=ranks.accounts, stopped="ended", circumstances=Circumstances(averages_weights=averages))
    assert [finding.id for finding in checks_replicas.replicas_diverged(run)] == ["replicas-diverged"] * (not averages)
