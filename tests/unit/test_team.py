"""Calls of a team open with their names: workers that have parted learn it, and values arrive as they were sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.determinism import content_digest
from paceline.errors import UsageError
from paceline.team import Team, ThreadTeam


def told(team: Team, *calls: str) -> list[str]:
    """Gathers once for each call; what each said that failed."""
    said = []
    for call in calls:
        try:
            team.gather(None, call)
        except UsageError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_workers_that_have_parted_all_learn_who_is_where(odd: int) -> None:
    def work(team: Team) -> list[str]:
        return told(team, "run.save (train.py:3)", "step 2" if team.rank == odd else "run.gather (train.py:9)")

    found = ThreadTeam.run(3, work)
    assert found[0] == found[1] == found[2]
    ((message,),) = {tuple(said) for said in found}
    there = {0: ("step 2", "run.gather (train.py:9)", 1), 1: ("run.gather (train.py:9)", "step 2", 1)}
    first, second, rank = there.get(odd, ("run.gather (train.py:9)", "step 2", 2))
    assert f"found worker 0 in {first}, worker {rank} in {second}" in message


def test_after_that_the_team_is_broken() -> None:
    def work(team: Team) -> list[str]:
        return told(team, f"call {team.rank}", "the same")

    for said in ThreadTeam.run(2, work):
        assert len(said) == 2 and said[0] == said[1]


VALUES: list[Any] = [
    torch.arange(6).view(2, 3).t(),
    torch.tensor(float("nan")),
    torch.empty(0, 3),
    torch.ones(3, dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]).conj(),
    torch.nn.Parameter(torch.ones(2)),
    {"a": [torch.zeros(1), "text", None]},
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_arrive_as_they_were_sent(value: Any) -> None:
    for theirs in ThreadTeam.run(2, lambda team: team.gather(value)):
        assert len(theirs) == 2
        for one in theirs:
            assert type(one) is type(value)
            assert content_digest(one) == content_digest(value)


def test_what_is_gathered_can_be_written_to() -> None:
    (mine, _), _ = ThreadTeam.run(2, lambda team: team.gather(torch.zeros(2)))
    mine += 1
    assert mine.tolist() == [1.0, 1.0]
