"""The optimizer from its settings; the schedule and the scaling to the batch as arithmetic, and in a run."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from paceline.config import Execution, Optimizer, Recipe, Schedule
from paceline.errors import ConfigError
from paceline.events import read_events
from paceline.optim import build_optimizer, learning_rate, peak_lr, scaled_lr
from paceline.tasks import Task
from paceline.train import train


def a_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3), nn.Conv1d(3, 3, 1))


def ids(parameters: Any) -> set[int]:
    return {id(p) for p in parameters}


def test_matrices_decay_and_vectors_do_not() -> None:
    model = a_model()
    decaying, others = build_optimizer(model, Optimizer(weight_decay=0.3)).param_groups
    assert decaying["weight_decay"] == 0.3
    assert others["weight_decay"] == 0.0
    assert ids(decaying["params"]) == ids(p for p in model.parameters() if p.dim() >= 2)
    assert ids(others["params"]) == ids(p for p in model.parameters() if p.dim() < 2)


def test_frozen_parameters_are_left_out_and_tied_ones_counted_once() -> None:
    frozen, first, second = nn.Embedding(5, 4), nn.Linear(4, 3), nn.Linear(4, 3)
    frozen.requires_grad_(False)
    second.weight = first.weight
    model = nn.Sequential(frozen, first, second)
    held = [p for group in build_optimizer(model, Optimizer()).param_groups for p in group["params"]]
    assert len(held) == len(ids(held))
    assert ids(held) == ids(p for p in model.parameters() if p.requires_grad)


def test_settings_reach_the_optimizer_that_has_them() -> None:
    chosen = Optimizer(lr=0.5, betas=(0.8, 0.9), eps=1e-6, init_args={"amsgrad": True})
    adamw = build_optimizer(a_model(), chosen)
    assert type(adamw) is torch.optim.AdamW
    assert {key: adamw.defaults[key] for key in ("lr", "betas", "eps", "fused", "amsgrad")} == {
        "lr": 0.5,
        "betas": (0.8, 0.9),
        "eps": 1e-6,
        "fused": True,
        "amsgrad": True,
    }
    sgd = build_optimizer(a_model(), Optimizer(class_path="torch.optim.SGD", init_args={"momentum": 0.9}))
    assert sgd.defaults["momentum"] == 0.9  # SGD has no betas: a preference that does not apply
    rprop = build_optimizer(a_model(), Optimizer(class_path="Rprop", weight_decay=None))
    assert len(rprop.param_groups) == 2


def test_null_leaves_the_optimizers_own_defaults() -> None:
    own = torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).defaults
    built = build_optimizer(a_model(), Optimizer(weight_decay=None, betas=None, eps=None))
    assert {key: built.defaults[key] for key in ("weight_decay", "betas", "eps")} == {
        key: own[key] for key in ("weight_decay", "betas", "eps")
    }
    assert built.param_groups[1]["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"class_path": "AdmW"}, "found class_path='AdmW', need an optimizer in torch.optim. Did you mean 'AdamW'?"),
        ({"class_path": "no.such.Thing"}, "No module named 'no'"),
        ({"class_path": "math.sqrt"}, "need an optimizer in math. Use class_path: AdamW"),
        ({"class_path": "torch.optim.Optimizer"}, "need an optimizer in torch.optim"),
        (
            {"init_args": {"amsgrat": True}},
            "found init_args.amsgrat, need an argument of AdamW. Did you mean 'amsgrad'?",
        ),
        ({"init_args": {"lr": 1.0}}, "found lr in recipe.optimizer.init_args, need it in its own field"),
        ({"class_path": "Rprop"}, "Rprop has no such argument. Set recipe.optimizer.weight_decay: null"),
        ({"betas": (0.9, 1.5)}, "cannot build the optimizer AdamW: found Invalid beta parameter at index 1: 1.5."),
        ({"init_args": {"foreach": True}}, "`fused` and `foreach` cannot be `True` together"),
    ],
)
def test_a_mistake_names_what_would_be_right(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(a_model(), Optimizer(**changes))
    assert message in str(caught.value)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="parameters are all frozen"):
        build_optimizer(a_model().requires_grad_(False), Optimizer())


fractions = st.floats(0, 1)
schedules = st.builds(
    Schedule,
    kind=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    warmup=st.integers(0, 50),
    final=fractions,
    decay=fractions,
)
totals = st.integers(1, 400)


@given(schedules, st.floats(1e-6, 1.0), totals)
def test_rates_lie_between_zero_and_the_peak(schedule: Schedule, peak: float, total: int) -> None:
    for step in range(total):
        rate = learning_rate(schedule, peak, step, total)
        assert 0 <= rate <= peak * (1 + 1e-12)
        if step <= schedule.warmup:
            assert rate > 0
        else:
            assert rate >= schedule.final * peak * (1 - 1e-12)


@given(schedules, totals)
def test_rates_climb_in_the_warm_up_and_never_after_it(schedule: Schedule, total: int) -> None:
    rates = [learning_rate(schedule, 1.0, step, total) for step in range(total)]
    climb, rest = rates[: schedule.warmup + 1], rates[schedule.warmup :]
    assert all(a < b for a, b in itertools.pairwise(climb))
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rest))


@given(schedules, totals)
def test_the_ends_are_the_peak_and_the_final_fraction(schedule: Schedule, total: int) -> None:
    if schedule.warmup < total:
        assert learning_rate(schedule, 1.0, schedule.warmup, total) == 1.0
    falls = schedule.kind in ("cosine", "linear") or (schedule.kind == "wsd" and schedule.decay > 0)
    if falls and schedule.warmup < total - 1:
        assert learning_rate(schedule, 1.0, total - 1, total) == pytest.approx(schedule.final, abs=1e-12)
    if schedule.kind == "constant":
        assert {learning_rate(schedule, 1.0, step, total) for step in range(schedule.warmup, total)} <= {1.0}


@given(schedules, st.integers(100, 400))
def test_no_step_jumps(schedule: Schedule, total: int) -> None:
    # The steepest allowed: a linear climb or fall, a cosine's middle (pi/2 as steep), over the shortest stretch.
    stretch = total - 1 - schedule.warmup
    if schedule.kind == "wsd":
        stretch = max(1, math.floor(min(stretch, (total - 1) * schedule.decay)))
    bound = max(1 / (schedule.warmup + 1), math.pi / 2 / stretch) + 1e-9
    rates = [learning_rate(schedule, 1.0, step, total) for step in range(total)]
    assert max(abs(a - b) for a, b in itertools.pairwise(rates)) <= bound


def test_wsd_stays_at_the_peak_until_its_decay() -> None:
    schedule = Schedule(kind="wsd", warmup=10, final=0.0, decay=0.25)
    rates = [learning_rate(schedule, 1.0, step, 101) for step in range(101)]
    assert set(rates[10:76]) == {1.0}
    assert rates[75:] == pytest.approx([1 - i / 25 for i in range(26)])


rates, batches = st.floats(1e-8, 1e3), st.integers(1, 2**20)


@given(rates, batches, batches)
def test_linear_keeps_the_rate_per_sample_and_sqrt_its_square(lr: float, batch: int, base_batch: int) -> None:
    linear, root, same = (
        scaled_lr(lr, batch=batch, base_batch=base_batch, rule=rule) for rule in ("linear", "sqrt", "none")
    )
    assert linear / batch == pytest.approx(lr / base_batch)
    assert root**2 / batch == pytest.approx(lr**2 / base_batch)
    assert same == lr
    assert scaled_lr(lr, batch=base_batch, base_batch=base_batch, rule="linear") == lr
    assert scaled_lr(lr, batch=base_batch, base_batch=base_batch, rule="sqrt") == lr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "liner"}, "found rule='liner'. Did you mean 'linear'?"),
        ({"batch": 0}, "found batch=0, base_batch=64, need whole numbers >= 1. Pass the samples of one step"),
        ({"base_batch": 0}, "found batch=256, base_batch=0, need whole numbers >= 1"),
    ],
)
def test_a_rate_that_cannot_be_scaled_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"batch": 256, "base_batch": 64, "rule": "linear"}
    with pytest.raises(ConfigError) as caught:
        scaled_lr(1e-3, **arguments | changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_scaling": "linear"}, "Set optimizer.base_batch to the batch that lr was found for"),
        ({"base_batch": 64}, "Set optimizer.lr_scaling to linear or sqrt, or leave out base_batch"),
        ({"lr_scaling": "sqrt", "base_batch": 0}, "found base_batch=0, need a whole number >= 1"),
    ],
)
def test_a_rule_and_its_base_batch_come_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Optimizer(**changes)
    assert message in str(caught.value)


def test_the_optimizer_starts_at_the_scaled_rate() -> None:
    chosen = Optimizer(lr=1e-3, lr_scaling="sqrt", base_batch=64)
    assert {group["lr"] for group in build_optimizer(a_model(), chosen, batch=256).param_groups} == {2e-3}
    assert peak_lr(chosen, 256) == 2e-3
    with pytest.raises(ConfigError, match=r"found lr_scaling=sqrt and no batch.*Pass batch=recipe\.batch"):
        build_optimizer(a_model(), chosen)


class Line(Task):
    """Without tokens."""

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(torch.randn(64, 1))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        return model(batch[0]).square().sum(), len(batch[0])


@pytest.mark.usefixtures("process_state")
@pytest.mark.parametrize(("rule", "factor"), [("linear", 4), ("sqrt", 2), ("none", 1)])
def test_a_run_uses_and_logs_the_scaled_rate(tmp_path: Path, rule: Any, factor: int) -> None:
    base_batch = None if rule == "none" else 8
    recipe = Recipe(
        batch=32,
        micro_batch=4,
        steps=3,
        optimizer=Optimizer(lr=1e-3, lr_scaling=rule, base_batch=base_batch),
        schedule=Schedule(kind="linear", final=0.0),
    )
    train(Line(), recipe, Execution(run_dir=str(tmp_path), log_every=1))
    steps = read_events(tmp_path / "events.jsonl", "step")
    assert [event["lr"] for event in steps] == [factor * rate for rate in (1e-3, 0.5e-3, 0.0)]
    assert all(event["samples_per_s"] > 0 and "tokens_per_s" not in event for event in steps)
    logged = [event | {"time": 0} for event in read_events(tmp_path / "events.jsonl", "lr_scaling")]
    expected = {"time": 0, "event": "lr_scaling", "rule": rule, "lr": factor * 1e-3, "base_lr": 1e-3}
    assert logged == ([expected | {"batch": 32, "base_batch": 8}] if base_batch else [])
