"""The optimizer from its settings; the schedule as arithmetic."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.config import Optimizer, Schedule
from paceline.errors import ConfigError
from paceline.optim import build_optimizer, learning_rate


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
