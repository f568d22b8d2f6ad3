"""What cannot be right is an error that says what to do: lost gradients, unreduced ones, other names, no weight."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from paceline.config import Execution, Recipe
from paceline.errors import CheckpointError, PacelineError, UsageError
from paceline.events import read_events
from paceline.run import Run
from paceline.step import Step
from paceline.team import Team, ThreadTeam
from plain import train_plainly
from teamwork import Setup, plain_step, plan_of, same_bytes, work, work_in_threads

TINY, SMALL, LARGE = 1, 200, 2**20
DATA = TensorDataset(*torch.randn(2, 21, 6, generator=torch.Generator().manual_seed(1)).unbind())
RECIPE = Recipe(batch=8, micro_batch=1, lanes=4, steps=4)


def assert_four_beats(error: PacelineError) -> None:
    assert error.problem
    assert error.found
    assert error.needed
    assert error.fix


# Gradients that come when their bucket has left.


class Parts(nn.Module):
    """Linear parts by name, each checkpointed; the same name is the same weights."""

    def __init__(self, names: str, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.parts = nn.ModuleDict({name: nn.Linear(6, 6) for name in names.split()})
        self.names, self.reentrant = names.split(), reentrant

    def forward(self, x_BF: Tensor) -> Tensor:
        h_BF = x_BF.clone().requires_grad_()  # the reentrant kind gives no gradients otherwise
        for name in self.names:
            h_BF = checkpoint(self.parts[name], h_BF, use_reentrant=self.reentrant).tanh()
        return h_BF


@pytest.mark.parametrize("names", ["a b", "a s s b", "s s b", "a s s", "s a s", "s a s b s"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_train_right_or_not_at_all(names: str, reentrant: bool) -> None:
    """A reentrant part runs a backward of its own, so shared weights get a gradient several times."""
    setup = Setup(model=Parts(names, reentrant=reentrant), plan=plan_of(64, 3), steps=1)
    expected = train_plainly(setup)
    for bucket_bytes, workers in itertools.product([TINY, SMALL, LARGE], [1, 2, 3]):
        try:
            everyone = work_in_threads(workers, dataclasses.replace(setup, bucket_bytes=bucket_bytes))
        except UsageError as error:
            assert reentrant
            assert "s" in names
            assert_four_beats(error)
            assert "use_reentrant=False" in str(error)
            continue
        for seen in everyone:
            for name, grad in expected.grads.items():
                assert same_bytes(seen.grads[name], grad), (bucket_bytes, workers, name)
            assert seen.digest == expected.digest


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [TINY, LARGE])
def test_a_backward_behind_the_last_is_refused(workers: int, bucket_bytes: int) -> None:
    def train_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x_BF, y_BF in step:
            step.backward((model(x_BF) - y_BF).square().sum(), weight=len(x_BF))
            model(x_BF).sum().backward()  # gradients are on their way
        step.update(optimizer)

    setup = Setup(model=nn.Linear(6, 6), plan=plan_of(64, 4), train_step=train_step, bucket_bytes=bucket_bytes)
    with pytest.raises(UsageError, match="Add up losses") as caught:
        work_in_threads(workers, setup)
    assert_four_beats(caught.value)


@pytest.mark.parametrize("bucket_bytes", [TINY, LARGE])
def test_a_backward_outside_of_the_step_sends_nothing(bucket_bytes: int) -> None:
    """One worker alone looks at gradients after its updates: no other waits for it, none is changed."""

    def job(team: Team) -> str:
        submitted: list[str] = []
        submit = team.submit

        def listening(job: Callable[[], Any]) -> Any:
            submitted.append("job")
            return submit(job)

        team.submit = listening  # type: ignore[method-assign]

        def train_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            plain_step(step, model, optimizer)
            if team.rank == 1:
                before = len(submitted)
                for _ in range(2):
                    model(torch.ones(1, 6)).sum().backward()
                assert len(submitted) == before

        return work(team, setup(train_step)).digest

    def setup(train_step: Any) -> Setup:
        torch.manual_seed(4)
        return Setup(model=model, plan=plan_of(64, 5), train_step=train_step, bucket_bytes=bucket_bytes)

    model = Parts("a b", reentrant=False)
    (undisturbed,) = work_in_threads(1, setup(plain_step))
    assert ThreadTeam.run(3, job) == [undisturbed.digest] * 3


def test_gradients_may_be_added_between_the_loop_and_the_update() -> None:
    """By a backward too, the same on every worker: after the exchange it is one more term of the sum."""

    def train_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x_BF, y_BF in step:
            step.backward((model(x_BF) - y_BF).square().sum(), weight=len(x_BF))
        before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        (0.1 * sum(parameter.square().sum() for parameter in model.parameters())).backward()  # type: ignore[union-attr]
        for name, parameter in model.named_parameters():
            expected = before[name] + 0.2 * parameter.detach()
            torch.testing.assert_close(parameter.grad, expected)
        step.update(optimizer)

    digests = set()
    for workers in (1, 2, 3):
        model = Parts("a b", reentrant=False)
        for seen in work_in_threads(workers, Setup(model=model, plan=plan_of(64, 5), train_step=train_step)):
            digests.add(seen.digest)
    assert len(digests) == 1


# Gradients of one worker alone.


class Hidden(nn.Module):
    """A part in a plain list is no part of the module: it is neither tracked nor reduced."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.seen = nn.Linear(6, 6)
        self.hidden = [nn.Linear(6, 6)]

    def forward(self, x_BF: Tensor) -> Tensor:
        h_BF: Tensor = self.hidden[0](self.seen(x_BF).tanh())
        return h_BF


class Frozen(nn.Module):
    """Its first part requires no gradient until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)

    def forward(self, x_BF: Tensor) -> Tensor:
        h_BF: Tensor = self.second(self.first(x_BF).tanh())
        return h_BF


def of_all(model: nn.Module) -> torch.optim.Optimizer:
    hidden: list[nn.Module] = getattr(model, "hidden", [])
    return torch.optim.SGD([p for part in [model, *hidden] for p in part.parameters()], lr=0.1)


def refusals(workers: int, setup: Setup) -> list[UsageError]:
    """Every worker's own error."""

    def job(team: Team) -> UsageError:
        with pytest.raises(UsageError) as caught:
            work(team, setup)
        return caught.value

    return ThreadTeam.run(workers, job)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_update_of_what_is_not_tracked_is_refused_by_every_worker(workers: int) -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    def train_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kept.extend((parameter, parameter.detach().clone()) for parameter in parameters)
        plain_step(step, model, optimizer)

    errors = refusals(workers, Setup(model=Hidden(), plan=plan_of(64, 4), optimizer=of_all, train_step=train_step))
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert_four_beats(error)
        assert "2 parameters whose gradients would be this worker's alone, the first of shape (6, 6)" in str(error)
        assert "Track every module" in str(error)
    assert len(kept) == workers * 4  # refused in the first step, and nothing was changed before
    assert all(same_bytes(parameter.detach(), before) for parameter, before in kept)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_update_of_what_was_unfrozen_after_the_first_step_is_refused_by_every_worker(workers: int) -> None:
    reached: list[int] = []

    def train_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step.number == 2:
            model.requires_grad_(True)
        plain_step(step, model, optimizer)
        reached.append(step.number)

    errors = refusals(
        workers, Setup(model=Frozen(), plan=plan_of(64, 4), optimizer=of_all, train_step=train_step, steps=4)
    )
    assert sorted(reached) == sorted([0, 1] * workers)
    for error in errors:
        assert_four_beats(error)
        assert "required a gradient when run.steps began" in str(error)


@pytest.mark.parametrize("workers", [1, 3])
def test_an_optimizer_may_hold_what_is_frozen(workers: int) -> None:
    model = Frozen()
    for seen in work_in_threads(workers, Setup(model=model, plan=plan_of(64, 4), optimizer=of_all)):
        before, after = dict(model.named_parameters()), dict(seen.model.named_parameters())
        assert same_bytes(after["first.weight"], before["first.weight"])
        assert not same_bytes(after["second.weight"], before["second.weight"])


def test_a_run_refuses_to_update_a_module_that_it_does_not_track(process_state: None) -> None:
    with Run(RECIPE) as run:
        model, other = nn.Linear(6, 6), nn.Linear(6, 6)
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
        run.track(model=model, optimizer=optimizer)
        both = nn.Sequential(model, other)
        with pytest.raises(UsageError, match="Track every module that the optimizer updates"):
            list(run.steps(DATA, lambda step: plain_step(step, both, optimizer)))


# Metrics without a weight.


@pytest.mark.parametrize("weight", [0, 0.0])
def test_a_metric_whose_weight_is_0_over_all_samples_is_named(process_state: None, weight: float) -> None:
    def metrics(batch: Any) -> dict[str, tuple[Tensor | float, float]]:
        return {"right": (1.0, 1.0), "empty": (0.0, weight)}

    with Run(RECIPE) as run:
        with pytest.raises(UsageError, match="the metric empty") as caught:
            run.evaluate(DATA, metrics)
        assert_four_beats(caught.value)
        assert run.evaluate(DATA, lambda batch: {"right": (1.0, 1.0)}) == {"right": 1.0}  # the run goes on


def test_a_weight_of_0_in_some_micro_batches_is_none_of_an_error(process_state: None) -> None:
    def metrics(batch: Any) -> dict[str, tuple[Tensor | float, float]]:
        first = bool(torch.equal(batch[0][0], DATA.tensors[0][0]))
        return {"rare": (5.0, 2.0) if first else (0.0, 0.0)}

    with Run(RECIPE) as run:
        assert run.evaluate(DATA, metrics) == {"rare": 2.5}


# Weights of a run that tracked other things.


@pytest.fixture
def earlier(process_state: None, tmp_path: Path) -> Iterator[Path]:
    """The directory of a run that tracked two modules, ``model`` and ``teacher``."""
    with Run(RECIPE, Execution(run_dir=str(tmp_path / "earlier"))) as run:
        run.track(model=nn.Linear(6, 6), teacher=nn.Linear(6, 2))
        run.save()
    yield tmp_path / "earlier"


def begin_from(earlier: Path, **modules: nn.Module) -> None:
    with Run(Recipe(batch=8, micro_batch=1, lanes=4, steps=1, init_from=str(earlier))) as run:
        run.track(**modules)
        run.digest()


@pytest.mark.parametrize(
    ("tracked", "names"),
    [
        ({"net": (6, 6)}, "net only in this run"),
        ({"model": (6, 6), "teachr": (6, 2)}, "teachr only in this run"),
        ({"model": (6, 6), "teacher": (6, 2), "third": (6, 6)}, "third only in this run"),
    ],
)
def test_other_names_than_the_run_to_begin_from_are_named(
    earlier: Path, tracked: dict[str, tuple[int, int]], names: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        begin_from(earlier, **{name: nn.Linear(*sizes) for name, sizes in tracked.items()})
    assert_four_beats(caught.value)
    assert names in str(caught.value)
    assert str(earlier) in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_part_of_the_run_to_begin_from_is_enough(earlier: Path) -> None:
    begin_from(earlier, teacher=nn.Linear(6, 2))


# A state that no checkpoint can hold.


class Tags:
    """Something tracked whose state becomes a set one day, which no checkpoint holds."""

    tags: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"tags": self.tags}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("never saved")


def test_a_state_that_cannot_be_saved_is_told_before_the_first_step(process_state: None, tmp_path: Path) -> None:
    with Run(RECIPE, Execution(run_dir=str(tmp_path))) as run:
        tags = Tags()
        tags.tags = {"a", "b"}
        run.track(model=nn.Linear(6, 6), tags=tags)
        with pytest.raises(CheckpointError, match="cannot save tags"):
            next(iter(run.steps(DATA, lambda step: None)))


def test_a_state_that_cannot_be_saved_is_told_and_noted(process_state: None, tmp_path: Path) -> None:
    with Run(RECIPE, Execution(run_dir=str(tmp_path))) as run:
        tags = Tags()
        run.track(model=nn.Linear(6, 6), tags=tags)
        run.digest()
        tags.tags = {"a", "b"}
        with pytest.raises(CheckpointError, match="cannot save tags") as caught:
            run.save()
        assert_four_beats(caught.value)
    (event,) = read_events(tmp_path / "events.jsonl", "checkpoint")
    assert event["error"] == str(caught.value)
    assert not list((tmp_path / "checkpoints").glob("step-*"))
