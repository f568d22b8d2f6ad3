"""Runs that choose what to recompute by themselves, and runs that cannot fit: the same bits, or a refusal at once."""

from __future__ import annotations

import dataclasses
import gc
import re
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline import Run
from paceline.config import Execution, Recipe
from paceline.determinism import compile_blocks
from paceline.memory import fit
from paceline.memory.peak import resident_bytes
from paceline.memory.recompute import get_levels
from paceline.models import GPT, GPTConfig
from paceline.step import Step
from paceline.tasks import Language
from pool import Pool

RECIPE = Recipe(batch=16, micro_batch=4, lanes=4, steps=3, device="cpu")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A headerless file of uint16 tokens: 16 samples of 256."""
    path = tmp_path_factory.mktemp("tokens") / "some.bin"
    np.random.default_rng(0).integers(0, 40, 256 * 16 + 1).astype("<u2").tofile(path)
    return str(path)


def train(data: str, recipe: Recipe, execution: Execution, room: int | None = None) -> dict[str, Any]:
    """A GPT of 6 layers, of which each holds about 15 MiB; with the events that tell what was recomputed.

    Args:
        room: bytes for all but what this process holds already, which grows from test to test.
    """
    gc.collect()
    before = resident_bytes()
    if room is not None:
        execution = dataclasses.replace(execution, memory=f"{before + room}B")
    task = Language(data, width=128, layers=6, heads=2, hidden=512, context=256, dropout=0.1, vocabulary=40)
    recorder = jobs.Recorder()
    result = jobs.train_task(task, recipe, execution, sinks=[recorder])
    return result | {"before": before, "recompute": [e for e in recorder.events if e["event"] == "recompute"]}


@pytest.mark.parametrize(
    "changes", [{}, {"precision": "bf16"}, pytest.param({"compile": True}, marks=pytest.mark.long)]
)
def test_auto_recomputes_what_it_must_and_moves_no_bit(pool: Pool, tokens: str, changes: dict[str, Any]) -> None:
    recipe = dataclasses.replace(RECIPE, **changes)
    (expected,) = pool.run(train, tokens, recipe, Execution(), workers=1, deadline_s=300)
    assert expected["recompute"] == []
    roomy = Execution(recompute="auto", memory="8GiB")
    all_kept, _ = pool.run(train, tokens, recipe, roomy, workers=2, deadline_s=300)
    (told,) = all_kept["recompute"]
    assert (told["levels"], all_kept["digest"]) == ({}, expected["digest"])
    room = told["planned"] - all_kept["before"] - told["activations"] // 2
    results = pool.run(train, tokens, recipe, Execution(recompute="auto"), room, workers=2, deadline_s=300)
    assert results[0]["digest"] == expected["digest"]
    assert results[0]["losses"] == expected["losses"]
    (told,) = results[0]["recompute"]
    assert told["levels"]
    assert told["planned"] <= told["budget"] == results[0]["before"] + room
    assert told["slower"] > 1
    assert told["packed"] > told["held"] > sum(block["held"] for block in told["blocks"].values()) > 0
    if recipe.compile:
        assert set(told["levels"].values()) == {"full"}


@pytest.mark.parametrize("recompute", ["auto", "none", "all"])
def test_what_cannot_fit_is_refused_before_the_first_step(pool: Pool, tokens: str, recompute: str) -> None:
    with pytest.raises(Exception, match="cannot fit the run") as caught:
        pool.run(train, tokens, RECIPE, Execution(recompute=recompute, memory="100MiB"), workers=2)
    text = str(caught.value)
    assert "found 100 MiB for each worker (execution.memory), need " in text
    assert ("Set execution.recompute: auto" in text) == (recompute != "auto")


class Looks(jobs.Classify):
    """Its loss reads a number, so that it cannot run on shapes alone."""


def train_looks(recipe: Recipe, execution: Execution) -> dict[str, Any]:
    recorder = jobs.Recorder()
    result = jobs.train_task(Looks(), recipe, execution, sinks=[recorder])
    return result | {"recompute": [event for event in recorder.events if event["event"] == "recompute"]}


def test_a_loss_that_reads_numbers_is_counted_for_real(pool: Pool) -> None:
    expected = pool.run(train_looks, RECIPE, Execution(), workers=1)[0]
    with pytest.raises(Exception, match="at least"):
        pool.run(train_looks, RECIPE, Execution(recompute="auto", memory="10MiB"), workers=1)
    found = pool.run(train_looks, RECIPE, Execution(recompute="auto", memory="8GiB"), workers=2)[0]
    assert found["recompute"][0]["activations"] > 0
    assert found["digest"] == expected["digest"]


def own_loop(recipe: Recipe, execution: Execution, budget: str | None) -> dict[str, Any]:
    with Run(recipe, execution) as run:
        model = GPT(
            GPTConfig(vocabulary=40, context=32, width=32, layers=4, heads=2, kv_heads=2, hidden=64, dropout=0.1)
        )
        if recipe.compile:
            compile_blocks(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.track(model=model, optimizer=optimizer)
        before = torch.get_rng_state()
        tokens_BT = torch.zeros(recipe.micro_batch, 32, dtype=torch.int64)
        if budget is not None:
            fit(model, lambda: model(tokens_BT, tokens_BT), budget)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(parameter.grad is None for parameter in model.parameters())

        def train_step(step: Step) -> None:
            for (tokens_BT,) in step:
                step.backward(model(tokens_BT, tokens_BT), weight=tokens_BT.numel())
            step.update(optimizer)

        data = torch.utils.data.TensorDataset(torch.arange(40 * 32).view(40, 32) % 39)
        for _ in run.steps(data, train_step):
            pass
        return {"digest": run.digest(), "levels": get_levels(model)}


def test_a_loop_of_ones_own_fits_by_a_call(pool: Pool) -> None:
    (plain,) = pool.run(own_loop, RECIPE, Execution(), None, workers=1)
    assert plain["levels"] == {}
    results = pool.run(own_loop, RECIPE, Execution(), "1.2MiB", workers=2)
    assert results[0]["levels"]
    assert results[0]["digest"] == plain["digest"]
    named = pool.run(own_loop, RECIPE, Execution(recompute=["blocks.1", "blocks.3"]), None, workers=2)[0]
    assert named == {"digest": plain["digest"], "levels": {"blocks.1": "full", "blocks.3": "full"}}
    with pytest.raises(Exception, match=r"found execution\.recompute: auto, in a loop of one's own"):
        pool.run(own_loop, RECIPE, Execution(recompute="auto"), None, workers=2)
    with pytest.raises(Exception, match=r"found execution\.memory: 8GiB, in a loop of one's own"):
        pool.run(own_loop, RECIPE, Execution(memory="8GiB"), None, workers=1)
    with pytest.raises(Exception, match=r"cannot fit a micro-batch: found a budget of 100 KiB, need at least"):
        pool.run(own_loop, RECIPE, Execution(), "100KiB", workers=1)


class Huge(jobs.Classify):
    """Asks for more than any machine has."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        loss, weight = super().loss(model, batch)
        return loss + torch.empty(2**45).sum(), weight


def train_huge(recipe: Recipe, execution: Execution) -> dict[str, Any]:
    return jobs.train_task(Huge(), recipe, execution)


def test_out_of_memory_says_what_was_asked_for_and_what_to_do(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="out of memory") as caught:
        pool.run(train_huge, RECIPE, Execution(run_dir=str(tmp_path / "run")), workers=1)
    assert re.search(
        r"cannot run step 1: out of memory: found no memory left, with .* in use by this worker, "
        r"need 128 TiB at once\. Use a smaller recipe\.micro_batch",
        str(caught.value),
    )
