"""Module buffers: every lane starts a step from the same ones, and what is merged does not depend on the workers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.errors import UsageError
from teamwork import Seen, Setup, plan_of, same_bytes, work_in_threads


class Normed(nn.Module):
    """BatchNorm over (batch, time), so that a micro-batch of one sample has statistics."""

    calls: Tensor
    seen: Tensor
    replaced: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(1, momentum=0.3)
        self.register_buffer("thirds", torch.full((4,), 1 / 3))  # (a + a + a) / 3 is another number than a
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(6, dtype=torch.bool))
        self.register_buffer("replaced", torch.zeros(2))

    def forward(self, x_BF: Tensor) -> Tensor:
        self.calls += 1
        self.seen |= (x_BF > 2).any(0)
        self.replaced = self.replaced * 0.5 + x_BF.mean()
        result: Tensor = self.norm(self.inner(x_BF)[:, None])[:, 0]
        return result


def buffers_of(seen: Seen) -> dict[str, Tensor]:
    return dict(seen.model.named_buffers())


@pytest.mark.parametrize(("lanes", "workers", "samples"), [(5, 4, 64), (8, 3, 64), (3, 2, 9), (8, 8, 9)])
def test_statistics_are_the_same_for_any_number_of_workers(lanes: int, workers: int, samples: int) -> None:
    data = TensorDataset(*torch.randn(2, samples, 6, generator=torch.Generator().manual_seed(1)).unbind())
    setup = Setup(model=Normed(), plan=plan_of(samples, lanes, micro_steps=2), data=data, steps=3)
    (expected,) = work_in_threads(1, setup)
    for seen in work_in_threads(workers, setup):
        assert seen.digest == expected.digest
        for name, buffer in buffers_of(expected).items():
            assert same_bytes(buffers_of(seen)[name], buffer), name


@pytest.mark.parametrize("workers", [1, 2])
def test_constant_buffers_are_left_alone(workers: int) -> None:
    model = Normed()
    for seen in work_in_threads(workers, Setup(model=model, plan=plan_of(64, 3))):
        assert same_bytes(buffers_of(seen)["thirds"], model.thirds)  # type: ignore[arg-type]


def test_the_merge_is_the_mean_over_lanes_that_had_data() -> None:
    x_SF = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    setup = Setup(
        model=Normed(), plan=plan_of(5, 8, micro_batch=1), data=TensorDataset(x_SF, torch.zeros(5, 6)), steps=1
    )
    (seen,) = work_in_threads(1, setup)
    lanes = []
    for x_F in x_SF:
        lane = Normed()
        lane(x_F[None])
        lanes.append(dict(lane.named_buffers()))
    for name in ("norm.running_mean", "norm.running_var", "replaced"):
        mean = torch.stack([lane[name] for lane in lanes]).mean(0)
        torch.testing.assert_close(buffers_of(seen)[name], mean, msg=name)


def test_integers_take_the_maximum_of_the_lanes() -> None:
    # 13 samples over 8 lanes by ones: lanes 0-4 have two micro-batches, the others one.
    setup = Setup(model=Normed(), plan=plan_of(13, 8, micro_batch=1, micro_steps=2), steps=1)
    for workers in (1, 3):
        for seen in work_in_threads(workers, setup):
            assert int(buffers_of(seen)["calls"]) == 2
            assert int(buffers_of(seen)["norm.num_batches_tracked"]) == 2


def test_flags_seen_by_any_lane_are_set() -> None:
    x_SF = torch.zeros(8, 6)
    x_SF[6, 2] = 3.0
    setup = Setup(
        model=Normed(), plan=plan_of(8, 8, micro_batch=1), data=TensorDataset(x_SF, torch.zeros(8, 6)), steps=1
    )
    for workers in (1, 3):
        for seen in work_in_threads(workers, setup):
            assert buffers_of(seen)["seen"].tolist() == [False, False, True, False, False, False]


class Poisoned(nn.Module):
    """A buffer that becomes NaN, one that only changes its sign of zero, a NaN that is written over by itself."""

    nan: Tensor
    zero: Tensor
    still_nan: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("nan", torch.zeros(2))
        self.register_buffer("zero", torch.zeros(2))
        self.register_buffer("still_nan", torch.full((2,), torch.nan))

    def forward(self, x_BF: Tensor) -> Tensor:
        self.nan.fill_(torch.nan)
        self.zero.fill_(-0.0)
        self.still_nan.copy_(self.still_nan.clone())
        return x_BF * self.weight


@pytest.mark.parametrize("workers", [1, 2])
def test_changes_are_found_by_bytes(workers: int) -> None:
    setup = Setup(model=Poisoned(), plan=plan_of(64, 3), steps=2)
    for seen in work_in_threads(workers, setup):
        found = buffers_of(seen)
        assert found["nan"].isnan().all()
        assert same_bytes(found["zero"], torch.full((2,), -0.0))
        assert same_bytes(found["still_nan"], setup.model.still_nan)  # type: ignore[arg-type]


def test_every_lane_starts_from_the_same_buffers() -> None:
    starts: list[float] = []

    class Watched(Normed):
        def forward(self, x_BF: Tensor) -> Tensor:
            starts.append(float(self.norm.running_mean))  # type: ignore[arg-type]
            return super().forward(x_BF)

    work_in_threads(1, Setup(model=Watched(), plan=plan_of(64, 8, micro_batch=1), steps=2))
    first, second = set(starts[:8]), set(starts[8:])
    assert first == {0.0}
    assert len(second) == 1
    assert second != first


class Late(nn.Module):
    """Makes a buffer when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(1))
        return x * self.scale


def test_a_buffer_that_appears_in_a_forward_is_named() -> None:
    with pytest.raises(UsageError, match=r"another set of buffers after lane 0: model\.seen"):
        work_in_threads(1, Setup(model=Late(), plan=plan_of(8, 2), steps=1))
