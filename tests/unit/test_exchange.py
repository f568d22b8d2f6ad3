"""The exchange: with any number of workers the bytes of one worker, which are those of the tree over plain autograd."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.errors import TeamError
from paceline.lanes import lanes_of
from paceline.reduction.exchange import Exchange
from paceline.reduction.tree import Node, cover
from paceline.step import Step
from paceline.team import SoloTeam, Team, ThreadTeam
from teamwork import Seen, Setup, plain_step, plan_of, same_bytes, work, work_in_threads

CPU = torch.device("cpu")
# Workers that divide the lanes and such that do not; lanes a power of two or not; a lane for each worker.
SOME_SIZES = [(8, 2), (8, 3), (8, 8), (12, 5)]
SIZES = [
    pytest.param(lanes, workers, marks=[] if (lanes, workers) in SOME_SIZES else pytest.mark.long)
    for lanes in (1, 2, 3, 5, 6, 7, 8, 12)
    for workers in range(1, min(lanes, 8) + 1)
]


def mlp() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 6))


def alone(setup: Setup) -> Seen:
    team = SoloTeam(CPU)
    try:
        return work(team, setup)
    finally:
        team.close()


def assert_same_on_all(setup: Setup, workers: int) -> list[Seen]:
    expected = alone(setup)
    everyone = work_in_threads(workers, setup)
    for seen in everyone:
        assert seen.digest == expected.digest
        assert seen.done == expected.done
        for name, grad in expected.grads.items():
            assert same_bytes(seen.grads[name], grad), name
    return everyone


def tree_sum(values: list[Tensor]) -> Tensor:
    """From the tree's definition and nothing of the package."""
    if len(values) == 1:
        return values[0]
    middle = max(2**k for k in range(8) if 2**k < len(values))
    return tree_sum(values[:middle]) + tree_sum(values[middle:])


def gradients_by_plain_autograd(setup: Setup) -> dict[str, Tensor]:
    """The gradients of the first step: per lane by autograd alone, then the tree, then one division."""
    model = copy.deepcopy(setup.model)
    lanes: list[dict[str, Tensor]] = []
    weight = 0
    for lane in range(setup.plan.lanes):
        sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
        for indices in setup.plan.lane(0, lane):
            x_BF, y_BF = (torch.stack(part) for part in zip(*(setup.data[int(i)] for i in indices), strict=True))
            loss = (model(x_BF) - y_BF).square().sum()
            for name, grad in zip(sums, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                sums[name] += grad
            weight += len(indices)
        lanes.append(sums)
    return {name: tree_sum([sums[name] for sums in lanes]) / weight for name in lanes[0]}


@pytest.mark.parametrize(("lanes", "workers"), SIZES)
def test_any_number_of_workers_gives_the_bytes_of_one(lanes: int, workers: int) -> None:
    assert_same_on_all(Setup(model=mlp(), plan=plan_of(64, lanes, micro_steps=2)), workers)


@pytest.mark.parametrize(("lanes", "workers"), [(3, 2), (7, 7), (8, 3), (12, 5)])
def test_the_gradients_are_the_tree_over_plain_autograd(lanes: int, workers: int) -> None:
    def look_before_update(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x_BF, y_BF in step:
            step.backward((model(x_BF) - y_BF).square().sum(), weight=len(x_BF))
        step.update(optimizer)

    setup = Setup(model=mlp(), plan=plan_of(64, lanes, micro_steps=2), train_step=look_before_update, steps=1)
    expected = gradients_by_plain_autograd(setup)
    for seen in work_in_threads(workers, setup):
        for name, grad in expected.items():
            assert same_bytes(seen.grads[name], grad), name


@pytest.mark.parametrize(("lanes", "workers", "bucket_bytes"), [(8, 3, 1), (8, 3, 500), (5, 4, 200)])
def test_where_buckets_end_moves_no_bit(lanes: int, workers: int, bucket_bytes: int) -> None:
    plan = plan_of(64, lanes)
    expected = alone(Setup(model=mlp(), plan=plan))
    for seen in work_in_threads(workers, Setup(model=mlp(), plan=plan, bucket_bytes=bucket_bytes)):
        assert seen.digest == expected.digest


@pytest.mark.parametrize(("samples", "lanes", "workers"), [(1, 8, 3), (9, 3, 2), (13, 8, 8)])
def test_short_steps_with_empty_lanes_and_idle_workers(samples: int, lanes: int, workers: int) -> None:
    data = TensorDataset(*torch.randn(2, samples, 6, generator=torch.Generator().manual_seed(1)).unbind())
    assert_same_on_all(Setup(model=mlp(), plan=plan_of(samples, lanes), data=data), workers)


class Odd(nn.Module):
    """Tied weights, a branch that only some samples take, a layer that nothing uses, a frozen one, a vector alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.inner.weight
        self.rare = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x_BF: Tensor) -> Tensor:
        h_BF: Tensor = self.tied(torch.tanh(self.inner(self.frozen(x_BF)))) * self.scale
        return h_BF + self.rare(x_BF) if bool(x_BF[0, 0] > 1.2) else h_BF


@pytest.mark.parametrize(("lanes", "workers", "bucket_bytes"), [(8, 3, 1), (5, 3, 2**20), (8, 8, 2**20)])
def test_tied_rare_unused_and_frozen_parameters(lanes: int, workers: int, bucket_bytes: int) -> None:
    setup = Setup(
        model=Odd(),
        plan=plan_of(64, lanes),
        bucket_bytes=bucket_bytes,
        optimizer=lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.5),
    )
    before = dict(setup.model.named_parameters())
    for seen in assert_same_on_all(setup, workers):
        after = dict(seen.model.named_parameters())
        assert seen.grads["unused.weight"] is None
        assert same_bytes(after["unused.weight"], before["unused.weight"])  # AdamW decays what has a gradient
        assert seen.grads["frozen.weight"] is None
        assert not same_bytes(after["rare.weight"], before["rare.weight"])


def test_a_parameter_that_one_lane_of_one_worker_used_has_a_gradient_everywhere() -> None:
    x_SF = torch.zeros(16, 6)
    x_SF[5, 0] = 2.0  # lane 5 of 8
    data = TensorDataset(x_SF, torch.ones(16, 6))
    setup = Setup(model=Odd(), plan=plan_of(16, 8, micro_batch=1), data=data, steps=1)
    for workers in (1, 3):
        for seen in work_in_threads(workers, setup):
            assert seen.grads["rare.bias"] is not None
            assert seen.grads["unused.bias"] is None


class Negative(nn.Module):
    """Its gradient is -0.0 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x_BF: Tensor) -> Tensor:
        return (self.weight * -0.0).sum() + 0 * x_BF


@pytest.mark.parametrize(("lanes", "workers"), [(1, 1), (5, 2)])
def test_negative_zeros_come_out_alike(lanes: int, workers: int) -> None:
    for samples in (1, 64):
        setup = Setup(model=Negative(), plan=plan_of(samples, lanes), steps=1)
        (seen, *_) = assert_same_on_all(setup, workers)
        assert same_bytes(seen.grads["weight"], torch.zeros(5))


def zero_grad_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x_BF, y_BF in step:
        optimizer.zero_grad()
        loss = (model(x_BF) - y_BF).square().sum()
        model.zero_grad(set_to_none=True)
        step.backward(loss, weight=len(x_BF))
        optimizer.zero_grad()
    step.update(optimizer, max_norm=1.0)


@pytest.mark.parametrize(("lanes", "workers", "bucket_bytes"), [(8, 3, 1), (5, 2, 2**20)])
def test_zero_grad_in_the_loop_takes_nothing_away(lanes: int, workers: int, bucket_bytes: int) -> None:
    plan = plan_of(64, lanes, micro_steps=2)
    expected = alone(Setup(model=mlp(), plan=plan))
    for seen in work_in_threads(
        workers, Setup(model=mlp(), plan=plan, train_step=zero_grad_step, bucket_bytes=bucket_bytes)
    ):
        assert seen.digest == expected.digest


def penalty_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A gradient penalty: with ``create_graph`` autograd accumulates out of place."""
    for x_BF, y_BF in step:
        loss = (model(x_BF) - y_BF).square().sum()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        step.backward(loss + 0.1 * torch.stack([g.square().sum() for g in grads]).sum(), weight=len(x_BF))
    step.update(optimizer, max_norm=1.0)


class CreatesGraph(Tensor):
    """A loss whose own backward builds a graph, as a user's ``loss.backward(create_graph=True)`` does."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        torch.autograd.backward([self.as_subclass(Tensor)], create_graph=True)


def create_graph_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x_BF, y_BF in step:
        step.backward((model(x_BF) - y_BF).square().sum().as_subclass(CreatesGraph), weight=len(x_BF))
    step.update(optimizer, max_norm=1.0)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.grad_fn is None


@pytest.mark.parametrize(("train_step", "lanes", "workers"), [(penalty_step, 8, 3), (create_graph_step, 5, 4)])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_second_order_gradients(train_step: Any, lanes: int, workers: int) -> None:
    plan = plan_of(64, lanes, micro_steps=2)
    assert_same_on_all(Setup(model=mlp(), plan=plan, train_step=train_step, bucket_bytes=100), workers)
    if train_step is create_graph_step:
        plain, graph = (alone(Setup(model=mlp(), plan=plan, train_step=some)) for some in (plain_step, train_step))
        assert plain.digest == graph.digest


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_of_several_dtypes(dtype: torch.dtype) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6, dtype=dtype), nn.Linear(6, 6)

        def forward(self, x_BF: Tensor) -> Tensor:
            result: Tensor = self.c(self.b(self.a(x_BF).to(dtype)).float())
            return result

    for lanes, workers in [(8, 3), (5, 5)]:
        assert_same_on_all(Setup(model=Mixed(), plan=plan_of(64, lanes)), workers)


def test_allreduce_is_close_and_not_promised_to_be_equal() -> None:
    plan = plan_of(64, 8)
    exact = alone(Setup(model=mlp(), plan=plan))
    for workers in (1, 3, 4):
        for seen in work_in_threads(workers, Setup(model=mlp(), plan=plan, gradients="allreduce")):
            for name, parameter in seen.model.state_dict().items():
                torch.testing.assert_close(parameter, exact.model.state_dict()[name])


def test_another_order_of_additions_would_show() -> None:
    """Else equal bytes would say nothing about the tree."""
    plan = plan_of(64, 8)
    exact = alone(Setup(model=mlp(), plan=plan))
    others = [alone(Setup(model=mlp(), plan=plan, gradients="allreduce"))]
    others += [work_in_threads(n, Setup(model=mlp(), plan=plan, gradients="allreduce"))[0] for n in (3, 5)]
    assert any(other.digest != exact.digest for other in others)


def exchanges_and_backwards(*, overlap: bool) -> list[str]:
    """What happens in a step of two lanes of two micro-batches, in order; two layers, a bucket for each parameter."""
    events: list[str] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x_BF: Tensor) -> Tensor:
            h_BF = self.first(x_BF)
            if h_BF.requires_grad:
                h_BF.register_hook(lambda grad: events.append("first layer"))
            result: Tensor = self.second(h_BF)
            return result

    class Listening(SoloTeam):
        def submit(self, job: Callable[[], Any]) -> Any:
            events.append("exchange")
            pending = super().submit(job)
            pending.wait()
            return pending

    team = Listening(CPU)
    plan = plan_of(64, 2, micro_steps=2)
    work(team, Setup(model=Watched(), plan=plan, steps=1, bucket_bytes=1, overlap=overlap))
    team.close()
    return events


def test_buckets_leave_while_backward_still_runs() -> None:
    """The first exchange is at work before the first layer's gradient is there: that is the overlap."""
    events = exchanges_and_backwards(overlap=True)
    assert events[:3] == ["first layer"] * 3  # all backwards but the last: nothing leaves
    table, *rest = events[3:]
    assert table == "exchange"  # losses and weights, before the last backward
    assert rest.index("first layer") == 2  # the second layer's two buckets
    assert rest.count("exchange") >= 4


def test_without_overlap_nothing_leaves_before_the_last_backward_has_ended() -> None:
    events = exchanges_and_backwards(overlap=False)
    assert events[:4] == ["first layer"] * 4
    assert events[4:].count("exchange") >= 5
    assert "first layer" not in events[4:]


@pytest.mark.parametrize(("lanes", "workers"), [(8, 1), (8, 3), (5, 5)])
def test_overlap_moves_no_bit(lanes: int, workers: int) -> None:
    setup = Setup(model=Odd(), plan=plan_of(64, lanes), bucket_bytes=100)
    expected = alone(setup)
    for seen in work_in_threads(workers, dataclasses.replace(setup, overlap=False)):
        assert seen.digest == expected.digest


def exchanged(
    values: Sequence[Tensor], workers: int, divisor: Tensor, gradients: Any = "exact", compress: Any = "none"
) -> list[Tensor]:
    """The gradients that each worker has after exchanges of ``values``, one for each lane."""
    lanes = len(values)

    def reduce(team: Team) -> Tensor:
        mine = lanes_of(team.rank, team.world_size, lanes)
        exchange = Exchange(team, lanes, gradients, compress)
        for _ in range(2):  # the second time in the inboxes of the first
            parts: list[tuple[Node, Tensor]] = [((lane, lane + 1), values[lane].clone()) for lane in mine]
            team.submit(lambda parts=parts: exchange.reduce(parts, parts[0][1], divisor)).wait()  # type: ignore[misc]
        team.submit(exchange.finish).wait()
        return parts[0][1]

    return ThreadTeam.run(workers, reduce)


@pytest.mark.parametrize(("lanes", "workers"), [(8, 1), (8, 3), (12, 5), (7, 7)])
def test_one_exchange_sums_every_part_once_and_divides(lanes: int, workers: int) -> None:
    """Chunks of any size, the empty ones of a small bucket among them."""
    divisor = torch.tensor(3.0, dtype=torch.float64)
    for size in (1, 15, 16, 17, 1000):
        values = torch.randn(lanes, size, generator=torch.Generator().manual_seed(size))
        values *= torch.logspace(-6, 6, lanes)[:, None]
        expected = tree_sum(list(values)) / divisor
        assert expected.dtype == torch.float32
        for result in exchanged(list(values), workers, divisor):
            assert same_bytes(result, expected), size


@pytest.mark.parametrize("workers", [1, 2])
def test_compressed_gradients_are_rounded_once_by_each_worker_and_divided_in_float32(workers: int) -> None:
    """With up to two workers there is one order of additions, and so one right answer."""
    values = list(torch.randn(4, 1000, generator=torch.Generator().manual_seed(3)))
    sums = [tree_sum(values[lanes.start : lanes.stop]) for lanes in (lanes_of(r, workers, 4) for r in range(workers))]
    expected = functools.reduce(torch.add, [part.bfloat16() for part in sums]).float() / 3
    for result in exchanged(values, workers, torch.tensor(3.0, dtype=torch.float64), "allreduce", "bf16"):
        assert same_bytes(result, expected)


def test_only_float32_is_compressed() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        values = list(torch.randn(2, 100, generator=torch.Generator().manual_seed(4)).to(dtype))
        plain, compressed = (
            exchanged(values, 2, torch.tensor(3.0), "allreduce", compress)[1] for compress in ("none", "bf16")
        )
        assert same_bytes(plain, compressed)


def test_a_model_learns_from_compressed_gradients_alike_on_all_workers() -> None:
    plan = plan_of(64, 8)
    exact = alone(Setup(model=mlp(), plan=plan)).model.state_dict()
    everyone = work_in_threads(3, Setup(model=mlp(), plan=plan, gradients="allreduce", compress="bf16"))
    assert len({seen.digest for seen in everyone}) == 1
    for name, parameter in everyone[0].model.state_dict().items():
        assert not same_bytes(parameter, exact[name])
        torch.testing.assert_close(parameter, exact[name], rtol=0.02, atol=0.002)


def test_nobody_sends_more_than_a_ring_would_when_workers_divide_the_lanes() -> None:
    size, workers = 16 * 64, 4
    sent: dict[int, int] = {}

    def reduce(team: Team) -> None:
        swap = team.swap

        def counting(sends: Any, receives: Any) -> Any:
            sent[team.rank] = sent.get(team.rank, 0) + sum(tensor.numel() for _, tensor in sends)
            return swap(sends, receives)

        team.swap = counting  # type: ignore[method-assign]
        mine = lanes_of(team.rank, workers, 8)
        parts: list[tuple[Node, Tensor]] = [(node, torch.ones(size)) for node in cover(8, mine.start, mine.stop)]
        exchange = Exchange(team, 8, "exact")
        team.submit(lambda: exchange.reduce(parts, parts[0][1], torch.tensor(1.0))).wait()
        team.submit(exchange.finish).wait()

    ThreadTeam.run(workers, reduce)
    assert sent == {rank: math.ceil(2 * size * (workers - 1) / workers) for rank in range(workers)}


def test_a_thread_that_fails_ends_the_others_and_is_the_error_that_is_raised() -> None:
    def job(team: Team) -> None:
        if team.rank == 1:
            raise ValueError("mine")
        team.gather(team.rank)

    with pytest.raises(ValueError, match="mine"):
        ThreadTeam.run(3, job)


def test_a_worker_that_leaves_early_is_missed() -> None:
    def job(team: Team) -> None:
        if team.rank == 1:
            raise TeamError("gone")
        team.gather(team.rank)

    with pytest.raises(TeamError):
        ThreadTeam.run(3, job)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_gather_and_broadcast(workers: int) -> None:
    def job(team: Team) -> tuple[list[Any], list[Tensor]]:
        tensors = [torch.full((3,), float(team.rank)), torch.full((2, 2), team.rank)]
        team.broadcast(tensors)
        team.barrier()
        return team.gather({"rank": team.rank}), tensors

    for gathered, tensors in ThreadTeam.run(workers, job):
        assert gathered == [{"rank": rank} for rank in range(workers)]
        assert not any(tensor.any() for tensor in tensors)
