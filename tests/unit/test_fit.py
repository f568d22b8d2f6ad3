"""Fitting a budget: nothing that the step reaches is left changed, whatever the loss does, and mistakes are told."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import ConfigError, PacelineError, UsageError
from paceline.memory import fit
from paceline.memory.recompute import get_levels

Reached = dict[str, Any]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def model_of(blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[mlp() for _ in range(blocks)])


class Head(nn.Module):
    """All that a step can change in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(16), nn.Linear(16, 8)
        self.calls, self.seen = 0, list[int]()
        self.mask: Tensor | None = None

    def forward(self, x_BF: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.mask = x_BF.detach()
        y_BF: Tensor = self.out(self.norm(x_BF))
        return y_BF


def state(head: Head, scale: Tensor, teacher: nn.Module) -> list[Any]:
    """What must stay: values as bytes, objects by their identity."""
    tensors = [*head.parameters(), *head.buffers(), scale, *teacher.parameters()]
    values = [
        (id(each), each.detach().clone().numpy().tobytes(), each.requires_grad, each._version) for each in tensors
    ]
    gradients = [None if each.grad is None else (id(each.grad), each.grad.sum().item()) for each in tensors]
    return [values, gradients, head.calls, [*head.seen], head.mask, head.training, teacher.training]


@pytest.mark.parametrize("numbers", [False, True], ids=["on shapes", "for real"])
@pytest.mark.parametrize("given", [False, True], ids=["without gradients", "with gradients"])
def test_what_lies_outside_of_the_model_is_left_as_it_was(numbers: bool, given: bool) -> None:
    model, head, teacher = model_of(), Head(), nn.Linear(16, 8)
    scale = torch.ones(8, requires_grad=True)
    taken: list[Tensor] = []
    for leaf in (*head.parameters(), scale, *model.parameters()):
        leaf.register_post_accumulate_grad_hook(taken.append)
        if given:
            leaf.grad = torch.ones_like(leaf)
    x_BF = torch.randn(512, 16)

    def step() -> Tensor:
        with torch.no_grad():
            wanted_BF = teacher.eval()(x_BF)
        loss = F.mse_loss(head(model(x_BF)) * scale, wanted_BF)
        if numbers:
            loss.item()
        return loss

    teacher.eval()
    before = state(head, scale, teacher)
    roomy = fit(model, step, "1GiB")
    tight = fit(model, step, roomy.unfitted - 1)
    assert get_levels(model)
    assert tight.peak < roomy.peak
    assert taken == []
    assert state(head, scale, teacher) == before
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters(), scale], lr=0.1)
    optimizer.zero_grad()
    step().backward()
    assert len(taken) == len([*model.parameters(), *head.parameters()]) + 1
    optimizer.step()


def test_a_head_outside_costs_no_more_than_one_inside() -> None:
    model, head = model_of(), nn.Linear(16, 4096)
    x_BF = torch.randn(8, 16)
    outside = fit(model, lambda: head(model(x_BF)).sum(), "1GiB")
    whole = nn.ModuleDict({"model": model, "head": head})
    inside = fit(whole, lambda: head(model(x_BF)).sum(), "1GiB")
    assert outside.peak == inside.peak


class Conservative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()

    def forward(self, x_BF: Tensor) -> Tensor:
        with torch.enable_grad():
            at_BF = x_BF if x_BF.requires_grad else x_BF.detach().requires_grad_()
            (y_BF,) = torch.autograd.grad(self.inside(at_BF).square().sum(), at_BF, create_graph=True)
        return x_BF + y_BF


def penalty(model: nn.Module, x_BF: Tensor) -> Tensor:
    at_BF = x_BF.clone().requires_grad_()
    (slope_BF,) = torch.autograd.grad(model(at_BF).sum(), at_BF, create_graph=True)
    return cast(Tensor, (slope_BF.norm(dim=1) - 1).square().mean())


def twice(model: nn.Module, x_BF: Tensor) -> Tensor:
    return cast(Tensor, (model(x_BF) - model(x_BF + 0.1)).square().mean())


def teacher_mode(model: nn.Module, x_BF: Tensor) -> Tensor:
    with torch.no_grad():
        wanted_BF = model.eval()(x_BF)
    return F.mse_loss(model.train()(x_BF), wanted_BF)


def eval_with_gradients(model: nn.Module, x_BF: Tensor) -> Tensor:
    wanted_BF = model.eval()(x_BF)
    return F.mse_loss(model.train()(x_BF), wanted_BF)


def plain(model: nn.Module, x_BF: Tensor) -> Tensor:
    return model(x_BF).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("loss", [plain, penalty, twice, teacher_mode, eval_with_gradients])
@pytest.mark.parametrize("block", [mlp, Conservative])
def test_unusual_losses_are_fitted_or_refused_in_four_beats(
    block: Callable[[], nn.Module], loss: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    model, x_BF = nn.Sequential(*[block() for _ in range(4)]), torch.randn(256, 16)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        loss(model, x_BF).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = [gradient.clone() for gradient in gradients()]
    model.zero_grad()
    try:
        roomy = fit(model, lambda: loss(model, x_BF), "1GiB")
        fit(model, lambda: loss(model, x_BF), max(roomy.profile.peak(dict.fromkeys(roomy.levels, "full")), 1))
    except PacelineError as error:
        assert error.problem and error.found and error.needed and error.fix
        assert "Traceback" not in str(error)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(map(torch.equal, gradients(), expected))


@pytest.mark.parametrize("budget", [0, -1, True, None, 1.5, "0GiB", "much", "", [1]], ids=repr)
def test_a_budget_that_is_none(budget: Any) -> None:
    model, x_BF = model_of(), torch.randn(8, 16)
    with pytest.raises(ConfigError, match="cannot use the budget: found "):
        fit(model, lambda: model(x_BF).sum(), budget)


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (lambda y: y, r"a tensor of shape \(8, 16\)"),
        (lambda y: (y.sum(), 8), "a step that returns a tuple"),
        (lambda y: None, "a step that returns None"),
        (lambda y: y.detach().sum(), "without a gradient"),
        (lambda y: y.sum().item(), "cannot try the step"),
    ],
)
def test_a_step_that_returns_no_loss(step: Callable[[Tensor], Any], found: str) -> None:
    model, x_BF = model_of(), torch.randn(8, 16)
    with pytest.raises(UsageError, match=found):
        fit(model, lambda: step(model(x_BF)), "1GiB")


def test_a_step_that_never_calls_the_model() -> None:
    model, other, x_BF = model_of(), nn.Linear(16, 1), torch.randn(8, 16)
    with pytest.raises(UsageError, match="found a step that does not call Sequential"):
        fit(model, lambda: other(x_BF).sum(), "1GiB")
    assert other.weight.grad is None
    with pytest.raises(UsageError, match="found a step of type Tensor"):
        fit(model, x_BF, "1GiB")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="found a model of type str"):
        fit("model", lambda: x_BF, "1GiB")  # type: ignore[arg-type]


def test_a_mistake_in_the_step_is_its_own_error_and_told_once() -> None:
    model = model_of()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        fit(model, lambda: model(torch.randn(8, 3)).sum(), "1GiB")
    told = "".join(traceback.format_exception(caught.value))
    assert told.count("Traceback") == 1


def test_small_amounts_can_be_read() -> None:
    model, x_BF = model_of(), torch.randn(2, 16)
    with pytest.raises(ConfigError, match=r"need at least [\d.]+ KiB, of which .* takes [\d.]+ (KiB|B)\."):
        fit(model, lambda: model(x_BF).sum(), 100)
