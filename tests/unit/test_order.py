"""Order and dealing are pure arithmetic: checked as properties, and against torch's own sampler."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from paceline.config import Recipe
from paceline.data.order import Cipher, OrderName, Permutation, Plan, Sequential, Tail, describe
from paceline.errors import ConfigError, DataError

ORDERS: list[OrderName] = ["cipher", "permutation", "sequential"]
sizes = st.integers(1, 500)
seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 10_000)


@st.composite
def plans(draw: st.DrawFn, tail: Tail) -> Plan:
    lanes = draw(st.integers(1, 9))
    micro_batch = draw(st.integers(1, 4))
    return Plan(
        samples=draw(st.integers(lanes if tail == "drop" else 1, 300)),
        batch=lanes * micro_batch * draw(st.integers(1, 3)),
        micro_batch=micro_batch,
        lanes=lanes,
        tail=tail,
        order=draw(st.sampled_from(ORDERS)),
        seed=draw(seeds),
    )


def epoch_by_lane(plan: Plan, epoch: int) -> list[list[int]]:
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    return [[int(i) for s in steps for micro in plan.lane(s, lane) for i in micro] for lane in range(plan.lanes)]


@settings(deadline=None)
@given(sizes, seeds, epochs)
def test_cipher_is_a_bijection(samples: int, seed: int, epoch: int) -> None:
    order = Cipher(samples=samples, seed=seed).indices(epoch, np.arange(samples))
    assert sorted(order.tolist()) == list(range(samples))


@settings(deadline=None)
@given(st.integers(1, 2**62), seeds, epochs, st.data())
def test_cipher_stays_in_range_and_is_injective_on_any_size(
    samples: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, samples - 1), min_size=1, max_size=20, unique=True))
    found = Cipher(samples=samples, seed=seed).indices(epoch, np.array(positions, dtype=np.int64)).tolist()
    assert len(set(found)) == len(positions)
    assert all(0 <= index < samples for index in found)


@pytest.mark.parametrize("samples", [65_535, 65_536, 65_537, 100_003])
def test_cipher_is_a_bijection_on_larger_sizes(samples: int) -> None:
    order = Cipher(samples=samples, seed=1).indices(0, np.arange(samples))
    assert np.array_equal(np.sort(order), np.arange(samples))


def test_cipher_never_changes() -> None:
    """A golden record: another result here is another order for every run ever started."""
    first = Cipher(samples=16, seed=0).indices(0, np.arange(16)).tolist()
    assert first == [11, 1, 3, 7, 5, 12, 9, 13, 4, 14, 2, 8, 15, 6, 10, 0]
    assert Cipher(samples=1000, seed=42).indices(3, np.arange(8)).tolist() == [126, 568, 75, 187, 319, 782, 945, 482]
    assert Cipher(samples=10**12, seed=0).indices(0, np.array([10**9])).tolist() == [658988178004]


def test_cipher_follows_its_definition() -> None:
    """The docstring's formulas, one position at a time in Python integers."""
    n, seed, epoch, g = 1000, 42, 3, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    a, b = 32, 32
    key = mix(mix(seed + g) ^ epoch)

    def walk(x: int) -> int:
        left, right = divmod(x, b)
        for r in range(8):
            round_key = mix((key + (r + 1) * g) % 2**64)
            if r % 2 == 0:
                left = (left + (mix(right ^ round_key) >> 16)) % a
            else:
                right = (right + (mix(left ^ round_key) >> 16)) % b
        x = left * b + right
        return x if x < n else walk(x)

    order = Cipher(samples=n, seed=seed).indices(epoch, np.arange(n))
    assert order.tolist() == [walk(x) for x in range(n)]


def test_cipher_shuffles() -> None:
    n = 100_000
    order = Cipher(samples=n, seed=0).indices(0, np.arange(n))
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.02
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.02
    halves = [int(count) for count in np.histogram(order[: n // 10], bins=10, range=(0, n))[0]]
    assert max(abs(count - n // 100) for count in halves) < 150


def test_cipher_finds_its_place_in_a_trillion_samples_at_once() -> None:
    def place(samples: int, step: int) -> tuple[float, int]:
        """Best seconds of several, since the machine may be busy; peak bytes."""
        plan = Plan(samples=samples, batch=64, micro_batch=8, lanes=8, tail="short", order="cipher", seed=0)
        seconds = []
        for _ in range(5):
            tracemalloc.start()
            start = time.perf_counter()
            for lane in range(8):
                plan.lane(step, lane)
            seconds.append(time.perf_counter() - start)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return min(seconds), peak

    _, small = place(10**3, 1)
    elapsed, large = place(10**12, 10**9 // 64)
    assert elapsed < 0.05
    assert large < small + 4096 < 100_000


@settings(deadline=None)
@given(plans("short"), st.integers(0, 50))
def test_short_shows_each_sample_once_an_epoch(plan: Plan, epoch: int) -> None:
    assert sorted(i for lane in epoch_by_lane(plan, epoch) for i in lane) == list(range(plan.samples))


@settings(deadline=None)
@given(plans("pad"), st.integers(0, 50))
def test_pad_fills_every_lane_alike(plan: Plan, epoch: int) -> None:
    lanes = epoch_by_lane(plan, epoch)
    assert {len(lane) for lane in lanes} == {-(-plan.samples // plan.lanes)}
    assert {i for lane in lanes for i in lane} == set(range(plan.samples))


@settings(deadline=None)
@given(plans("drop"), st.integers(0, 50))
def test_drop_leaves_out_only_the_tail(plan: Plan, epoch: int) -> None:
    lanes = epoch_by_lane(plan, epoch)
    assert {len(lane) for lane in lanes} == {plan.samples // plan.lanes}
    seen = [i for lane in lanes for i in lane]
    assert len(set(seen)) == len(seen)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 200), st.integers(1, 9), st.sampled_from(["pad", "drop"]), st.integers(0, 2**62), st.integers(0, 99)
)
def test_permutation_is_torchs_distributed_sampler(samples: int, lanes: int, tail: Tail, seed: int, epoch: int) -> None:
    if tail == "drop" and samples < lanes:
        return
    plan = Plan(samples=samples, batch=2 * lanes, micro_batch=1, lanes=lanes, tail=tail, order="permutation", seed=seed)
    for lane, seen in enumerate(epoch_by_lane(plan, epoch)):
        sampler: DistributedSampler[int] = DistributedSampler(
            range(samples),  # type: ignore[arg-type]  # only its length is used
            num_replicas=lanes,
            rank=lane,
            shuffle=True,
            seed=seed,
            drop_last=tail == "drop",
        )
        sampler.set_epoch(epoch)
        assert seen == list(sampler)


@pytest.mark.parametrize("order", [Cipher(samples=100, seed=3), Permutation(samples=100, seed=3)])
def test_every_epoch_has_an_order_of_its_own(order: Cipher | Permutation) -> None:
    drawn = {tuple(order.indices(epoch, np.arange(100)).tolist()) for epoch in range(50)}
    assert len(drawn) == 50
    other_seed = Cipher(samples=100, seed=4).indices(0, np.arange(100)).tolist()
    assert tuple(other_seed) not in drawn


def test_permutation_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    Permutation(samples=50, seed=987).indices(1, np.arange(50))
    assert torch.equal(before, torch.get_rng_state())


@settings(deadline=None)
@given(plans("short"), st.integers(0, 200))
def test_a_step_deals_its_positions_over_lanes_in_micro_batches(plan: Plan, step: int) -> None:
    epoch, k = divmod(step, plan.steps_per_epoch)
    assert plan.epoch_of(step) == epoch
    order = plan.source.indices(epoch, np.arange(plan.samples)).tolist()
    whole = order[k * plan.batch : (k + 1) * plan.batch]
    for lane in range(plan.lanes):
        micro_batches = plan.lane(step, lane)
        assert [i for micro in micro_batches for i in micro] == whole[lane :: plan.lanes]
        assert all(len(micro) == plan.micro_batch for micro in micro_batches[:-1])
        assert all(0 < len(micro) <= plan.micro_batch for micro in micro_batches)


def test_a_recipe_gives_its_plan() -> None:
    recipe = Recipe(batch=12, micro_batch=2, lanes=3, steps=1, tail="pad", order="sequential", seed=5)
    plan = Plan.of(recipe, 10)
    assert (plan.batch, plan.micro_batch, plan.lanes, plan.tail, plan.seed) == (12, 2, 3, "pad", 5)
    assert plan.source == Sequential(samples=10)


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(DataError, match=r"an empty dataset, need at least one sample"):
        Plan(samples=0, batch=8, micro_batch=1, lanes=8, tail="short", order="cipher", seed=0)
    with pytest.raises(DataError, match=r"tail=drop, samples=7, lanes=8, need samples >= lanes"):
        Plan(samples=7, batch=8, micro_batch=1, lanes=8, tail="drop", order="cipher", seed=0)
    with pytest.raises(ConfigError, match=r"batch=9, lanes=8"):
        Plan(samples=7, batch=9, micro_batch=1, lanes=8, tail="short", order="cipher", seed=0)


def test_describe_shows_who_sees_what() -> None:
    assert describe(samples=10, lanes=3, order="sequential") == [
        "lane 0: [0, 3, 6, 9]",
        "lane 1: [1, 4, 7]",
        "lane 2: [2, 5, 8]",
    ]
    assert describe(samples=1, lanes=2) == ["lane 0: [0]", "lane 1: []"]
    assert describe(samples=50, lanes=2, epoch=1) != describe(samples=50, lanes=2)
