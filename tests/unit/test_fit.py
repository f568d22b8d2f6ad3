"""Fitting a budget: nothing that the step reaches is left changed, whatever the loss does, and mistakes are told."""

from __future__ import annotations

import threading
import traceback
from collections import Counter, defaultdict, deque
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


def model_of(blocks: int = 2) -> nn.Sequential:
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


@pytest.mark.parametrize(
    ("block", "loss"),
    [
        *((mlp, loss) for loss in (plain, penalty, twice, teacher_mode, eval_with_gradients)),
        (Conservative, plain),
        *(
            pytest.param(Conservative, loss, marks=pytest.mark.long)
            for loss in (penalty, twice, teacher_mode, eval_with_gradients)
        ),
    ],
)
def test_unusual_losses_are_fitted_or_refused_in_four_beats(
    block: Callable[[], nn.Module], loss: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    model, x_BF = nn.Sequential(*[block() for _ in range(2)]), torch.randn(256, 16)

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
        (lambda y: y.sum() * 1j, "a complex number, torch.complex64"),
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


@pytest.mark.parametrize("numbers", [False, True], ids=["on shapes", "for real"])
@pytest.mark.parametrize(
    ("ends", "found"),
    [
        (lambda loss, optimizer: loss.backward(), "runs backward itself"),
        (lambda loss, optimizer: torch.autograd.backward(loss), "runs backward itself"),
        (lambda loss, optimizer: (loss.backward(), optimizer.step()), "runs backward itself"),
        (lambda loss, optimizer: optimizer.step(), "takes an optimizer's step, of AdamW"),
    ],
)
def test_a_step_that_is_a_whole_training_step_changes_nothing(
    numbers: bool, ends: Callable[[Tensor, torch.optim.Optimizer], object], found: str
) -> None:
    model, head, scale, x_BF = model_of(), nn.Linear(16, 4), nn.Parameter(torch.ones(4)), torch.randn(8, 16)
    leaves = [*head.parameters(), scale, *model.parameters()]
    optimizer = torch.optim.AdamW(leaves, lr=0.1)
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (head(model(x_BF)) * scale).square().mean()
        if numbers:
            loss.item()
        ends(loss, optimizer)
        return loss

    before = [(leaf._version, leaf.detach().clone(), leaf.grad) for leaf in leaves]
    with pytest.raises(UsageError, match=f"cannot try the step: found a step that {found}.*, need the forward alone"):
        fit(model, step, "1GiB")
    for leaf, (version, value, gradient) in zip(leaves, before, strict=True):
        assert leaf._version == version
        assert torch.equal(leaf, value)
        assert leaf.grad is gradient
        assert gradient is not None and bool((gradient == 1).all())
    assert not optimizer.state
    step()  # by itself it may


def test_an_optimizer_in_another_thread_goes_on_meanwhile() -> None:
    model, weight, x_BF = model_of(), nn.Parameter(torch.ones(1)), torch.randn(8, 16)
    optimizer, errors = torch.optim.SGD([weight], lr=0.5), list[BaseException]()

    def other() -> None:
        try:
            weight.square().sum().backward()
            optimizer.step()
        except BaseException as error:
            errors.append(error)

    def step() -> Tensor:
        if weight.item() == 1:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(60)
        return cast(Tensor, model(x_BF).sum())

    fit(model, step, "1GiB")
    assert errors == []
    assert weight.item() == 0


@pytest.mark.parametrize("numbers", [False, True], ids=["on shapes", "for real"])
def test_an_iterator_that_ends_is_told(numbers: bool) -> None:
    model, batches = model_of(), iter([torch.randn(8, 16)] * 2)

    def step() -> Tensor:
        loss = model(next(batches)).sum()
        return loss * loss.item() if numbers else loss  # type: ignore[no-any-return]

    with pytest.raises(UsageError, match="found a step that takes from an iterator, which has ended, need a step that"):
        fit(model, step, "1GiB")


class Diary(nn.Module):
    """Writes down what it sees, in all that an attribute can hold."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()
        self.last = deque[Tensor](maxlen=3)
        self.counts: dict[str, Any] = {"a": {"n": [0, {"deep": 0}]}, "pair": ([0], {0})}
        self.kinds, self.many = Counter[str](), defaultdict[str, list[Tensor]](list)
        self.steps, self.inner = torch.zeros(()), {"sum": [torch.zeros(16)]}
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, x_BF: Tensor) -> Tensor:
        self.last.append(x_BF.detach().mean())
        self.counts["a"]["n"][0] += 1
        self.counts["a"]["n"][1]["deep"] += 1
        self.counts["pair"][0].append(1)
        self.counts["pair"][1].add(len(self.counts["pair"][1]))
        self.kinds["calls"] += 1
        self.many["x"].append(x_BF)
        self.steps.add_(1)
        self.inner["sum"][0] += x_BF.detach().sum(0)
        self.seen += 1
        return x_BF + self.inside(x_BF)  # type: ignore[no-any-return]


@pytest.mark.parametrize("numbers", [False, True], ids=["on shapes", "for real"])
@pytest.mark.parametrize("outside", [False, True], ids=["of the model", "outside"])
def test_whatever_attributes_hold_is_left_as_it_was(numbers: bool, outside: bool) -> None:
    model, diary, x_BF = model_of(), Diary(), torch.randn(256, 16)
    whole = nn.Sequential(*model) if outside else nn.Sequential(*model, diary)
    diary(x_BF)
    names = ("last", "counts", "kinds", "many", "steps", "inner", "seen")
    held = {name: getattr(diary, name) for name in names}
    before = {name: str(value) for name, value in held.items()}

    def step() -> Tensor:
        loss = diary(whole(x_BF)).mean() if outside else whole(x_BF).mean()
        return loss * (1 + 0 * loss.item()) if numbers else loss  # type: ignore[no-any-return]

    roomy = fit(whole, step, "1GiB")
    assert "1" in roomy.levels
    assert {name: str(getattr(diary, name)) for name in names} == before
    assert all(getattr(diary, name) is value for name, value in held.items())
    step().backward()


def test_blocks_that_do_not_train_are_not_recomputed() -> None:
    model, x_BF = model_of(6).requires_grad_(False), torch.randn(256, 16)
    model[5].requires_grad_(True)
    roomy = fit(model, lambda: model(x_BF).square().mean(), "1GiB")
    assert set(roomy.levels.values()) == {"keep"}
    tight = fit(model, lambda: model(x_BF).square().mean(), roomy.peak)
    assert set(tight.levels.values()) == {"keep"}


def test_what_cannot_be_called_or_measured_is_refused() -> None:
    model, x_BF = model_of(), torch.randn(8, 16)
    for step, found in ((model, "input"), (lambda x_BF, y, *, z, w=0: x_BF, "x_BF, y, z")):
        with pytest.raises(UsageError, match=f"cannot fit a micro-batch: found a step that needs {found}, need a func"):
            fit(model, step, "1GiB")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"found a model on the meta device, .* Call model.to_empty"):
        fit(model.to("meta"), lambda: model(x_BF.to("meta")).sum(), "1GiB")


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
