"""The tree: whoever adds which lanes, in whichever stages, the additions and so the bits are the same."""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.lanes import lanes_of
from paceline.reduction.tree import Node, cover, fold, split, total

MOST = 32
SIZES = [(lanes, workers) for lanes in range(1, MOST + 1) for workers in range(1, lanes + 1)]


def nodes_of(lanes: int) -> set[Node]:
    """Every node of the tree, from its definition."""

    def walk(lo: int, hi: int) -> set[Node]:
        if hi - lo == 1:
            return {(lo, hi)}
        middle = lo + max(2**k for k in range(8) if 2**k < hi - lo)
        return {(lo, hi)} | walk(lo, middle) | walk(middle, hi)

    return walk(0, lanes)


def tree_sum(values: NDArray[Any]) -> NDArray[Any]:
    """The sum over the first axis, from the tree's definition and nothing of the package."""
    if len(values) == 1:
        only: NDArray[Any] = values[0]
        return only
    middle = max(2**k for k in range(8) if 2**k < len(values))
    added: NDArray[Any] = tree_sum(values[:middle]) + tree_sum(values[middle:])
    return added


def wild(lanes: int, elements: int = 64) -> NDArray[np.float32]:
    """Float32 of both signs and exponents from denormal to huge: any other order of additions shows."""
    drawn = np.random.default_rng(lanes)
    mantissas = drawn.uniform(-1, 1, (lanes, elements))
    values = (mantissas * 2.0 ** drawn.integers(-149, 120, (lanes, elements))).astype(np.float32)
    near = (mantissas * 2.0 ** drawn.integers(-4, 5, (lanes, elements))).astype(np.float32)
    return np.concatenate([values, near], axis=1)


def leaves(values: NDArray[np.float32], some: range) -> list[tuple[Node, NDArray[np.float32]]]:
    return [((lane, lane + 1), values[lane]) for lane in some]


def test_split_sums_equal_the_whole_sum_bit_for_bit_for_every_lane_and_worker_count() -> None:
    """The claim that everything rests on: all L <= 32, all W <= L."""
    for lanes, workers in SIZES:
        values = wild(lanes)
        parts = []
        for rank in range(workers):
            parts += fold(lanes, leaves(values, lanes_of(rank, workers, lanes)), operator.add)
        ((node, whole),) = fold(lanes, parts, operator.add)
        assert node == (0, lanes)
        assert whole.tobytes() == tree_sum(values).tobytes(), (lanes, workers)


def test_the_wild_values_would_show_another_order() -> None:
    for lanes in range(3, MOST + 1):
        values = wild(lanes)
        assert np.add.reduce(values[::-1]).tobytes() != tree_sum(values).tobytes(), lanes


def test_what_a_worker_folds_is_what_cover_says() -> None:
    for lanes, workers in SIZES:
        for rank in range(workers):
            mine = lanes_of(rank, workers, lanes)
            folded = fold(lanes, [((lane, lane + 1), lane) for lane in mine], lambda left, right: left)
            assert [node for node, _ in folded] == cover(lanes, mine.start, mine.stop)


def test_a_cover_is_of_the_fewest_nodes_disjoint_and_in_order() -> None:
    for lanes in range(1, MOST + 1):
        nodes = nodes_of(lanes)
        for lo in range(lanes):
            for hi in range(lo + 1, lanes + 1):
                covering = cover(lanes, lo, hi)
                assert nodes.issuperset(covering)
                assert covering[0][0] == lo
                assert covering[-1][1] == hi
                assert all(left[1] == right[0] for left, right in pairwise(covering))
                inside = [node for node in nodes if lo <= node[0] and node[1] <= hi]
                largest = [n for n in inside if not any(m != n and m[0] <= n[0] and n[1] <= m[1] for m in inside)]
                assert covering == sorted(largest)  # maximal nodes: no fewer could do


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16, 32])
def test_a_worker_that_divides_the_lanes_is_left_with_one_part(workers: int) -> None:
    for rank in range(workers):
        mine = lanes_of(rank, workers, 32)
        assert len(cover(32, mine.start, mine.stop)) == 1


@st.composite
def cut_lanes(draw: st.DrawFn) -> tuple[int, list[int]]:
    lanes = draw(st.integers(1, MOST))
    cuts = draw(st.lists(st.integers(0, lanes), max_size=6))
    return lanes, [0, *sorted(cuts), lanes]


@given(cut_lanes())
def test_folding_in_any_stages_is_the_same_tree(lanes_and_cuts: tuple[int, list[int]]) -> None:
    lanes, cuts = lanes_and_cuts
    terms: list[tuple[Node, str]] = [((lane, lane + 1), str(lane)) for lane in range(lanes)]

    def add(left: str, right: str) -> str:
        return f"({left}+{right})"

    staged: list[tuple[Node, str]] = []
    for start, stop in pairwise(cuts):
        staged = fold(lanes, [*staged, *fold(lanes, terms[start:stop], add)], add)
    assert staged == fold(lanes, terms, add)
    assert fold(lanes, staged, add) == staged
    assert len(staged) == 1


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=MOST))
def test_total_is_the_tree_in_float64(values: list[float]) -> None:
    assert total(values) == float(tree_sum(np.array(values, dtype=np.float64)))


@given(st.integers(0, 1000), st.integers(2, 1000))
def test_the_left_half_is_the_largest_power_of_two_that_leaves_a_right_half(lo: int, size: int) -> None:
    left = split(lo, lo + size) - lo
    assert left.bit_count() == 1
    assert left < size <= 2 * left
