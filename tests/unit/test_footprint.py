"""What a worker holds besides activations: as much as the real thing does; and the sheet and grid made of it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config import Execution, Optimizer, Recipe
from paceline.errors import ConfigError
from paceline.lanes import check_batch, lanes_of
from paceline.memory.live import shapes_only
from paceline.memory.plan import BlockCost, Level, Option
from paceline.memory.profile import Profile
from paceline.planning.candidates import Candidate, candidates
from paceline.planning.footprint import Footprint, gradient_sets, inbox_elements
from paceline.planning.grid import between, cell
from paceline.planning.outlook import Outlook
from paceline.planning.sheet import lines, worst
from paceline.planning.state import footprint, state_of, storage_bytes
from paceline.reduction.buckets import LaneSums, assign
from paceline.reduction.exchange import GRAIN, Exchange
from paceline.reduction.tree import Node, fold
from paceline.sizes import parse_size, show_size
from paceline.team import Team, ThreadTeam

SIZES = [(lanes, workers) for lanes in (1, 2, 3, 5, 8, 12) for workers in range(1, lanes + 1)]


class Counting(LaneSums):
    """Counts the sets that it makes."""

    made = 0

    def __init__(self, lanes: int) -> None:
        parameters = [nn.Parameter(torch.zeros(3))]
        super().__init__(parameters, assign(parameters, 1), lanes)
        new = self._new

        def counted() -> Any:
            self.made += 1
            return new()

        self._new = counted


@pytest.mark.parametrize(("lanes", "workers"), SIZES)
def test_as_many_sets_of_gradients_as_lane_sums_makes(lanes: int, workers: int) -> None:
    most = 0
    for rank in range(workers):
        sums = Counting(lanes)
        for _ in range(2):  # the second step makes no more
            sums.reset()
            for lane in lanes_of(rank, workers, lanes):
                sums.begin(lane)
        most = max(most, sums.made)
    assert gradient_sets(lanes=lanes, workers=workers) == most


@pytest.mark.parametrize(("lanes", "workers"), [(2, 2), (8, 3), (5, 4)])
def test_the_inbox_is_as_large_as_the_exchange_makes_it(lanes: int, workers: int) -> None:
    sizes = [1000, 16]

    def work(team: Team) -> int:
        exchange = Exchange(team, lanes, "exact")
        nodes: list[tuple[Node, None]] = [((lane, lane + 1), None) for lane in lanes_of(team.rank, workers, lanes)]
        for size in sizes:
            parts = [(node, torch.ones(size)) for node, _ in fold(lanes, nodes, lambda left, right: None)]
            team.submit(functools.partial(exchange.reduce, parts, parts[0][1], torch.tensor(1.0))).wait()
        team.submit(exchange.finish).wait()
        return sum(inbox.numel() for inbox in exchange._inbox.values())

    largest = max(ThreadTeam.run(workers, work))
    assert inbox_elements(sizes, lanes=lanes, workers=workers, grain=GRAIN) == largest


def made_state(**optimizer: Any) -> tuple[Any, nn.Module]:
    recipe = Recipe(steps=1, optimizer=Optimizer(**optimizer))
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 32))
    model[2].weight.requires_grad_(False)
    with shapes_only(model):
        return state_of(model, recipe, Execution()), model


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        ({"class_path": "AdamW"}, 2),
        ({"class_path": "AdamW", "fused": False}, 2),
        ({"class_path": "SGD"}, 0),
        ({"class_path": "SGD", "init_args": {"momentum": 0.9}}, 1),
        ({"class_path": "Adagrad", "weight_decay": None}, 1),
    ],
)
def test_the_optimizers_state_is_that_of_a_real_step(optimizer: dict[str, Any], copies: int) -> None:
    from paceline.determinism import flatten_state
    from paceline.optim import build_optimizer

    state, model = made_state(**optimizer)
    real = build_optimizer(model, Optimizer(**optimizer))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    real.step()
    assert state.optimizer == storage_bytes([tensor for _, tensor in flatten_state(real.state_dict())])
    assert state.optimizer // (4 * state.trained) == copies
    assert state.unknown is None


def test_an_optimizer_that_reads_numbers_is_counted_as_far_as_it_goes() -> None:
    state, _ = made_state(class_path="Adafactor")
    assert state.optimizer > 0
    assert state.unknown is not None


def test_parameters_count_once_and_frozen_ones_have_no_gradient() -> None:
    state, model = made_state()
    assert state.count == sum(parameter.numel() for parameter in model.parameters())
    assert state.count - state.trained == 64 * 32
    assert state.buckets == {4: [32 + 64 + 64 + 64 + 64 * 64]}
    tied = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    tied[1].weight = tied[0].weight
    with shapes_only(tied):
        assert state_of(tied, Recipe(steps=1), Execution()).parameters == 8 * 8 * 4


def of_run(**changes: Any) -> Footprint:
    state, _ = made_state()
    recipe = Recipe(**{"steps": 100, "device": "cpu"} | changes.pop("recipe", {}))
    execution = Execution(**changes.pop("execution", {}))
    arguments = {"lanes": 8, "workers": 2, "process": 0, "batch": 0} | changes
    return footprint(state, recipe, execution, **arguments)


def test_the_checkpoints_copy_is_there_in_backward_only_if_steps_follow_a_save() -> None:
    assert not of_run(execution={"checkpoint_every": 100}).copy_stays
    assert of_run(execution={"checkpoint_every": 99}).copy_stays
    assert not of_run(execution={"checkpoint_every": 99, "stop_at": 50}).copy_stays
    assert not of_run(execution={"checkpoint_every": 99, "async_checkpoint": False}).copy_stays
    assert of_run(recipe={"device": "cuda"}).copy == 0  # it lies in the host's memory
    assert of_run().copy > of_run().optimizer


def test_one_worker_exchanges_nothing_and_one_lane_sums_nothing() -> None:
    assert of_run(workers=1).exchange == 0
    assert of_run(workers=2).exchange > 0
    assert of_run(lanes=2, workers=2).lane_sums == 0
    assert of_run(lanes=8, workers=1).lane_sums == 3 * of_run().gradients


def costs(micro_batch: int, *, blocks: int = 3, fixed: int = 10) -> Profile:
    """Costs with a kink: a gradient of constant size outweighs the activations of small micro-batches."""

    def options(n: int) -> tuple[Option, ...]:
        return (
            Option(level="keep", held=9 * n, backward=max(200, 12 * n)),
            Option(level="selective", held=4 * n, backward=max(200, 13 * n), seconds=0.5 * n),
            Option(level="full", held=n, backward=max(200, 13 * n), seconds=1.0 * n),
        )

    return Profile(
        fixed=fixed,
        blocks=tuple(BlockCost(name=f"blocks.{at}", options=options(micro_batch)) for at in range(blocks)),
        loss=5 * micro_batch,
        seconds=9.0 * micro_batch,
    )


def test_between_two_sizes_costs_are_never_too_low_and_exact_where_looked_at() -> None:
    looked_at = {size: costs(size) for size in (64, 1, 8)}
    for size in range(1, 65):
        found, true = between(looked_at, size), costs(size)
        for there, real in zip(found.blocks, true.blocks, strict=True):
            for mine, theirs in zip(there.options, real.options, strict=True):
                assert mine.held >= theirs.held
                assert mine.backward >= theirs.backward
                assert mine.seconds == pytest.approx(theirs.seconds)
        assert found.loss == true.loss
        if size in (1, 8, 64):
            assert found == true


NOTHING = Footprint(
    process=1,
    parameters=2,
    buffers=3,
    gradients=4,
    lane_sums=5,
    optimizer=6,
    optimizer_work=7,
    exchange=8,
    inputs=9,
    copy=10,
    copy_stays=True,
)


@pytest.mark.parametrize("level", ["keep", "selective", "full"])
@pytest.mark.parametrize("blocks", [0, 1, 5])
@pytest.mark.parametrize("changes", [{}, {"copy_stays": False}, {"optimizer_work": 10**6}, {"copy": 10**6}])
def test_the_lines_that_are_counted_add_up_to_the_peak(level: Level, blocks: int, changes: dict[str, Any]) -> None:
    there, needed = dataclasses.replace(NOTHING, **changes), costs(4, blocks=blocks)
    found = cell(needed, there, {block.name: level for block in needed.blocks}, budget=0)
    assert found is not None
    assert sum(line.size for line in lines(there, needed, found, {}) if line.counted) == found.peak


def test_the_worst_moment_lies_behind_the_last_block_or_in_the_backward_of_one() -> None:
    needed = costs(1, blocks=2)
    keep: dict[str, Level] = {"blocks.0": "keep", "blocks.1": "keep"}
    block, held = worst(needed.blocks, keep, loss=5)
    assert (block and block.name, held) == ("blocks.1", 9)
    assert worst(needed.blocks, keep, loss=1000) == (None, 18)


def test_auto_fits_at_the_least_cost_and_else_needs_the_least() -> None:
    needed = costs(100)
    none, everything = (cell(needed, NOTHING, dict.fromkeys(names(needed), level), 0) for level in ("keep", "full"))
    assert none is not None and everything is not None
    plenty, tight = (cell(needed, NOTHING, "auto", budget) for budget in (none.peak, none.peak - 1))
    assert plenty is not None and tight is not None
    assert plenty.levels == none.levels and plenty.slower == 1
    assert tight.peak < none.peak and 1 < tight.slower < everything.slower == pytest.approx(1 + 3 / 9)
    nothing = cell(needed, NOTHING, "auto", budget=0)
    assert nothing is not None and nothing.peak <= everything.peak


def names(needed: Profile) -> list[str]:
    return [block.name for block in needed.blocks]


def test_a_gpu_has_room_for_gaps_too() -> None:
    needed = costs(100)
    keep: dict[str, Level] = dict.fromkeys(names(needed), "keep")
    found = cell(needed, NOTHING, keep, budget=0)
    assert found is not None
    assert found.peak == NOTHING.during_backward + found.activations + found.gaps
    assert found.gaps == pytest.approx(found.activations / 10, abs=1)
    for budget in range(found.peak - 50, found.peak + 50):  # what auto takes for fitting does
        chosen = cell(needed, NOTHING, "auto", budget)
        assert chosen is not None and chosen.peak <= budget


def test_sizes_that_have_other_levels_share_those_that_both_have() -> None:
    keep = (Option(level="keep", held=1, backward=1),)
    few = dataclasses.replace(costs(1), blocks=tuple(BlockCost(name=name, options=keep) for name in names(costs(1))))
    assert [len(block.options) for block in between({1: few, 8: costs(8)}, 4).blocks] == [1, 1, 1]
    assert [len(block.options) for block in between({1: costs(1), 8: few}, 4).blocks] == [1, 1, 1]


def test_a_level_that_a_block_cannot_have_is_no_cell() -> None:
    keep = (Option(level="keep", held=1, backward=1),)
    needed = dataclasses.replace(costs(1), blocks=(BlockCost(name="a", options=keep),))
    assert cell(needed, NOTHING, {"a": "selective"}, budget=100) is None


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("micro_batch", "batch", "lanes"), [(3, 24, 8), (8, 64, 8), (5, 60, 4), (1, 7, 7)])
def test_every_candidate_is_a_recipe_that_can_be_run(micro_batch: int, batch: int, lanes: int, workers: int) -> None:
    now = Candidate(micro_batch=micro_batch, batch=batch, lanes=lanes)
    choices = candidates(now, workers=workers, most=4 * batch)
    assert now in choices
    assert len({choice.micro_batch for choice in choices}) == len(choices)
    for choice in choices:
        check_batch(choice.batch, choice.micro_batch, choice.lanes)
        assert workers <= choice.lanes <= lanes
        assert choice.batch >= batch


def test_the_largest_that_fits_does_and_the_next_does_not() -> None:
    looked_at = {size: costs(size) for size in (8, 1, 512)}
    outlook = Outlook(
        now=Candidate(micro_batch=8, batch=64, lanes=8),
        modes={"none": dict.fromkeys(names(costs(1)), "keep"), "auto": "auto"},
        own_mode="none",
        workers=2,
        budget=1000,
        looked_at=looked_at,
        there=lambda choice: NOTHING,
    )
    for mode in outlook.modes:
        largest = outlook.largest(mode)
        assert largest is not None
        at = outlook.choices.index(largest)
        assert outlook.fits(largest, mode) and not outlook.fits(outlook.choices[at + 1], mode)
    assert outlook.largest("auto").micro_batch > outlook.largest("none").micro_batch  # type: ignore[union-attr]
    choice, least = outlook.least()
    assert choice.micro_batch == 1
    assert all(least.peak <= found.peak for _, cells in outlook.grid() for found in cells.values() if found)


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * 2**30), ("800MB", 800_000_000), ("8G", 2**33), ("1.5 kib", 1536), ("1e3mib", 1000 * 2**20)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text, "--memory") == size


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        *(("-1", "such as 24GiB"), ("0", "such as 24GiB"), ("many", "Write 24GiB"), ("1e99", "Write 24GiB")),
        *(("1e99GiB", "between 1B"), ("24", "Write 24GiB"), ("24gigs", "mean 24GiB"), ("nan GiB", "Write 24GiB")),
        *(("", "Write 24GiB"), (None, "Write 24GiB"), (True, "Write 24GiB"), ("5 parsecs", "mean 5PiB")),
    ],
)
def test_nonsense_is_refused_with_what_to_write(text: object, fix: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot use --memory: found .*, need a number and a unit") as refused:
        parse_size(text, "--memory")
    assert fix in str(refused.value)


def test_what_is_shown_can_be_read_again() -> None:
    for size in (1, 1023, 1024, 999_999, 2**30 - 1, 2**30, 5 * 10**15):
        assert parse_size(show_size(size), "--memory") == pytest.approx(size, rel=0.006)
