"""Several phases of a step over the same samples, each a transaction; and totals that are known before any backward."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from paceline.config import Execution, Recipe
from paceline.errors import NonFiniteError, RunStopped, UsageError
from paceline.run import Run
from paceline.step import Done, Step
from paceline.team import Team, ThreadTeam
from teamwork import Setup, plan_of, same_bytes, work, work_in_threads

RECIPE = Recipe(batch=8, micro_batch=1, lanes=4, steps=5)


class Noisy(Dataset[Any]):
    """Numbered samples; each is made with noise from the three generators."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.randn(4) + float(np.random.rand()) + random.random()


class Pair:
    """Two models with an optimizer each, as a GAN has, and what their train steps saw."""

    def __init__(self, run: Run) -> None:
        torch.manual_seed(0)
        self.run = run
        self.d, self.g = (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 1)) for _ in range(2))
        self.d_optimizer = torch.optim.AdamW(self.d.parameters(), lr=0.01)
        self.g_optimizer = torch.optim.SGD(self.g.parameters(), lr=0.02, momentum=0.9)
        run.track(d=self.d, g=self.g, d_optimizer=self.d_optimizer, g_optimizer=self.g_optimizer)
        self.samples: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
        self.drawn: dict[tuple[int, int], list[float]] = {}
        self.spoiled: tuple[int, int] | None = None

    def d_step(self, step: Step) -> None:
        self._step(step, self.d, self.d_optimizer)

    def g_step(self, step: Step) -> None:
        self._step(step, self.g, self.g_optimizer)

    def _step(self, step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        at = step.number, step.phase
        self.samples[at], self.drawn[at] = [], []
        for index_B, x_BF in step:
            self.samples[at].append((int(index_B), x_BF.numpy().tobytes()))
            self.drawn[at].append(float(torch.rand(())) + random.random() + float(np.random.rand()))
            loss = (model(x_BF) - 1).square().sum()
            step.backward(loss * torch.nan if at == self.spoiled else loss, weight=len(x_BF))
        self.drawn[at].append(float(torch.rand(())))
        step.update(optimizer, max_norm=1.0)

    def steps(self) -> Iterator[tuple[Done, ...]]:
        return self.run.steps(Noisy(), self.d_step, self.g_step)


def trained(how: Execution | None = None, recipe: Recipe = RECIPE, **run: Any) -> tuple[str, list[tuple[Done, ...]]]:
    with Run(recipe, how, **run) as one:
        done = list(Pair(one).steps())
        return one.digest(), done


def test_all_phases_of_a_step_see_the_same_samples_and_draw_numbers_of_their_own(process_state: None) -> None:
    with Run(RECIPE) as run:
        pair = Pair(run)
        assert len(list(pair.steps())) == 5
    assert set(pair.samples) == {(step, phase) for step in range(5) for phase in range(2)}
    for step in range(5):
        assert pair.samples[step, 0] == pair.samples[step, 1]
    epoch = [index for step in range(3) for index, _ in pair.samples[step, 0]]
    assert sorted(epoch) == list(range(21))
    drawn = [number for numbers in pair.drawn.values() for number in numbers]
    assert len(set(drawn)) == len(drawn) == 2 * (4 * 8 + 5) + 2 * 5


def test_a_step_of_one_phase_is_done_and_of_several_a_tuple(process_state: None) -> None:
    with Run(RECIPE) as run:
        pair = Pair(run)
        first = next(iter(run.steps(Noisy(), pair.d_step)))
        assert isinstance(first, Done)
    with Run(RECIPE) as run:
        pair = Pair(run)
        three = next(iter(run.steps(Noisy(), pair.d_step, pair.g_step, pair.g_step)))
        assert [pair.samples[0, phase] == pair.samples[0, 0] for phase in range(3)] == [True] * 3
        assert three[0] == first
        assert [done.step for done in three] == [1, 1, 1]
        assert [done.lr for done in three] == [0.01, 0.02, 0.02]
        assert [done.samples for done in three] == [8, 8, 8]
        assert three[2].loss < three[1].loss


def test_steps_count_once_however_many_phases(process_state: None) -> None:
    _, done = trained()
    assert [[one.step for one in phases] for phases in done] == [[n, n] for n in (1, 2, 3, 4, 5)]
    assert [[one.epoch for one in phases] for phases in done] == [[0, 0]] * 3 + [[1, 1]] * 2
    assert [[one.samples for one in phases] for phases in done] == [[8, 8]] * 2 + [[5, 5]] + [[8, 8]] * 2


def test_the_number_of_phases_changes_no_other_ones_bits(process_state: None) -> None:
    """The first phase trains as it would alone: the second neither takes its samples nor its random numbers."""
    with Run(RECIPE) as run:
        alone = Pair(run)
        losses = [done.loss for done in run.steps(Noisy(), alone.d_step)]
    with Run(RECIPE) as run:
        pair = Pair(run)
        assert [done.loss for done, _ in pair.steps()] == losses
    for name, tensor in alone.d.state_dict().items():
        assert same_bytes(pair.d.state_dict()[name], tensor)
    for name, tensor in alone.g.state_dict().items():
        assert not same_bytes(pair.g.state_dict()[name], tensor)


@pytest.mark.parametrize("phase", [0, 1])
def test_a_skip_in_one_phase_leaves_the_other(process_state: None, phase: int) -> None:
    recipe = Recipe(batch=8, micro_batch=1, lanes=4, steps=5, on_nonfinite="skip")
    with Run(recipe) as run:
        pair = Pair(run)
        pair.spoiled = 2, phase
        before: list[list[Tensor]] = []
        skipped = []
        for done in pair.steps():
            before.append([next(iter(model.parameters())).detach().clone() for model in (pair.d, pair.g)])
            skipped.append([one.skipped for one in done])
        assert skipped[2] == [phase == 0, phase == 1]
        assert not any(one for number, step in enumerate(skipped) for one in step if number != 2)
        assert [same_bytes(a, b) for a, b in zip(before[1], before[2], strict=True)] == skipped[2]
        assert run.position == 5


def test_a_phase_that_raises_is_named(process_state: None) -> None:
    with Run(RECIPE) as run:
        pair = Pair(run)
        pair.spoiled = 1, 1
        with pytest.raises(NonFiniteError, match="step 2, phase 2 is not finite"):
            list(pair.steps())
        assert run.position == 1


@pytest.mark.parametrize("stop_at", [1, 3, 4])
def test_stopped_between_steps_and_resumed_is_undisturbed(process_state: None, tmp_path: Path, stop_at: int) -> None:
    digest, all_done = trained()
    run_dir = str(tmp_path / "run")
    _, first = trained(Execution(run_dir=run_dir, stop_at=stop_at))
    again, rest = trained(Execution(run_dir=run_dir), resume="must")
    assert len(first) == stop_at
    assert first + rest == all_done
    assert again == digest


def test_a_stop_that_comes_in_a_phase_waits_for_the_others(process_state: None) -> None:
    with Run(RECIPE) as run:
        pair = Pair(run)

        def d_step(step: Step) -> None:
            if step.number == 1:
                run.request_stop(75)
            pair.d_step(step)

        done: list[tuple[Done, ...]] = []
        with pytest.raises(RunStopped, match="75"):
            done.extend(run.steps(Noisy(), d_step, pair.g_step))
        assert [[one.step for one in phases] for phases in done] == [[1, 1], [2, 2]]
        assert run.stopped == 75


def test_phases_come_through_loader_workers_too(process_state: None) -> None:
    assert trained(Execution(loader_workers=1)) == trained()


# Totals.

COUNTED = TensorDataset(torch.arange(21), torch.randn(21, 6, generator=torch.Generator().manual_seed(1)))
BIG = 2**61
WORKERS = [1, 2, 3, 8]


def big(batch: Any) -> int:
    """Beyond what a float64 can count."""
    return sum(BIG + int(index) for index in batch[0])


def fraction(batch: Any) -> float:
    return float((batch[1][:, 0] / 3).double().sum())


def counting(setup: dict[str, Any], workers: int) -> list[tuple[Any, ...]]:
    """All that `Step.total` returned in two steps, on each worker: both totals, and what the loop saw after them."""

    def job(team: Team) -> tuple[Any, ...]:
        seen: list[Any] = []

        def train_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            assert torch.is_grad_enabled()
            seen.append((step.total(big), step.total(fraction), step.total(lambda batch: batch[0].numel())))
            indices = []
            for index_B, x_BF in step:
                indices += index_B.tolist()
                step.backward(model(x_BF).square().sum(), weight=len(x_BF))
            step.update(optimizer)
            seen.append(indices)

        work(team, Setup(model=nn.Linear(6, 6), data=COUNTED, train_step=train_step, **setup))
        return tuple(seen)

    return ThreadTeam.run(workers, job)


@pytest.mark.parametrize("workers", WORKERS)
def test_totals_are_those_of_all_lanes_the_uneven_and_the_empty_too(workers: int) -> None:
    """21 samples over 8 lanes, 16 a step: the second step has 5, and 3 empty lanes."""
    setup = {"plan": plan_of(21, 8, micro_batch=1, micro_steps=2), "steps": 2}
    everyone = counting(setup, workers)
    (alone,) = counting(setup, 1)
    for seen in everyone:
        for number, indices in ((0, range(16)), (1, range(16, 21))):
            exact, floats, samples = seen[2 * number]
            assert type(exact) is int
            assert exact == sum(BIG + index for index in indices)
            assert samples == len(indices)
            assert floats.hex() == alone[2 * number][1].hex()
            each = [fraction(COUNTED[index : index + 1]) for index in indices]
            assert floats == pytest.approx(float(sum(map(Fraction, each))), rel=1e-15)
    for number, indices in ((1, range(16)), (3, range(16, 21))):
        assert sorted(index for seen in everyone for index in seen[number]) == list(indices)


def test_a_total_reads_the_batches_of_its_own_phase_once(process_state: None) -> None:
    """Counted before or not, the loop sees the same samples and draws the same numbers."""

    def counted(step: Step) -> None:
        indices = [0]
        totals = [step.total(lambda batch: int(batch[0].sum()) + 0 * int(torch.randint(9, ()))) for _ in range(3)]
        for index_B, x_BF in step:
            indices.append(int(index_B))
            step.backward(pair.d(x_BF).square().sum(), weight=1)
        assert totals == [sum(indices)] * 3
        step.update(pair.d_optimizer)

    def plain(step: Step) -> None:
        for _, x_BF in step:
            step.backward(pair.d(x_BF).square().sum(), weight=1)
        step.update(pair.d_optimizer)

    digests = []
    for train_step in (counted, plain):
        with Run(RECIPE) as run:
            pair = Pair(run)
            assert len(list(run.steps(Noisy(), pair.g_step, train_step))) == 5
            digests.append(run.digest())
    assert digests[0] == digests[1]


def test_a_loss_with_two_normalisers_has_the_gradient_of_the_whole_batch() -> None:
    """Means over unlike numbers of rows, as `Step.total` shows it."""

    def of_kind(batch: Any, kind: int) -> Tensor:
        rows_KF: Tensor = batch[1][batch[0] % 5 == 0] if kind else batch[1][batch[0] % 5 != 0]
        return rows_KF

    def loss(model: nn.Module, batch: Any, kind: int) -> Tensor:
        out_KF: Tensor = model(of_kind(batch, kind))
        return (out_KF.abs() if kind else out_KF.square()).sum()

    def train_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        first = step.total(lambda batch: len(of_kind(batch, 0)))
        second = step.total(lambda batch: len(of_kind(batch, 1)))
        assert (first, second) == (16, 5)
        for batch in step:
            both = loss(model, batch, 0) + loss(model, batch, 1) * first / second
            step.backward(both, weight=len(of_kind(batch, 0)))
        step.update(optimizer)

    torch.manual_seed(3)
    model = nn.Linear(6, 6)
    whole = COUNTED[:21]
    (loss(model, whole, 0) / 16 + loss(model, whole, 1) / 5).backward()
    setup = Setup(model=model, plan=plan_of(21, 4, micro_steps=3), data=COUNTED, train_step=train_step, steps=1)
    for workers in (1, 3):
        for seen in work_in_threads(workers, setup):
            for name, parameter in model.named_parameters():
                grad = seen.grads[name]
                assert grad is not None
                torch.testing.assert_close(grad, parameter.grad)


def total_in_the_loop(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in step:
        step.total(len)


def total_after_the_loop(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _, x_BF in step:
        step.backward(model(x_BF).sum(), weight=1)
    step.total(len)


def total_after_the_update(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _, x_BF in step:
        step.backward(model(x_BF).sum(), weight=1)
    step.update(optimizer)
    step.total(len)


@pytest.mark.parametrize("train_step", [total_in_the_loop, total_after_the_loop, total_after_the_update])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_total_that_comes_too_late_is_refused_by_every_worker(workers: int, train_step: Any) -> None:
    def job(team: Team) -> str:
        with pytest.raises(UsageError) as caught:
            work(team, Setup(model=nn.Linear(6, 6), plan=plan_of(21, 4), data=COUNTED, train_step=train_step))
        return str(caught.value)

    for text in ThreadTeam.run(workers, job):
        assert text.startswith("cannot count over the step: found ")
        assert "Move step.total before `for batch in step`" in text
