"""Parameters of any strides (channels_last, transposed, permuted) train, resume and become equal as others do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.config import Execution, Recipe
from paceline.determinism import digest
from paceline.reduction.buckets import FlatSet, assign
from paceline.run import Run
from paceline.step import Step
from paceline.team import Team, ThreadTeam
from paceline.tracked import Tracked
from plain import train_plainly
from teamwork import Setup, plan_of, same_bytes, work_in_threads

pytestmark = pytest.mark.usefixtures("process_state", "one_thread")

DATA = TensorDataset(
    torch.randn(64, 48, generator=torch.Generator().manual_seed(1)),
    torch.randn(64, 5, generator=torch.Generator().manual_seed(2)),
)


@pytest.fixture
def one_thread(process_state: None) -> None:
    """Plain torch with as many threads as a worker has: a convolution's bits depend on them."""
    torch.set_num_threads(1)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x_BF: Tensor) -> Tensor:
        h_BCHW: Tensor = self.conv(x_BF.view(-1, 3, 4, 4).contiguous(memory_format=torch.channels_last))
        return h_BCHW.tanh().mean((2, 3))


class ChannelsLast3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 5, 2).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]

    def forward(self, x_BF: Tensor) -> Tensor:
        h_BCDHW: Tensor = self.conv(x_BF.view(-1, 3, 4, 2, 2))
        return h_BCDHW.tanh().mean((2, 3, 4))


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 5)
        self.linear.weight = nn.Parameter(torch.randn(48, 5).t())

    def forward(self, x_BF: Tensor) -> Tensor:
        h_BO: Tensor = self.linear(x_BF)
        return h_BO


class Permuted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 5, 4).permute(1, 2, 0))

    def forward(self, x_BF: Tensor) -> Tensor:
        return torch.einsum("bij,oij->bo", x_BF.view(-1, 4, 12), self.weight)


LAYOUTS: list[type[nn.Module]] = [ChannelsLast, ChannelsLast3d, Transposed, Permuted]
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=False),
    "fused_adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True),
    "foreach_amsgrad": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True, foreach=True),
    "fused_sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True),
}


class All(nn.ModuleList):
    """A weight of each layout."""

    def __init__(self) -> None:
        super().__init__([layout() for layout in LAYOUTS])
        for part in self:
            assert any(not parameter.is_contiguous() for parameter in part.parameters())

    def forward(self, x_BF: Tensor) -> Tensor:
        return torch.stack([part(x_BF) for part in self]).sum(0)


def model_of(layout: type[nn.Module] = All, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return layout()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_has_the_bits_of_plain_torch(optimizer: str) -> None:
    for lanes, workers in [(1, [1]), (3, [1, 2, 3])]:
        plan = plan_of(64, lanes, micro_batch=3, micro_steps=2)
        setup = Setup(model=model_of(), plan=plan, data=DATA, optimizer=OPTIMIZERS[optimizer], steps=2)
        expected = train_plainly(setup)
        for count in workers:
            for seen in work_in_threads(count, setup):
                for name, grad in expected.grads.items():
                    assert same_bytes(seen.grads[name], grad), (lanes, count, name)
                assert seen.digest == expected.digest, (lanes, count)
                for before, after in zip(setup.model.parameters(), seen.model.parameters(), strict=True):
                    assert after.stride() == before.stride()


@st.composite
def parameters(draw: st.DrawFn) -> nn.Parameter:
    """Of up to 4 dimensions in any order in memory; some with gaps, some empty."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=4))
    order = draw(st.permutations(range(len(sizes))))
    storage = torch.randn([2 * size for size in sizes] if draw(st.booleans()) else sizes)
    part = storage[tuple(slice(0, size) for size in sizes)] if sizes else storage
    return nn.Parameter(part.permute(order))


@given(st.lists(parameters(), min_size=1, max_size=4), st.sampled_from([1, 100, 2**20]))
def test_gradient_views_lie_in_memory_as_their_parameters(some: list[nn.Parameter], bucket_bytes: int) -> None:
    views = FlatSet(some, assign(some, bucket_bytes)).views
    for parameter, view in zip(some, views, strict=True):
        assert view.shape == parameter.shape
        assert view.stride() == torch.zeros_like(parameter).stride()  # as an optimizer makes its state
        if parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size():  # no gaps
            assert view.stride() == parameter.stride()
    for number, view in enumerate(views):  # nobody writes into another's place, nor twice into one of its own
        view.copy_(torch.arange(view.numel()).view(view.shape) + 1000 * number)
    for number, view in enumerate(views):
        assert torch.equal(view, torch.arange(view.numel()).view(view.shape).float() + 1000 * number)


# Resumed: a checkpoint keeps values, not strides.


def train(how: Execution, *, seed: int = 3, **run: Any) -> dict[str, tuple[str, bool]]:
    """By each optimizer, all in one run: its model's digest, and whether all strides are the model's first ones."""
    with Run(Recipe(batch=12, micro_batch=3, lanes=2, steps=4), how, **run) as one:
        models = nn.ModuleDict({name: model_of(seed=seed) for name in OPTIMIZERS})
        strides = {name: [parameter.stride() for parameter in model.parameters()] for name, model in models.items()}
        optimizers = {name: make(models[name]) for name, make in OPTIMIZERS.items()}
        one.track(models=models, **{f"{name}_optimizer": optimizer for name, optimizer in optimizers.items()})

        def train_step(step: Step) -> None:
            for x_BF, y_BF in step:
                losses = [(model(x_BF) - y_BF).square().sum() for model in models.values()]
                step.backward(torch.stack(losses).sum(), weight=len(x_BF))
            step.update(*optimizers.values(), max_norm=1.0)

        for _ in one.steps(DATA, train_step):
            pass
        found = {}
        for name, optimizer in optimizers.items():
            states = {
                (parameter.stride(), value.stride())
                for parameter, state in optimizer.state.items()
                for value in state.values()
                if value.shape == parameter.shape
            }
            alike = strides[name] == [parameter.stride() for parameter in models[name].parameters()]
            found[name] = digest(models[name].state_dict()), alike and all(ours == its for ours, its in states)
        return found


def test_stopped_and_resumed_is_undisturbed(tmp_path: Path) -> None:
    undisturbed = train(Execution())
    train(Execution(run_dir=str(tmp_path), stop_at=2))
    resumed = train(Execution(run_dir=str(tmp_path)), seed=9, resume="must")
    assert resumed == undisturbed
    assert all(alike for _, alike in resumed.values())


# Unlike at first.


def strictly(team: Team) -> Team:
    """Refuses to move what torch.distributed refuses."""
    swap = team.swap

    def checked(sends: Any, receives: Any) -> Callable[[], None]:
        assert all(tensor.is_contiguous() and tensor.numel() for _, tensor in [*sends, *receives])
        return swap(sends, receives)

    team.swap = checked  # type: ignore[method-assign]
    return team


def everything() -> Iterator[nn.Module]:
    yield model_of()
    yield nn.BatchNorm1d(4)
    yield nn.ParameterList([nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.zeros(3, 8)[:, ::2])])


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_models_that_start_unlike_become_worker_0s(workers: int) -> None:
    models = []
    for rank in range(workers):
        model = nn.ModuleList(everything())
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000 * (rank + 1))
        models.append(model)
    expected = copy.deepcopy(models[0].state_dict())
    strides = [tensor.stride() for tensor in models[0].parameters()]

    def begin(team: Team) -> None:
        tracked = Tracked()
        tracked.add("model", models[team.rank])
        tracked.begin(strictly(team), "begin")

    ThreadTeam.run(workers, begin)
    for model in models:
        for name, tensor in model.state_dict().items():
            assert same_bytes(tensor, expected[name]), name
        assert [tensor.stride() for tensor in model.parameters()] == strides


def test_a_worker_whose_strides_are_others_still_gets_the_values() -> None:
    def broadcast(team: Team) -> Tensor:
        base = torch.arange(12.0) + 100 * team.rank
        mine = base.view(3, 4) if team.rank == 0 else base.view(4, 3).t()
        strictly(team).broadcast([mine])
        return mine

    for result in ThreadTeam.run(3, broadcast):
        assert torch.equal(result, torch.arange(12.0).view(3, 4))


def test_a_step_takes_gradients_set_to_none_and_channels_last_images() -> None:
    """`zero_grad` in the loop takes the views off; they come back with their strides."""

    def train_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x_BF, y_BF in step:
            optimizer.zero_grad(set_to_none=True)
            step.backward((model(x_BF) - y_BF).square().sum(), weight=len(x_BF))
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.stride() == parameter.stride()
        step.update(optimizer, max_norm=1.0)

    for workers in (1, 2):
        setup = Setup(
            model=model_of(ChannelsLast),
            plan=plan_of(64, 4, micro_steps=2),
            data=DATA,
            optimizer=OPTIMIZERS["fused_adamw"],
            train_step=train_step,
        )
        expected = train_plainly(setup)
        assert {seen.digest for seen in work_in_threads(workers, setup)} == {expected.digest}
