"""How many micro-batches a lane has is known without its samples, which are worked out once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from paceline.data.order import OrderName, Plan, Tail
from teamwork import Setup, work_in_threads


@st.composite
def plans(draw: st.DrawFn, tail: Tail) -> Plan:
    lanes, micro_batch = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    return Plan(
        samples=draw(st.integers(lanes if tail == "drop" else 1, 300)),
        batch=lanes * draw(st.integers(1, 12)),  # not always a multiple of micro-batches
        micro_batch=micro_batch,
        lanes=lanes,
        tail=tail,
        order="sequential",
        seed=0,
    )


@pytest.mark.parametrize("tail", ["short", "pad", "drop"])
@given(data=st.data(), step=st.integers(0, 10**6))
def test_the_count_is_that_of_the_lanes_micro_batches(tail: Tail, data: st.DataObject, step: int) -> None:
    plan = data.draw(plans(tail))
    for lane in range(plan.lanes):
        assert plan.micro_batches(step, lane) == len(plan.lane(step, lane))


class Counted(Plan):
    """Notes for which step and lane samples are worked out."""

    asked: list[tuple[int, int]]

    def lane(self, step: int, lane: int) -> list[NDArray[np.int64]]:
        self.asked.append((step, lane))
        return super().lane(step, lane)


@pytest.mark.parametrize("order", ["cipher", "permutation", "sequential"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_step_works_out_the_samples_of_a_lane_once(order: OrderName, workers: int) -> None:
    plan = Counted(samples=64, batch=20, micro_batch=2, lanes=5, tail="short", order=order, seed=0)
    object.__setattr__(plan, "asked", [])
    work_in_threads(workers, Setup(model=nn.Linear(6, 6), plan=plan, steps=5))
    assert sorted(plan.asked) == [(step, lane) for step in range(5) for lane in range(5)]
