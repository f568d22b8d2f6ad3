"""Generations: whatever happens in whatever order, those that live meet, and nobody else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.supervisor.roster import Roster


class Crowd:
    """Workers that answer the roster as real ones do, in an order of their own."""

    def __init__(self, workers: int, rng: random.Random) -> None:
        self.roster, self._rng, self._next = Roster(range(workers)), rng, workers
        self.alive = set(range(workers))
        self.met: dict[int, tuple[int, int]] = {}  # member: generation and meeting that it was told to connect in
        self._said: list[tuple[int, str, int | None]] = [(member, "hello", None) for member in range(workers)]

    def lose(self, member: int) -> None:
        self.alive.discard(member)
        self._said = [said for said in self._said if said[0] != member]
        self.roster.gone(member, f"worker {member} was killed", now_s=1.0)

    def come(self) -> None:
        """A replacement has replayed what there was, and waits."""
        self.alive.add(self._next)
        self._said += [(self._next, "hello", None), (self._next, "wait", None)]
        self._next += 1

    def settle(self, *, steps: int | None = None) -> None:
        """Lets messages travel, all of them or some; those of one worker in their order."""
        while steps is None or steps > 0:
            outbox, self.roster.outbox = self.roster.outbox, []
            for member, kind, fields in outbox:
                if member not in self.alive:
                    continue
                if kind == "generation" and member in fields["members"]:
                    # A joining that the team has agreed on is met at the end of a step, a loss at once: at the door.
                    self._said.append((member, "ready", fields["number"]))
                elif kind == "go":
                    self.met[member] = fields["number"], fields["meeting"]
                    self._said.append((member, "met", fields["number"]))
            if not self._said:
                return
            member = self._rng.choice(sorted({said[0] for said in self._said}))
            said = next(said for said in self._said if said[0] == member)
            self._said.remove(said)
            _, kind, number = said
            if kind == "hello":
                self.roster.hello(member)
            elif kind == "wait":
                self.roster.wait(member)
            elif kind == "met" and number is not None:
                self.roster.met(member, number)
            elif number is not None:
                self.roster.ready(member, number)
            if steps is not None:
                steps -= 1


@given(
    workers=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    events=st.lists(st.sampled_from(["lose", "come", "admit", "travel"]), max_size=12),
)
def test_the_living_members_meet_in_the_newest_generation(workers: int, seed: int, events: list[str]) -> None:
    rng = random.Random(seed)
    crowd = Crowd(workers, rng)
    for event in events:
        if event == "lose" and len(crowd.alive & set(crowd.roster.generation.members)) > 1:
            crowd.lose(rng.choice(sorted(crowd.alive)))
        elif event == "come":
            crowd.come()
        elif event == "admit" and crowd.roster.formed:
            crowd.roster.admit(crowd.roster.generation.number, now_s=2.0)
        crowd.settle(steps=rng.randrange(6))
    crowd.settle()
    generation = crowd.roster.generation
    assert set(generation.members) <= crowd.alive
    assert crowd.roster.formed
    meetings = {crowd.met[member] for member in generation.members}
    assert len(meetings) == 1 and meetings.pop()[0] == generation.number


def formed(workers: int = 3) -> Roster:
    roster = Roster(range(workers))
    for member in range(workers):
        roster.hello(member)
        roster.ready(member, 0)
    for member in range(workers):
        assert not roster.formed
        roster.met(member, 0)
    assert roster.formed
    roster.outbox.clear()
    return roster


def test_survivors_keep_their_order_and_those_that_join_come_last() -> None:
    roster = formed()
    roster.gone(0, "worker 0 was killed", now_s=1.0)
    roster.hello(3)
    roster.wait(3)
    assert roster.generation.members == (1, 2) and not roster.is_member(3)
    for member in (1, 2):
        roster.ready(member, 1)
    for member in (1, 2):
        roster.met(member, 1)
    roster.admit(1, now_s=2.0)
    generation = roster.generation
    assert generation.members == (1, 2, 3) and generation.cause == "join" and generation.joined == 1


def test_nobody_connects_before_all_stand_at_the_door() -> None:
    roster = formed()
    roster.gone(2, "worker 2 was killed", now_s=1.0)
    roster.outbox.clear()
    roster.ready(0, 0)  # an answer to the generation before
    roster.ready(0, 1)
    assert roster.outbox == []
    roster.ready(1, 1)
    assert [(member, kind) for member, kind, _ in roster.outbox] == [(0, "go"), (1, "go")]


def test_a_second_loss_before_the_others_have_met_is_told_with_the_first() -> None:
    roster = formed(4)
    roster.gone(1, "worker 1 was killed", now_s=1.0)
    roster.gone(2, "worker 2 was killed", now_s=5.0)
    generation = roster.generation
    assert (generation.lost, generation.began_s) == (2, 1.0)
    assert generation.told == "worker 1 was killed; worker 2 was killed"


def test_an_end_before_the_others_have_met_does_not_hide_the_loss() -> None:
    roster = formed(3)
    roster.gone(1, "worker 1 was killed", now_s=1.0)
    roster.left(2, now_s=5.0)
    assert roster.generation.cause == "loss" and roster.generation.told == "worker 1 was killed"


@pytest.mark.parametrize("number", [0, 2])
def test_only_the_present_generation_can_admit(number: int) -> None:
    roster = formed()
    roster.gone(0, "worker 0 was killed", now_s=1.0)
    roster.admit(number, now_s=2.0)
    assert roster.generation.number == 1


def test_who_waits_and_dies_is_not_admitted() -> None:
    roster = formed()
    roster.hello(3)
    roster.wait(3)
    roster.gone(3, "worker 3 was killed", now_s=1.0)
    roster.admit(0, now_s=2.0)
    assert roster.generation.members == (0, 1, 2)


def test_those_that_come_to_their_end_leave_the_others_their_ranks_for_the_record() -> None:
    roster = formed()
    for member in (1, 0):
        roster.left(member, now_s=1.0)
    assert roster.generation.members == (2,) and roster.generation.cause == "left"
    assert roster.finishers == (0, 1, 2)


def test_members_in_different_runs_of_one_program_are_apart() -> None:
    roster = formed(2)
    assert not roster.apart and not roster.several_runs
    roster.hello(0)
    assert roster.apart and roster.several_runs
    roster.hello(1)
    assert not roster.apart


def test_an_end_before_the_others_have_met_takes_nobody_from_the_record() -> None:
    roster = formed()
    roster.gone(2, "worker 2 was killed", now_s=1.0)
    roster.left(0, now_s=2.0)
    assert roster.finishers == (0, 1)


def test_who_waits_at_several_doors_is_let_in_once() -> None:
    roster = formed()
    roster.gone(2, "worker 2 was killed", now_s=1.0)
    roster.hello(3)
    roster.wait(3)
    roster.unwait(3)
    roster.wait(3)
    roster.wait(3)
    for member in (0, 1):
        roster.ready(member, 1)
    for member in (0, 1):
        roster.met(member, 1)
    roster.admit(1, now_s=2.0)
    assert roster.generation.members == (0, 1, 3)


def test_who_is_at_the_end_of_its_run_is_not_waited_for() -> None:
    roster = formed()
    roster.bye(0)
    roster.gone(2, "worker 2 was killed", now_s=1.0)
    assert roster.generation.members == (1,) and roster.finishers == (0, 1)


def test_workers_that_lost_touch_while_one_joins_are_told_to_leave_what_they_do() -> None:
    roster = formed()
    roster.hello(3)
    roster.wait(3)
    roster.admit(0, now_s=1.0)
    roster.reform("lost touch", now_s=2.0)
    assert roster.generation.cause == "reform"
