"""Buckets: each parameter once, aligned, the last ones first; sums of lanes with as few copies as promised."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.determinism import ALIGNMENT
from paceline.lanes import lanes_of
from paceline.reduction.buckets import FlatSet, LaneSums, assign

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=12)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@st.composite
def parameter_lists(draw: st.DrawFn) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=draw(DTYPES))) for shape in draw(SHAPES)]


@given(parameter_lists(), st.integers(0, 2000))
def test_each_parameter_has_one_place_in_one_bucket(parameters: list[nn.Parameter], bucket_bytes: int) -> None:
    buckets = assign(parameters, bucket_bytes)
    members = [index for bucket in buckets for index in bucket.members]
    assert members == list(reversed(range(len(parameters))))  # backward reaches the last first
    for bucket in buckets:
        end = 0
        for index, offset in zip(bucket.members, bucket.offsets, strict=True):
            assert parameters[index].dtype == bucket.dtype
            assert offset >= end  # no overlap
            end = offset + parameters[index].numel()
        assert end <= bucket.size
        if len(bucket.members) > 1:
            used = sum(parameters[index].numel() * parameters[index].element_size() for index in bucket.members)
            assert used <= bucket_bytes


@given(parameter_lists(), st.integers(0, 2000))
def test_views_are_aligned_and_apart(parameters: list[nn.Parameter], bucket_bytes: int) -> None:
    flat_set = FlatSet(parameters, assign(parameters, bucket_bytes))
    for number, view in enumerate(flat_set.views):
        assert view.shape == parameters[number].shape
        assert view.dtype == parameters[number].dtype
        assert view.data_ptr() % ALIGNMENT == 0
        view.fill_(number + 1)
    for number, view in enumerate(flat_set.views):
        assert (view == number + 1).all()
    flat_set.zero_()
    assert not any(view.any() for view in flat_set.views)


def test_one_bucket_holds_all_that_fits() -> None:
    parameters = [nn.Parameter(torch.zeros(16)) for _ in range(4)]
    assert [bucket.members for bucket in assign(parameters, 4 * 64)] == [(3, 2, 1, 0)]
    assert [bucket.members for bucket in assign(parameters, 2 * 64)] == [(3, 2), (1, 0)]
    assert len(assign(parameters, 1)) == 4
    assert assign([], 100) == []


def test_a_worker_holds_no_more_gradient_copies_than_promised_and_makes_none_after_the_first_step() -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    buckets = assign(parameters, 100)
    for lanes in range(1, 33):
        for workers in range(1, lanes + 1):
            for rank in range(workers):
                mine = lanes_of(rank, workers, lanes)
                sums = LaneSums(parameters, buckets, lanes)
                made: set[int] = set()
                for step in range(2):
                    before = set(made)
                    for lane in mine:
                        made.add(sums.begin(lane).flats[0].data_ptr())
                    assert step == 0 or made == before
                    sums.reset()
                log2 = len(mine).bit_length() - 1
                if len(mine) == 2**log2 and lanes % workers == 0:
                    assert len(made) == 1 + log2, (lanes, workers, rank)
                assert len(made) <= 1 + 2 * log2, (lanes, workers, rank)
