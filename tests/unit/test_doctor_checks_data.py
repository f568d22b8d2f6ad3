"""What a run concludes about who sees which samples, and draws which random numbers.

Each test holds a right way and the wrong one that it resembles, as the ranks would tell of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.doctor.watching import (
    checks_data,
    checks_random,
)
from told import Ranks, ids


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks.beside(tmp_path).tell("wrap", ddp=0)


SPLITS = {
    "padded by hand": ([*range(33)], [*range(33, 65), 0], 65, False),
    "padded to whole batches": ([*range(36)], [*range(30, 60), *range(6)], 60, False),
    "padded part of a part": ([*range(0, 40, 2)], [*range(1, 39, 2), 0], 100, False),
    "a random half": ([*range(32)], [*range(16, 48)], 64, True),
    "a random tenth": ([3, 9, 17, 21, 40, 41], [1, 8, 17, 22, 40, 43], 60, True),
    "the most of it": ([*range(36)], [*range(4, 40)], 40, True),
    "another order": ([*range(32)], [*range(31, -1, -1)], 64, False),
}


@pytest.mark.parametrize("case", SPLITS)
def test_shards_are_no_split_that_differs(ranks: Ranks, case: str) -> None:
    *parts, of, wrong = SPLITS[case]
    sides = [{"size": len(part), "digest": str(part), "indices": part} for part in parts]
    ranks.tell("subset", *sides, of=of)
    assert ids(ranks.found(checks_data.random_split_differs)) == ["random-split-differs"] * wrong


def test_data_may_differ_where_each_rank_trains_a_model_of_its_own(ranks: Ranks, tmp_path: Path) -> None:
    alone = Ranks.beside(tmp_path)
    for those in (ranks, alone):
        those.tell(
            "subset", {"digest": "a", "indices": [*range(24)]}, {"digest": "b", "indices": [*range(9, 33)]}, of=40
        )
        those.tell("loader", loader=0, workers=0, drawn_by="RandomSampler", size=40)
        those.tell("pass", loader=0, number=0).tell(
            "batch", loader=0, number=0, indices=[*range(9)], rows=[*"abcdefghi"]
        )
        those.tell("backward", roots=[], reached=[[0, "synced"]] if those is ranks else [])
    assert ids(ranks.found(checks_data.random_split_differs)) == ["random-split-differs"]
    assert ids(ranks.found(checks_data.no_distributed_sampler)) == ["no-distributed-sampler"]
    assert not alone.found(checks_data.random_split_differs)
    assert not alone.found(checks_data.no_distributed_sampler)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_schedule_that_is_made_again_was_broken_off(ranks: Ranks, resumed: bool) -> None:
    for number in range(1 + resumed):
        ranks.tell("schedule", scheduler=number, name="CosineAnnealingLR", length=20, lines=(3,))
        for _ in range(10):
            ranks.tell("scheduled", scheduler=number, rates=[0.1])
    ranks.tell("end", code=0)
    found = ids(ranks.found(checks_data.schedule_length_mismatch))
    assert found == ["schedule-length-mismatch"] * (not resumed)


WORKERS = {
    "as torch seeds them": ([(1, 7, "a"), (2, 8, "b")], [(3, 9, "c"), (4, 10, "d")], None),
    "a constant": ([(1, 7, "a"), (2, 8, "a")], [(3, 9, "a"), (4, 10, "a")], "error"),
    "by the worker's number": ([(1, 7, "a"), (2, 8, "b")], [(3, 9, "a"), (4, 10, "b")], "error"),
    "the same in each epoch": ([(1, 7, "a"), (2, 8, "a")], [(3, 9, "c"), (4, 10, "c")], "error"),
    "ranks seeded alike": ([(1, 7, "a"), (2, 8, "b")], [(3, 7, "a"), (4, 8, "b")], "advice"),
}


@pytest.mark.parametrize("case", WORKERS)
def test_loader_workers_are_to_blame_for_what_they_do_with_their_seeds(ranks: Ranks, case: str) -> None:
    *sides, level = WORKERS[case]
    ranks.tell("loader", loader=0, workers=1)
    for rank, workers in enumerate(sides):
        for child, seed, state in workers:
            own: list[dict[str, Any] | None] = [None, None]
            own[rank] = {"seed": seed, "state": state}
            ranks.tell("draw", *own, child=child, where="fetch", generator="numpy", fetch=1)
            own[rank] = {"seed": seed, "state": "by sample"}  # what a dataset seeds by the sample's number comes again
            ranks.tell("draw", *own, child=child, where="fetch", generator="numpy", fetch=2)
    found = ranks.found(checks_random.worker_seed_identical)
    assert [finding.level for finding in found] == ([level] if level else [])


@pytest.mark.parametrize("wrong", [True, False])
def test_parts_that_are_split_differently_are_not_told_as_another_order(ranks: Ranks, wrong: bool) -> None:
    """Number 0 of one rank's part is another sample than number 0 of the other's."""
    sides: list[dict[str, Any]] = [
        {"digest": "a", "indices": [*range(24)]},
        {"digest": "b" if wrong else "a", "indices": [*range(8, 32)]},
    ]
    ranks.tell("subset", *sides, size=24, of=32).tell("sampler", sampler=0, seed=0, shuffle=True, size=24)
    ranks.tell("loader", loader=0, sampler=0, workers=0).tell("pass", loader=0, number=0)
    rows = [{"rows": [f"row {n}" for n in range(12)]}, {"rows": [f"row {n + 8}" for n in range(12)]}]
    ranks.tell("batch", *rows, loader=0, number=0, indices=[*range(12)])
    assert ids(ranks.found(checks_data.dataset_order_differs)) == ["dataset-order-differs"] * (not wrong)
    assert ids(ranks.found(checks_data.random_split_differs)) == ["random-split-differs"] * wrong


@pytest.mark.parametrize(("replicas", "wrong"), [(2, True), (1, False)])
def test_a_sampler_of_a_ranks_own_data_may_differ(ranks: Ranks, replicas: int, wrong: bool) -> None:
    ranks.tell("sampler", {"seed": 0, "size": 30}, {"seed": 1, "size": 34}, sampler=0, shuffle=True, replicas=replicas)
    found = ranks.found(checks_data.sampler_seed_differs) + ranks.found(checks_data.dataset_order_differs)
    assert ids(found) == ["sampler-seed-differs", "dataset-order-differs"] * wrong


STREAMS = {
    "the same samples": (["a", "b", "c"], ["a", "b", "c"], True),
    "the same samples, some of them twice": ([*"abcdefghabcdefgh"], [*"abcdefghabcdefgh"], True),
    "every other sample": (["a", "c", "e"], ["b", "d", "f"], False),
    "every other sample, of few that repeat": ([*"acegacegacegaceg"], [*"bdfhbdfhbdfhbdfh"], False),
    "labels": ([*"abababab"], [*"abababab"], False),
}


@pytest.mark.parametrize("case", STREAMS)
def test_a_stream_is_the_same_if_its_samples_are_or_their_order_is(ranks: Ranks, case: str) -> None:
    *orders, wrong = STREAMS[case]
    ranks.tell("loader", loader=0, iterable=True, workers=0, dataset="Lines").tell("pass", loader=0, number=0)
    ranks.tell("batch", *({"rows": rows} for rows in orders), loader=0, number=0, indices=None)
    ranks.tell("backward", roots=[], reached=[[0, "synced"]])
    assert ids(ranks.found(checks_data.iterable_not_sharded)) == ["iterable-not-sharded"] * wrong


def test_the_function_that_seeds_workers_is_where_reading_may_tell_it(ranks: Ranks) -> None:
    """One mistake, one finding: that of the run takes the place of the one that was read in these lines."""
    ranks.tell("loader", loader=0, workers=1, seeding=[str(ranks.path), 2, 4])
    ranks.tell("draw", {"seed": 7}, {"seed": 8}, child=1, generator="numpy", state="same", where="fetch", fetch=1)
    (finding,) = ranks.found(checks_random.worker_seed_identical)
    assert finding.also == tuple((str(ranks.path), line) for line in (2, 3, 4))
