"""The loader gives what the plan says from any step on, the same from loader processes, and draws by key."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.loader import Loader, move
from paceline.data.order import Plan
from paceline.determinism import ALIGNMENT
from paceline.lanes import lanes_of

CPU = torch.device("cpu")
PLAN = Plan(samples=29, batch=12, micro_batch=2, lanes=3, tail="short", order="cipher", seed=4)


class Numbers(Dataset[Any]):
    """Its index, and a draw of each generator."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.rand(())), float(np.random.rand()), random.random()


class Together(Dataset[Any]):
    """Makes many samples at once, and draws nothing."""

    keyed = False

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> Tensor:
        raise AssertionError("one at a time")

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        return [torch.tensor(index) for index in indices]


class Processes(Dataset[Any]):
    """Where a sample was loaded, and whether signals for the worker end that process."""

    keyed = False

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> tuple[int, int, bool]:
        ignored = all(signal.getsignal(s) == signal.SIG_IGN for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
        return os.getpid(), torch.get_num_threads(), ignored


def loader(dataset: Dataset[Any], loader_workers: int = 0, seed: int = 0, collate: Any = None) -> Loader:
    return Loader(dataset, seed=seed, collate=collate, device=CPU, loader_workers=loader_workers, threads=1)


def train(dataset: Dataset[Any], lanes: range, steps: range, **how: Any) -> list[Any]:
    return list(loader(dataset, **how).train(PLAN, lanes, steps))


@pytest.mark.parametrize("loader_workers", [0, 2])
@pytest.mark.parametrize("start", [0, 4])
def test_batches_come_as_planned_lane_by_lane_from_any_step(loader_workers: int, start: int) -> None:
    lanes, steps = range(1, 3), range(start, 7)
    got = [batch[0].tolist() for batch in train(Numbers(), lanes, steps, loader_workers=loader_workers)]
    planned = [indices.tolist() for step in steps for lane in lanes for indices in PLAN.lane(step, lane)]
    assert got == planned
    assert len(planned[-1]) in (1, 2)


def test_draws_of_a_sample_depend_on_seed_epoch_and_index_alone() -> None:
    steps = range(2 * PLAN.steps_per_epoch)

    def draws(workers: int, start: int = 0, **how: Any) -> dict[tuple[int, int], list[float]]:
        found: dict[tuple[int, int], list[float]] = {}
        for rank in range(workers):
            lanes = lanes_of(rank, workers, 3)
            keys = [
                (PLAN.epoch_of(step), int(index))
                for step in steps[start:]
                for lane in lanes
                for indices in PLAN.lane(step, lane)
                for index in indices
            ]
            torch.rand(7)  # whatever was drawn before
            batches = train(Numbers(), lanes, steps[start:], **how)
            rows = [list(row) for batch in batches for row in zip(*(part.tolist() for part in batch), strict=True)]
            found |= {key: row[1:] for key, row in zip(keys, rows, strict=True)}
        return found

    whole = draws(1)
    assert len(whole) == 2 * 29
    assert len({value for row in whole.values() for value in row}) == 3 * 2 * 29  # none twice: epochs differ too
    assert draws(3) == draws(2) == whole
    assert draws(2, loader_workers=2) == whole
    late = draws(1, start=3)
    assert late == {key: whole[key] for key in late}
    assert draws(1, seed=1) != whole


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_dataset_that_draws_nothing_is_read_many_at_once_and_not_seeded(loader_workers: int) -> None:
    before = torch.get_rng_state()
    got = [batch.tolist() for batch in train(Together(), range(3), range(2), loader_workers=loader_workers)]
    assert got == [indices.tolist() for step in range(2) for lane in range(3) for indices in PLAN.lane(step, lane)]
    if not loader_workers:  # torch's own loader draws a number for its processes
        assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("samples", "micro_batch", "loader_workers"),
    [
        *((29, 2, 0), (1, 4, 0), (3, 4, 0), (7, 7, 0), (50, 1, 0), (3, 4, 1)),
        *(pytest.param(*sizes, 1, marks=pytest.mark.long) for sizes in ((29, 2), (1, 4), (7, 7), (50, 1))),
    ],
)
def test_evaluation_sees_every_sample_once_whoever_drives_the_lanes(
    samples: int, micro_batch: int, loader_workers: int
) -> None:
    for workers in (1, 3, 8) if not loader_workers else (3,):
        seen: dict[int, list[int]] = {}
        for rank in range(workers):
            lanes = lanes_of(rank, workers, 8)
            here = loader(Range(samples), loader_workers)
            for lane, number, batch in here.evaluate(samples, micro_batch, lanes, 8):
                assert lane in lanes
                assert lane == number % 8
                seen[number] = batch.tolist()
        assert [index for _, indices in sorted(seen.items()) for index in indices] == list(range(samples))
        assert all(len(indices) == micro_batch for number, indices in sorted(seen.items())[:-1])


class Range(Dataset[Any]):
    keyed = False

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __getitem__(self, index: int) -> int:
        return index


def test_loader_processes_are_others_with_the_recipes_threads_and_without_the_workers_signals() -> None:
    batches = train(Processes(), range(3), range(3), loader_workers=2)
    pids = {pid for batch in batches for pid in batch[0].tolist()}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert {threads for batch in batches for threads in batch[1].tolist()} == {1}
    assert all(ignored for batch in batches for ignored in batch[2].tolist())


def test_a_loader_that_is_dropped_midway_ends_its_processes() -> None:
    """The fixture of all tests looks for what is left."""
    batches = loader(Numbers(), 2).train(PLAN, range(3), range(1000))
    assert next(batches)[0].tolist() == PLAN.lane(0, 0)[0].tolist()
    del batches


def test_an_error_in_a_dataset_reaches_the_caller() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> Any:
            raise KeyError(f"sample {index}")

    for loader_workers in (0, 1):
        with pytest.raises(KeyError, match="sample"):
            train(Broken(), range(3), range(1), loader_workers=loader_workers)


def test_collate_gets_the_samples_of_one_micro_batch() -> None:
    (first, *_) = train(Numbers(), range(3), range(1), collate=lambda samples: [sample[0] for sample in samples])
    assert first == PLAN.lane(0, 0)[0].tolist()


class Pair(NamedTuple):
    x: Tensor
    y: Any


def test_move_walks_containers_and_aligns_floats() -> None:
    odd = torch.arange(40.0)[3:]
    assert odd.data_ptr() % ALIGNMENT
    batch = {"pair": Pair(odd, [odd, "text"]), "tuple": (torch.arange(9)[1:], 3)}
    moved = move(batch, CPU)
    assert isinstance(moved["pair"], Pair)
    assert isinstance(moved["tuple"], tuple)
    for tensor in (moved["pair"].x, moved["pair"].y[0]):
        assert tensor.data_ptr() % ALIGNMENT == 0
        assert torch.equal(tensor, odd)
    assert moved["pair"].y[1] == "text"
    assert torch.equal(moved["tuple"][0], torch.arange(1, 9))
