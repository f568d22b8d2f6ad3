"""What data-parallel training is made of, on real workers: right beside plain torch, the same bits on any number."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import Dataset, TensorDataset

from paceline.config import Execution, Recipe
from paceline.determinism import digest, seed_by
from paceline.run import Run
from paceline.step import Step
from pool import Pool

WORKERS = (1, 2, 3)
LIMIT = Execution(timeout_s=60)

# Token-weighted accumulation.

VOCABULARY, IGNORED = 50, -100


@dataclass(frozen=True, kw_only=True)
class Split:
    """Ragged sequences, fewer than fill all lanes, dealt in one step."""

    seed: int
    lanes: int
    micro_batch: int
    micro_steps: int
    samples: int

    @property
    def batch(self) -> int:
        return self.lanes * self.micro_batch * self.micro_steps

    @classmethod
    def draw(cls, seed: int) -> Split:
        drawn = random.Random(seed)
        lanes, micro_batch, micro_steps = drawn.randint(3, 8), drawn.randint(1, 4), drawn.randint(1, 3)
        samples = drawn.randint(2, lanes * micro_batch * micro_steps)
        return cls(seed=seed, lanes=lanes, micro_batch=micro_batch, micro_steps=micro_steps, samples=samples)


class Ragged(Dataset[Any]):
    """Sequences of 2 to 128 tokens, most of them short; in every fifth but the first no token counts."""

    def __init__(self, split: Split) -> None:
        drawn = random.Random(split.seed)
        lengths = [1 + int(2 ** drawn.uniform(0, 7)) for _ in range(split.samples)]
        generator = torch.Generator().manual_seed(split.seed)
        self.sequences = [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens_T = self.sequences[index]
        targets_T = tokens_T.roll(-1)
        targets_T[-1] = IGNORED
        if index % 5 == 4:
            targets_T[:] = IGNORED
        return tokens_T, targets_T


def pad(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return (
        nn.utils.rnn.pad_sequence([tokens_T for tokens_T, _ in samples], batch_first=True),
        nn.utils.rnn.pad_sequence([targets_T for _, targets_T in samples], batch_first=True, padding_value=IGNORED),
    )


class Words(nn.Module):
    """Predicts a token from the mean of those up to here; padding behind changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        seed_by("words")
        self.embed, self.mix = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        h_BTD = self.embed(tokens_BT).cumsum(1) / torch.arange(1, tokens_BT.shape[1] + 1)[:, None]
        logits_BTV: Tensor = self.head(torch.tanh(self.mix(h_BTD)))
        return logits_BTV


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Summed over the tokens that count, and how many those are."""
    tokens_BT, targets_BT = batch
    loss = F.cross_entropy(model(tokens_BT).flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, int((targets_BT != IGNORED).sum())


def accumulate(split: Split) -> dict[str, Any]:
    """The gradient of one step: its bits, and its distance from that of all sequences at once, in float64."""
    recipe = Recipe(batch=split.batch, micro_batch=split.micro_batch, lanes=split.lanes, steps=1, seed=split.seed)
    grads: list[Tensor] = []
    mine = 0
    with Run(recipe, LIMIT) as run:
        model = Words()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        whole = copy.deepcopy(model).double()

        def train_step(step: Step) -> None:
            nonlocal mine
            for batch in step:
                loss, tokens = token_loss(model, batch)
                mine += tokens
                step.backward(loss, weight=tokens)
            grads.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
            step.update(optimizer)

        data = Ragged(split)
        (done,) = run.steps(data, train_step, collate=pad)
        by_worker = run.gather(mine)
    loss, tokens = token_loss(whole, pad([data[index] for index in range(len(data))]))
    (loss / tokens).backward()
    pairs = [(ours.double(), p.grad) for ours, p in zip(grads, whole.parameters(), strict=True) if p.grad is not None]
    assert len(pairs) == len(grads) == 5
    norm = math.sqrt(sum(float(theirs.square().sum()) for _, theirs in pairs))
    return {
        "bits": digest({str(at): grad for at, grad in enumerate(grads)}),
        "loss": done.loss,
        "weight": done.weight,
        "tokens": tokens,
        "of all": math.sqrt(sum(float((ours - theirs).square().sum()) for ours, theirs in pairs)) / norm,
        "of each": max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs),
        "loss is off by": abs(done.loss / (loss.item() / tokens) - 1),
        "by worker": by_worker,
    }


def accumulate_all(splits: list[Split]) -> list[dict[str, Any]]:
    return [accumulate(split) for split in splits]


def test_token_weighted_gradients_are_those_of_one_batch_in_float64(
    pool: Pool, record_property: Callable[[str, object], None]
) -> None:
    """20 random splits over workers, lanes and micro-batches, with very unequal numbers of tokens and empty lanes."""
    splits = [Split.draw(seed) for seed in range(20)]
    assert sum(split.samples < split.lanes for split in splits) >= 3  # empty lanes
    by_workers = {workers: pool.run(accumulate_all, splits, workers=workers) for workers in WORKERS}
    alone = by_workers[1][0]
    for workers, everyone in by_workers.items():
        for results in everyone:
            for expected, seen in zip(alone, results, strict=True):
                assert seen["bits"] == expected["bits"], (workers, seen)
                assert seen["loss"] == expected["loss"]
                assert seen["weight"] == seen["tokens"] == sum(seen["by worker"])
    for key in ("of all", "of each", "loss is off by"):
        worst = max(result[key] for result in alone)
        record_property(key, worst)
        print(f"largest relative error, {key}: {worst:.2e}")
        assert 0 < worst < 1e-6
    shares = [result["by worker"] for result in by_workers[2][0]]
    assert sum(max(share) > 5 * min(share) for share in shares) >= 3  # as unequal as said


# Parameters that are frozen, unused, shared.

ROWS = TensorDataset(*torch.randn(2, 30, 6, generator=torch.Generator().manual_seed(5)).unbind())
RECIPE = Recipe(batch=12, micro_batch=1, lanes=6, steps=8)


class Parts(nn.Module):
    """A frozen part, one that nothing uses, one for a few of the rows, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        seed_by("parts")
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused, self.rare, self.shared, self.head = (nn.Linear(6, 6) for _ in range(4))
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.shared.weight

    def forward(self, x_BF: Tensor) -> Tensor:
        h_BF = torch.tanh(self.again(torch.tanh(self.shared(self.frozen(x_BF)))))
        few_B1 = x_BF[:, :1] > 1.2
        if bool(few_B1.any()):
            h_BF = h_BF + few_B1 * self.rare(h_BF)
        out_BF: Tensor = self.head(h_BF)
        return out_BF


def row_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum")


def backward_all(step: Step, model: nn.Module) -> None:
    for batch in step:
        step.backward(row_loss(model, batch), weight=len(batch[0]))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train_parts(recipe: Recipe) -> dict[str, Any]:
    with Run(recipe, LIMIT) as run:
        model = Parts()
        start = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
        run.track(model=model, optimizer=optimizer)
        grads: list[dict[str, Tensor]] = []

        def train_step(step: Step) -> None:
            backward_all(step, model)
            grads.append(gradients(model))
            step.update(optimizer)

        losses = [done.loss for done in run.steps(ROWS, train_step)]
        before, after = start.state_dict(), model.state_dict()
        if recipe.batch == len(ROWS):  # one step over all rows
            row_loss(start, ROWS[:30]).div(30).backward()
            assert grads[0].keys() >= RARE
            torch.testing.assert_close(grads[0], gradients(start))
        return {
            "digest": run.digest(),
            "losses": losses,
            "with": [frozenset(step) for step in grads],
            "changed": {name for name in before if not torch.equal(before[name], after[name])},
        }


LEFT = {f"{part}.{kind}" for part in ("frozen", "unused") for kind in ("weight", "bias")}
RARE = {"rare.weight", "rare.bias"}


def test_frozen_unused_and_shared_parameters(pool: Pool) -> None:
    (expected,) = pool.run(train_parts, RECIPE, workers=1)
    names = {name for name, _ in Parts().named_parameters()}
    assert set(expected["with"]) == {frozenset(names - LEFT), frozenset(names - LEFT - RARE)}
    assert expected["changed"] == names - LEFT | {"again.weight"}  # the others are neither trained nor decayed
    for workers in WORKERS[1:]:
        assert pool.run(train_parts, RECIPE, workers=workers) == [expected] * workers


def test_their_gradients_are_those_of_plain_torch(pool: Pool) -> None:
    pool.run(train_parts, Recipe(batch=30, micro_batch=1, lanes=6, steps=1), workers=3)


# Gradients that are read and changed before the update.


def change_gradients() -> dict[str, Any]:
    with Run(RECIPE, LIMIT) as run:
        model = Parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        run.track(model=model, optimizer=optimizer)
        read: list[float] = []
        norms: list[float] = []

        def train_step(step: Step) -> None:
            backward_all(step, model)
            read.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
            if step.number == 3:
                model.head.weight.grad = None  # not updated in this step
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.5, 0.5).add_(torch.randn_like(parameter), alpha=0.01)
            model.head.bias.grad = torch.full((6,), 0.25)  # in place of what there was
            norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
            before = model.head.weight.detach().clone(), model.head.bias.detach().clone()
            step.update(optimizer)
            assert torch.equal(model.head.weight, before[0]) == (step.number == 3)
            if step.number == 0:
                torch.testing.assert_close(model.head.bias, before[1] - 0.05 * 0.25)

        done = list(run.steps(ROWS, train_step))
        assert [one.grad_norm for one in done] == norms
        assert all(norm != before for norm, before in zip(norms, read, strict=True))
        return {"digest": run.digest(), "read": read, "norms": norms}


def test_gradients_read_and_changed_between_the_last_batch_and_the_update(pool: Pool) -> None:
    (expected,) = pool.run(change_gradients, workers=1)
    for workers in WORKERS[1:]:
        assert pool.run(change_gradients, workers=workers) == [expected] * workers


# Several optimizers.


def train_with_two(execution: Execution = LIMIT, resume: Any = "never") -> dict[str, Any]:
    with Run(RECIPE, execution, resume=resume) as run:
        model = Parts()
        head = torch.optim.AdamW(model.head.parameters(), lr=0.02)
        rest = torch.optim.SGD([*model.shared.parameters(), *model.rare.parameters()], lr=0.1, momentum=0.9)
        decay = lr_scheduler.ExponentialLR(head, 0.8)
        run.track(model=model, head=head, rest=rest, decay=decay)

        def train_step(step: Step) -> None:
            backward_all(step, model)
            step.update(head, rest, schedulers=[decay], max_norm=0.5)
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            assert float(norm) == pytest.approx(0.5, rel=1e-5)  # one norm, clipped once

        done = list(run.steps(ROWS, train_step))
        return {"digest": run.digest(), "steps": [one.step for one in done], "lrs": [one.lr for one in done]}


def test_several_optimizers_in_one_update(pool: Pool, tmp_path: Path) -> None:
    (expected,) = pool.run(train_with_two, workers=1)
    assert expected["lrs"] == pytest.approx([0.02 * 0.8**step for step in range(8)])
    for workers in WORKERS[1:]:
        assert pool.run(train_with_two, workers=workers) == [expected] * workers
    pool.run(train_with_two, Execution(run_dir=str(tmp_path), stop_at=5, timeout_s=60), workers=2)
    resumed = pool.run(train_with_two, Execution(run_dir=str(tmp_path), timeout_s=60), "must", workers=3)
    assert resumed == [{key: value if key == "digest" else value[5:] for key, value in expected.items()}] * 3


# Schedulers: every one of torch.

Optimizer = torch.optim.Optimizer
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.5, 5),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.3, 1.0, 6),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.7),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.3, 1.0, 3), lr_scheduler.CosineAnnealingLR(optimizer, 6)],
        milestones=[3],
    ),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 5), lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer=optimizer
    ),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 2, mode="exp_range", gamma=0.9),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 8, 2.0),
    "SWALR": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, 0.01, anneal_epochs=6),
}


def test_no_scheduler_of_torch_is_left_out() -> None:
    assert {*lr_scheduler.__all__, "SWALR"} - {"LRScheduler"} == set(SCHEDULERS)


def squares(model: nn.Module) -> Callable[[Any], dict[str, tuple[Tensor, int]]]:
    return lambda batch: {"loss": (row_loss(model, batch), len(batch[0]))}


def train_scheduled(name: str, execution: Execution, resume: Any = "never") -> dict[str, Any]:
    with Run(RECIPE, execution, resume=resume) as run:
        model = Parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)
        fed = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)

        def train_step(step: Step) -> None:
            backward_all(step, model)
            step.update(optimizer, schedulers=() if fed else [scheduler])

        lrs = []
        for done in run.steps(ROWS, train_step):
            lrs.append(done.lr)
            if fed:
                scheduler.step(run.evaluate(ROWS, squares(model))["loss"])
        return {"digest": run.digest(), "lrs": lrs}


def train_each(directory: Path | None, stop_at: int | None = None, resume: Any = "never") -> dict[str, Any]:
    """With each scheduler what came of it, or the error."""
    results: dict[str, Any] = {}
    for name in SCHEDULERS:
        run_dir = str(directory / name) if directory else None
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # torch's, about the order of steps
            results[name] = train_scheduled(name, Execution(run_dir=run_dir, stop_at=stop_at, timeout_s=60), resume)
    return results


@pytest.fixture(scope="module")
def scheduled(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Undisturbed by one worker; and stopped after 4 steps by two, resumed by three."""
    directory = tmp_path_factory.mktemp("scheduled")
    return {
        "alone": pool.run(train_each, None, workers=1),
        "stopped": pool.run(train_each, directory, 4, workers=2),
        "resumed": pool.run(train_each, directory, None, "must", workers=3),
    }


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_tracked_scheduler_is_saved_and_resumed_to_the_same_bits(
    scheduled: dict[str, list[dict[str, Any]]], name: str
) -> None:
    alone = scheduled["alone"][0][name]
    assert len(alone["lrs"]) == 8
    assert len(set(alone["lrs"])) > 1  # it does something
    for worker in scheduled["stopped"]:
        assert worker[name]["lrs"] == alone["lrs"][:4]
    for worker in scheduled["resumed"]:
        assert worker[name] == {"digest": alone["digest"], "lrs": alone["lrs"][4:]}


# Unfreezing on the way.


def unfreeze(execution: Execution = LIMIT, resume: Any = "never") -> dict[str, Any]:
    """The head alone for 3 steps, then everything."""
    with Run(RECIPE, execution, resume=resume) as run:
        model = Parts()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
        run.track(model=model, optimizer=optimizer)
        run.digest()  # takes over the checkpoint, so that the position is known
        model.requires_grad_(False)
        model.head.requires_grad_(True)
        trained: list[tuple[int, int]] = []

        def train_step(step: Step) -> None:
            backward_all(step, model)
            trained.append((step.number, len(gradients(model))))
            step.update(optimizer)

        if run.position < 3:
            for done in run.steps(ROWS, train_step):
                if done.step == 3:
                    break
        if run.position >= 3:
            model.requires_grad_(True)
            for _ in run.steps(ROWS, train_step):
                pass
        return {"digest": run.digest(), "trained": trained}


@pytest.mark.parametrize("stop_at", [2, 5])
def test_gradual_unfreezing(pool: Pool, tmp_path: Path, stop_at: int) -> None:
    (expected,) = pool.run(unfreeze, workers=1)
    assert [number for number, _ in expected["trained"]] == list(range(8))
    counts = [count for _, count in expected["trained"]]
    assert counts[:3] == [2, 2, 2]
    assert set(counts[3:]) == {6, 8}  # without and with the rare part
    for workers in WORKERS[1:]:
        assert pool.run(unfreeze, workers=workers) == [expected] * workers
    pool.run(unfreeze, Execution(run_dir=str(tmp_path), stop_at=stop_at, timeout_s=60), workers=2)
    for resumed in pool.run(unfreeze, Execution(run_dir=str(tmp_path), timeout_s=60), "must", workers=3):
        assert resumed == {"digest": expected["digest"], "trained": expected["trained"][stop_at:]}
