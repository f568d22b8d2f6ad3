"""Lanes are dealt once each, evenly, in order; batches that do not divide are refused with those that do."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.lanes import check_batch, lanes_of

LANES_AND_WORKERS = st.integers(1, 200).flatmap(lambda lanes: st.tuples(st.just(lanes), st.integers(1, lanes)))


@given(LANES_AND_WORKERS)
def test_every_lane_has_one_driver_and_every_worker_a_lane(lanes_and_workers: tuple[int, int]) -> None:
    lanes, workers = lanes_and_workers
    dealt = [lanes_of(rank, workers, lanes) for rank in range(workers)]
    assert [lane for some in dealt for lane in some] == list(range(lanes))
    sizes = {len(some) for some in dealt}
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("rank", "workers"), [(0, 9), (0, 0), (3, 3), (-1, 3)])
def test_workers_without_a_lane_and_ranks_without_a_worker_are_refused(rank: int, workers: int) -> None:
    with pytest.raises(ConfigError, match="cannot deal lanes") as caught:
        lanes_of(rank, workers, 8)
    assert caught.value.needed is not None


@given(st.integers(1, 500), st.integers(1, 20), st.integers(1, 20))
def test_the_batches_that_an_error_offers_work_and_are_the_nearest(batch: int, micro_batch: int, lanes: int) -> None:
    unit = micro_batch * lanes
    assume(batch % unit)
    with pytest.raises(ConfigError, match="cannot divide the batch") as caught:
        check_batch(batch, micro_batch, lanes)
    assert caught.value.fix is not None
    offered = [int(word) for word in caught.value.fix.replace("batch=", "").split() if word.isdigit()]
    assert offered
    for other in offered:
        check_batch(other, micro_batch, lanes)
        assert abs(other - batch) < unit
