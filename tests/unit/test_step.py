"""One step: what it reports, what all workers decide together, and every way to misuse it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from paceline.errors import NonFiniteError, UsageError
from paceline.step import Policy, Signals, Step
from paceline.team import SoloTeam, Team, ThreadTeam
from teamwork import Seen, Setup, plain_step, plan_of, same_bytes, work, work_in_threads

WORKERS = [1, 2, 3, 8]


def line() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(6, 6)


def solo(setup: Setup) -> Seen:
    team = SoloTeam(torch.device("cpu"))
    try:
        return work(team, setup)
    finally:
        team.close()


def one_step(train_step: Callable[[Step, nn.Module, torch.optim.Optimizer], None]) -> Seen:
    return solo(Setup(model=line(), plan=plan_of(64, 4, micro_steps=2), steps=1, train_step=train_step))


@pytest.mark.parametrize("workers", WORKERS)
def test_done_counts_steps_epochs_samples_and_weights(workers: int) -> None:
    data = TensorDataset(*torch.randn(2, 21, 6).unbind())
    seen = work_in_threads(workers, Setup(model=line(), plan=plan_of(21, 8, micro_batch=1), data=data, steps=5))
    assert all(one.done == seen[0].done for one in seen)
    done = seen[0].done
    assert [one.step for one in done] == [1, 2, 3, 4, 5]
    assert [one.epoch for one in done] == [0, 0, 0, 1, 1]
    assert [one.samples for one in done] == [8, 8, 5, 8, 8]
    assert [one.weight for one in done] == [8, 8, 5, 8, 8]
    assert all(len(one.lane_losses) == 8 for one in done)
    assert done[2].lane_losses[5:] == (0.0, 0.0, 0.0)
    assert all(one.loss == pytest.approx(sum(one.lane_losses) / one.weight) for one in done)
    assert all(one.lr == 0.05 for one in done)
    assert not any(one.skipped or one.stop or one.save_failed for one in done)


def test_a_step_is_what_plain_torch_does_with_the_whole_batch() -> None:
    setup = Setup(model=line(), plan=plan_of(64, 8, micro_steps=2), steps=1)
    (seen,) = work_in_threads(1, setup)
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x_BF, y_BF = setup.data[0:32]
    loss = (model(x_BF) - y_BF).square().sum() / 32
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert seen.done[0].loss == pytest.approx(loss.item())
    assert seen.done[0].grad_norm == pytest.approx(float(norm))
    for ours, theirs in zip(seen.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_learning_rate_is_set_in_every_group_before_the_update() -> None:
    def train_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x_BF, y_BF in step:
            step.backward((model(x_BF) - y_BF).square().sum(), weight=len(x_BF))
        step.update(optimizer, lr=0.0)
        assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]

    def two_groups(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=1.0)

    setup = Setup(model=line(), plan=plan_of(64, 4), steps=2, train_step=train_step, optimizer=two_groups)
    seen = solo(setup)
    assert [done.lr for done in seen.done] == [0.0, 0.0]
    assert same_bytes(seen.model.weight, setup.model.weight)  # type: ignore[arg-type]


def test_several_optimizers_have_one_norm_one_rate_and_one_decision() -> None:
    norms: list[float] = []

    def train_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        one, other = (torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters())
        for x_BF, y_BF in step:
            step.backward((model(x_BF) - y_BF).square().sum(), weight=len(x_BF))
        step.update(one, other, lr=0.3, max_norm=0.5)
        norms.append(float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()))
        assert [some.param_groups[0]["lr"] for some in (one, other)] == [0.3, 0.3]

    seen = one_step(train_step)
    assert norms == [pytest.approx(0.5)]
    assert seen.done[0].lr == 0.3


def test_one_bad_gradient_holds_back_every_optimizer_and_the_buffers() -> None:
    class Spoiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.good, self.bad = nn.Linear(6, 6), nn.Parameter(torch.zeros(6))
            self.norm = nn.BatchNorm1d(1)

        def forward(self, x_BF: Tensor) -> Tensor:
            h_BF: Tensor = self.norm(self.good(x_BF)[:, None])[:, 0]
            return h_BF + self.bad.square().sqrt()  # its gradient at 0 is not a number

    def train_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(model, Spoiled)
        for x_BF, y_BF in step:
            step.backward((model(x_BF) - y_BF).square().sum(), weight=len(x_BF))
        good = torch.optim.SGD([*model.good.parameters(), *model.norm.parameters()], lr=0.1)
        step.update(good, torch.optim.SGD([model.bad], lr=0.1))

    policy = Policy(on_nonfinite="skip", skip_loss_above=None)
    setup = Setup(model=Spoiled(), plan=plan_of(64, 8), train_step=train_step, policy=policy)
    for workers in (1, 3):
        for seen in work_in_threads(workers, setup):
            assert all(done.skipped for done in seen.done)
            for name, tensor in setup.model.state_dict().items():
                assert same_bytes(seen.model.state_dict()[name], tensor), name


def test_gradients_between_the_loop_and_the_update_are_reduced_and_divided() -> None:
    read: list[list[Tensor]] = []

    def train_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x_BF, y_BF in step:
            step.backward((model(x_BF) - y_BF).square().sum(), weight=len(x_BF))
        read.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        step.update(optimizer, max_norm=None)

    setup = Setup(model=line(), plan=plan_of(64, 8), steps=1, train_step=train_step)
    for workers in (1, 3):
        work_in_threads(workers, setup)
    for grads in read[1:]:
        assert all(same_bytes(a, b) for a, b in zip(grads, read[0], strict=True))


class Draws(Dataset[Any]):
    """Each sample draws from all three generators."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(6) + float(np.random.rand()) + index, torch.randn(6)


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_random_numbers_in_a_step_depend_on_where_it_is_and_not_on_the_loading(loader_workers: int) -> None:
    def train_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.rand(step.number + 1)  # what was drawn before does not matter
        drawn: list[float] = []
        for x_BF, y_BF in step:
            drawn.append(float(torch.rand(())) + float(np.random.rand()))
            step.backward((model(x_BF) - y_BF).square().sum(), weight=len(x_BF))
        drawn.append(float(torch.rand(())))  # noise on the gradients, say
        step.update(optimizer)
        seen.append(drawn)

    seen: list[list[float]] = []
    digests = set()
    for loaders in (0, loader_workers):
        setup = Setup(
            model=line(), plan=plan_of(24, 4), data=Draws(), steps=4, train_step=train_step, loader_workers=loaders
        )
        digests.add(solo(setup).digest)
    assert seen[:4] == seen[4:]
    assert len({draw for drawn in seen[:4] for draw in drawn}) == 4 * 5
    assert len(digests) == 1


def test_every_worker_draws_the_same_between_the_loop_and_the_update() -> None:
    """Torch's generator is shared by threads, so workers run one after the other: alone, on their own lanes."""
    draws = []
    for samples in (16, 3):  # another number of micro-batches before

        def train_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            for x_BF, y_BF in step:
                step.backward((model(x_BF) - y_BF).square().sum(), weight=len(x_BF))
            draws.append(float(torch.rand(())))
            step.update(optimizer)

        solo(Setup(model=line(), plan=plan_of(samples, 4), steps=1, train_step=train_step))
    assert draws[0] == draws[1]


# Decisions: from reduced values, alike on every worker.


def poisoned(lane: int, value: float) -> TensorDataset:
    """Step 2 of a plan over 8 lanes by ones has a bad sample in one lane."""
    x_SF, y_SF = torch.randn(2, 24, 6, generator=torch.Generator().manual_seed(1)).unbind()
    x_SF = x_SF.clone()
    x_SF[8 + lane] = value
    return TensorDataset(x_SF, y_SF)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("lane", [0, 5, 7])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_bad_lane_raises_the_same_error_on_every_worker(workers: int, lane: int, value: float) -> None:
    setup = Setup(model=line(), plan=plan_of(24, 8, micro_batch=1), data=poisoned(lane, value))

    def job(team: Team) -> str:
        with pytest.raises(NonFiniteError) as caught:
            work(team, setup)
        return str(caught.value)

    messages = set(ThreadTeam.run(workers, job))
    (message,) = messages
    assert "step 2" in message
    assert f"the loss of lane {lane}" in message
    assert "on_nonfinite: skip" in message


@pytest.mark.parametrize("workers", WORKERS)
def test_one_bad_lane_is_skipped_by_every_worker(workers: int) -> None:
    policy = Policy(on_nonfinite="skip", skip_loss_above=None)
    plan = plan_of(24, 8, micro_batch=1)
    setup = Setup(model=line(), plan=plan, data=poisoned(5, math.nan), policy=policy, steps=3)
    expected = solo(setup)
    for seen in work_in_threads(workers, setup):
        assert [done.skipped for done in seen.done] == [False, True, False]
        assert math.isnan(seen.done[1].loss)
        assert all(math.isfinite(loss) for lane, loss in enumerate(seen.done[1].lane_losses) if lane != 5)
        assert seen.digest == expected.digest
        assert all(parameter.isfinite().all() for parameter in seen.model.parameters())


def test_a_skipped_step_leaves_weights_and_optimizer_alone() -> None:
    policy = Policy(on_nonfinite="skip", skip_loss_above=None)
    plan = plan_of(24, 8, micro_batch=1)
    one = solo(Setup(model=line(), plan=plan, data=poisoned(5, math.nan), policy=policy, steps=1))
    two = solo(Setup(model=line(), plan=plan, data=poisoned(5, math.nan), policy=policy, steps=2))
    assert one.digest == two.digest


class Overflowing(nn.Module):
    """A finite loss with a gradient that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6))

    def forward(self, x_BF: Tensor) -> Tensor:
        return (self.weight * x_BF).square().add(1e-30).sqrt() + self.weight.square().sqrt()


@pytest.mark.parametrize("workers", [1, 3])
def test_a_gradient_that_is_not_finite_counts_too(workers: int) -> None:
    with pytest.raises(NonFiniteError, match="grad_norm=nan"):
        work_in_threads(workers, Setup(model=Overflowing(), plan=plan_of(64, 8)))
    policy = Policy(on_nonfinite="skip", skip_loss_above=None)
    for seen in work_in_threads(workers, Setup(model=Overflowing(), plan=plan_of(64, 8), policy=policy)):
        assert all(done.skipped for done in seen.done)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_loss_above_the_bound_is_skipped_by_every_worker(workers: int) -> None:
    plan = plan_of(64, 8)
    losses = [done.loss for done in solo(Setup(model=line(), plan=plan, steps=4)).done]
    bound = sorted(losses)[-2] + 1e-6
    policy = Policy(on_nonfinite="raise", skip_loss_above=bound)
    expected = solo(Setup(model=line(), plan=plan, steps=4, policy=policy))
    assert any(done.skipped for done in expected.done)
    assert not all(done.skipped for done in expected.done)
    for seen in work_in_threads(workers, Setup(model=line(), plan=plan, steps=4, policy=policy)):
        assert seen.digest == expected.digest
        assert [done.skipped for done in seen.done] == [done.loss > bound for done in seen.done]


@pytest.mark.parametrize("workers", [2, 3])
def test_what_one_worker_signals_every_worker_learns_in_the_same_step(workers: int) -> None:
    calls: dict[int, int] = {}

    def signals(team: Team) -> Signals:
        calls[team.rank] = calls.get(team.rank, 0) + 1
        last = team.rank == workers - 1
        return Signals(stop=130 if last and calls[team.rank] == 2 else 0, save_failed=last and calls[team.rank] == 3)

    for seen in work_in_threads(workers, Setup(model=line(), plan=plan_of(64, 8), signals=signals, steps=3)):
        assert [done.stop for done in seen.done] == [0, 130, 0]
        assert [done.save_failed for done in seen.done] == [False, False, True]


def test_the_largest_stop_wins() -> None:
    setup = Setup(model=line(), plan=plan_of(64, 8), signals=lambda team: Signals(stop=[75, 130, 0][team.rank]))
    for seen in work_in_threads(3, setup):
        assert seen.done[0].stop == 130


# Misuse: each a UsageError that says what is needed.


def twice_over(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    plain_step(step, model, optimizer)
    for _ in step:
        pass


def no_backward(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in step:
        pass


def backward_twice(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x_BF, _ in step:
        step.backward(model(x_BF).sum(), weight=1)
        step.backward(model(x_BF).sum(), weight=1)


def backward_before_the_loop(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step.backward(model(torch.zeros(1, 6)).sum(), weight=1)


def backward_after_the_loop(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x_BF, _ in step:
        loss = model(x_BF).sum()
        step.backward(loss, weight=1)
    step.backward(model(torch.zeros(1, 6)).sum(), weight=1)


def mean_per_sample(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x_BF, _ in step:
        step.backward(model(x_BF).sum(1), weight=1)


def update_before_the_loop(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step.update(optimizer)


def update_in_the_loop(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x_BF, _ in step:
        step.backward(model(x_BF).sum(), weight=1)
        step.update(optimizer)


def update_after_break(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x_BF, _ in step:
        step.backward(model(x_BF).sum(), weight=1)
        break
    step.update(optimizer)


def no_update(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x_BF, _ in step:
        step.backward(model(x_BF).sum(), weight=1)


def update_twice(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    plain_step(step, model, optimizer)
    step.update(optimizer)


def update_nothing(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x_BF, _ in step:
        step.backward(model(x_BF).sum(), weight=1)
    step.update()


def nothing(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def no_weight(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x_BF, _ in step:
        step.backward(model(x_BF).sum(), weight=0)


def passing(loss: Any = None, weight: Any = 1) -> Any:
    """A train step that passes a loss or a weight which is none."""

    def train_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x_BF, _ in step:
            step.backward(model(x_BF).sum() if loss is None else loss, weight=weight)

    return train_step


@pytest.mark.parametrize(
    ("train_step", "says"),
    [
        (passing(loss=3.0), "a loss of type float"),
        (passing(loss=torch.tensor(3.0)), "a loss without a gradient"),
        (passing(weight="many"), "a weight of type str"),
        (passing(weight=None), "found no weight"),
        (passing(weight=torch.ones(2)), "a weight of shape (2,)"),
        (passing(weight=-1), "a weight of -"),
        (passing(weight=torch.tensor(float("nan"))), "a weight of nan of lane 0"),
        (twice_over, "a second time"),
        (no_backward, "a micro-batch without step.backward"),
        (backward_twice, "step.backward was called already"),
        (backward_before_the_loop, "in the loop over the step"),
        (backward_after_the_loop, "the loop over the step has ended"),
        (mean_per_sample, "loss.sum()"),
        (update_before_the_loop, "after the loop over the step"),
        (update_in_the_loop, "after the loop over the step"),
        (update_after_break, "after the loop over the step"),
        (update_twice, "step.update was called already"),
        (update_nothing, "no optimizer"),
        (no_update, "without step.update"),
        (nothing, "nothing was done with the step"),
        (no_weight, "a weight of 0 over all lanes"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_misuse_is_an_error_that_says_what_is_needed(train_step: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        one_step(train_step)
    assert says in str(caught.value)
    assert caught.value.found
    assert caught.value.needed
