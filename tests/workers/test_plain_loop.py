"""Lanes, trees and counted weights must learn what a loop that anybody would write learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.config import Execution, Optimizer, Recipe, Schedule
from paceline.data.order import Plan
from paceline.determinism import seed_by
from paceline.events import read_events
from paceline.optim import build_optimizer, learning_rate
from paceline.tasks import Language
from paceline.train import train

STEPS = 50


@pytest.fixture
def task(tmp_path: Path) -> Language:
    text = Path(np.__file__).read_bytes() + Path(torch.__file__).read_bytes()
    np.frombuffer(text, dtype=np.uint8).astype("<u2").tofile(tmp_path / "tokens.bin")
    return Language(str(tmp_path / "tokens.bin"), width=32, layers=2, context=32, vocabulary=256)


@pytest.mark.usefixtures("process_state")
def test_losses_match_a_plain_single_process_loop_over_50_steps(task: Language, tmp_path: Path) -> None:
    recipe = Recipe(
        batch=16,
        micro_batch=2,
        lanes=4,
        steps=STEPS,
        optimizer=Optimizer(lr=3e-3),
        schedule=Schedule(warmup=5),
    )
    train(task, recipe, Execution(run_dir=str(tmp_path / "run"), log_every=1))
    ours = [event["loss"] for event in read_events(tmp_path / "run" / "events.jsonl", "step")]

    seed_by(recipe.seed, "model")
    model = task.build_model()
    optimizer = build_optimizer(model, recipe.optimizer)
    data = task.train_data()
    plan = Plan.of(recipe, len(data))
    plain = []
    for step in range(STEPS):
        indices = [index for lane in range(recipe.lanes) for some in plan.lane(step, lane) for index in some.tolist()]
        loss, weight = task.loss(model, task.collate([data[index] for index in indices]))
        optimizer.zero_grad()
        (loss / weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe.schedule, recipe.optimizer.lr, step, STEPS)
        optimizer.step()
        plain.append(float(loss.detach()) / weight)

    assert len(ours) == STEPS
    assert plain[-1] < 0.8 * plain[0]  # it learns: equal losses of a frozen model would prove nothing
    np.testing.assert_allclose(ours, plain, rtol=1e-5)
