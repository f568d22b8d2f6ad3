"""A run of one worker: tracking, steps, evaluation, saving and resuming, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from paceline.checkpoint import Store
from paceline.config import Execution, Recipe
from paceline.errors import CheckpointError, ConfigError, NonFiniteError, RunStopped, UsageError
from paceline.events import read_events
from paceline.run import Run
from paceline.step import Done, Step

pytestmark = pytest.mark.usefixtures("process_state")

DATA = TensorDataset(*torch.randn(2, 21, 4, generator=torch.Generator().manual_seed(1)).unbind())
RECIPE = Recipe(batch=8, micro_batch=1, lanes=4, steps=6)


class Trained:
    """A small model with dropout, tracked by a run, and what its steps told."""

    def __init__(self, run: Run, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.run = run
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.model[2].eval()  # a single row has no statistics
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=0.5, total_iters=2)
        run.track(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def step(self, step: Step) -> None:
        for x_BF, y_BF in step:
            with self.run.autocast():
                loss = (self.model(x_BF) - y_BF).square().sum()
            step.backward(loss, weight=len(x_BF))
        step.update(self.optimizer, max_norm=1.0)
        self.scheduler.step()

    def steps(self, data: Dataset[Any] = DATA) -> list[Done]:
        return list(self.run.steps(data, self.step))


def execution(directory: Path | None = None, **changes: Any) -> Execution:
    return Execution(run_dir=str(directory) if directory else None, **changes)


def train(recipe: Recipe = RECIPE, how: Execution | None = None, **run: Any) -> tuple[str, list[Done]]:
    with Run(recipe, how or execution(), **run) as one:
        trained = Trained(one)
        done = trained.steps()
        return one.digest(), done


def test_a_run_without_a_directory_writes_nothing_and_knows_where_it_is() -> None:
    with Run(RECIPE) as run:
        assert (run.rank, run.world_size, run.local_rank, run.is_main) == (0, 1, 0, True)
        assert run.recipe.device == "cpu"  # resolved
        done = Trained(run).steps()
        assert [one.step for one in done] == [1, 2, 3, 4, 5, 6]
        assert [one.epoch for one in done] == [0, 0, 0, 1, 1, 1]
        assert run.position == 6
        assert run.stopped is None
        run.save()
        run.print("once")


def test_the_length_follows_from_steps_or_epochs() -> None:
    with Run(RECIPE) as run:
        assert run.length(DATA) == 6
    with Run(Recipe(batch=8, micro_batch=1, lanes=4, epochs=5)) as run:
        assert run.length(DATA) == 5 * 3


def test_two_runs_of_one_recipe_are_equal_and_of_others_are_not() -> None:
    digest, done = train()
    assert train() == (digest, done)
    assert train(Recipe(batch=8, micro_batch=1, lanes=4, steps=6, seed=1))[0] != digest
    assert train(Recipe(batch=8, micro_batch=1, lanes=4, steps=6, precision="bf16"))[0] != digest


@pytest.mark.parametrize("stop_at", [1, 3, 5])
def test_stopped_and_resumed_is_undisturbed(tmp_path: Path, stop_at: int) -> None:
    expected, all_done = train()
    _, first = train(how=execution(tmp_path, stop_at=stop_at))
    assert len(first) == stop_at
    with Run(RECIPE, execution(tmp_path), resume="must") as run:
        trained = Trained(run, seed=99)  # other weights: all come from the checkpoint
        rest = trained.steps()
        assert run.digest() == expected
    assert first + rest == all_done


def test_checkpoints_come_when_due_and_after_the_last_step(tmp_path: Path) -> None:
    train(how=execution(tmp_path, checkpoint_every=2, stop_at=5, keep=10))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004", "step-00000005"]
    told = [event["step"] for event in read_events(tmp_path / "events.jsonl", "checkpoint")]
    assert told == [2, 4, 5]


def test_a_requested_stop_ends_after_the_next_step_with_a_checkpoint(tmp_path: Path) -> None:
    with Run(RECIPE, execution(tmp_path)) as run:
        trained = Trained(run)
        seen = []
        with pytest.raises(RunStopped, match="75"):
            for done in run.steps(DATA, trained.step):
                seen.append(done.step)
                if done.step == 2:
                    run.request_stop(75)
        assert seen == [1, 2, 3]
        assert run.stopped == 75
    assert (tmp_path / "checkpoints" / "step-00000003").is_dir()
    assert train(how=execution(tmp_path), resume="must")[0] == train()[0]


def test_digests_name_every_tensor_and_every_lane(tmp_path: Path) -> None:
    _, done = train(how=execution(tmp_path, digest_every=2))
    events = read_events(tmp_path / "events.jsonl", "digest")
    assert [event["step"] for event in events] == [2, 4, 6]
    assert len({event["digest"] for event in events}) == 3
    for event, one in zip(events, done[1::2], strict=True):
        assert [float.fromhex(loss) for loss in event["lanes"]] == list(one.lane_losses)
        assert {"model.0.weight", "model.2.running_mean", "optimizer.state.0.exp_avg"} <= set(event["tensors"])


def test_tracking_aligns_storage() -> None:
    with Run(RECIPE) as run:
        model = nn.Linear(4, 4)
        model.weight.data = torch.arange(17.0)[1:].view(4, 4)
        assert model.weight.data_ptr() % 64
        run.track(model=model)
        run.digest()
        assert model.weight.data_ptr() % 64 == 0
        assert torch.equal(model.weight.data, torch.arange(1.0, 17.0).view(4, 4))


# Evaluation.


def count(batch: Any) -> dict[str, tuple[Tensor | float, float]]:
    x_BF, _ = batch
    assert not torch.is_grad_enabled()
    return {"mean": (x_BF.double().sum(), x_BF.numel()), "samples": (float(len(x_BF)), 1.0)}


@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_every_sample_counts_once_and_alike(micro_batch: int) -> None:
    with Run(Recipe(batch=20, micro_batch=micro_batch, lanes=2, steps=1)) as run:
        scores = run.evaluate(DATA, count)
        assert scores["mean"] == pytest.approx(float(DATA.tensors[0].double().mean()))
        assert scores["samples"] == pytest.approx(21 / math.ceil(21 / micro_batch))


def test_modules_are_in_eval_mode_meanwhile_and_as_before_afterwards_also_after_an_error() -> None:
    with Run(RECIPE) as run:
        trained = Trained(run)
        modes = [part.training for part in trained.model.modules()]
        assert True in modes
        assert False in modes

        def look(batch: Any) -> Mapping[str, Any]:
            assert not any(part.training for part in trained.model.modules())
            if fail:
                raise KeyError("mine")
            return {"loss": (1.0, 1.0)}

        for fail in (False, True):
            if fail:
                with pytest.raises(KeyError):
                    run.evaluate(DATA, look)
            else:
                assert run.evaluate(DATA, look) == {"loss": 1.0}
            assert [part.training for part in trained.model.modules()] == modes


def test_evaluation_amid_training_moves_no_bit() -> None:
    with Run(RECIPE) as run:
        trained = Trained(run)
        steps = run.steps(DATA, trained.step)
        drawn = [run.evaluate(DATA, lambda batch: {"draw": (torch.rand(()), 1.0)})["draw"] for _ in steps]
        assert run.digest() == train()[0]
        assert len(set(drawn)) == 1  # keyed by the micro-batch


def test_metrics_of_a_step_go_with_its_checkpoint_and_no_other(tmp_path: Path) -> None:
    with Run(RECIPE, execution(tmp_path, checkpoint_every=1, keep=1, keep_best="score")) as run:
        trained = Trained(run)
        for done in run.steps(DATA, trained.step):
            if done.step in (2, 4):
                run.note_metrics({"score": float(done.step)})
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000006"]
    manifest = json.loads((tmp_path / "checkpoints" / "step-00000006" / "manifest.json").read_text())
    assert manifest["metrics"] == {}


# What is refused.


def test_a_worker_count_that_nobody_started_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1 workers started, execution\.workers=2"):
        Run(RECIPE, Execution(workers=2))


def test_tracking_mistakes() -> None:
    with Run(RECIPE) as run:
        run.track(model=nn.Linear(2, 2))
        with pytest.raises(UsageError, match="the name in use"):
            run.track(model=nn.Linear(2, 2))
        with pytest.raises(UsageError, match="state_dict"):
            run.track(counter=3)
        with pytest.raises(UsageError, match="sparse"):
            run.track(table=nn.Embedding(4, 2, sparse=True))
        run.digest()
        with pytest.raises(UsageError, match="a run that has begun"):
            run.track(late=nn.Linear(2, 2))


def test_resume_must_needs_a_checkpoint_and_auto_does_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint"):
        Run(RECIPE, execution(tmp_path), resume="must")
    assert train(how=execution(tmp_path), resume="auto")[0] == train()[0]


def test_resume_never_refuses_a_directory_with_a_run(tmp_path: Path) -> None:
    train(how=execution(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="cannot start a run"):
        Run(RECIPE, execution(tmp_path), resume="never")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"recipe": Recipe(batch=8, micro_batch=1, lanes=4, steps=6, seed=1)}, "recipe.seed: 0 there, 1 here"),
        ({"about": {"task": {"class_path": "other"}}}, "task.class_path"),
    ],
)
def test_another_identity_is_refused_with_the_fields_named(tmp_path: Path, change: dict[str, Any], names: str) -> None:
    train(how=execution(tmp_path))
    recipe = change.pop("recipe", RECIPE)
    with pytest.raises(CheckpointError) as caught:
        train(recipe, execution(tmp_path), resume="auto", **change)
    assert names in str(caught.value)
    assert caught.value.exit_code == 2


def test_another_model_or_optimizer_is_another_identity(tmp_path: Path) -> None:
    train(how=execution(tmp_path))
    with Run(RECIPE, execution(tmp_path), resume="auto") as run:
        model = nn.Linear(4, 4)
        run.track(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.02))
        with pytest.raises(CheckpointError, match=r"tracked\."):
            run.digest()


def test_another_dataset_is_refused(tmp_path: Path) -> None:
    train(how=execution(tmp_path, stop_at=2))
    with (
        Run(RECIPE, execution(tmp_path), resume="auto") as run,
        pytest.raises(CheckpointError, match="another dataset, samples: 20"),
    ):
        Trained(run).steps(TensorDataset(*DATA[:20]))


def test_weights_of_another_run_are_a_start(tmp_path: Path) -> None:
    with Run(RECIPE, execution(tmp_path / "one")) as run:
        first = Trained(run)
        first.steps()
    recipe = Recipe(batch=8, micro_batch=1, lanes=4, steps=2, seed=5, init_from=str(tmp_path / "one"))
    with Run(recipe, execution(tmp_path / "two")) as run:
        second = Trained(run, seed=3)
        run.digest()
        for ours, theirs in zip(second.model.parameters(), first.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert run.position == 0
        assert not second.optimizer.state
        expected = second.steps()
    shutil.rmtree(tmp_path / "one")  # a resume needs it no more
    with Run(recipe, execution(tmp_path / "two"), resume="must") as run:
        Trained(run)
        run.digest()
        assert run.position == expected[-1].step
    bad = Recipe(batch=8, micro_batch=1, lanes=4, steps=2, init_from=str(tmp_path / "nowhere"))
    with Run(bad) as run, pytest.raises(CheckpointError, match="no checkpoint there"):
        Trained(run).steps()


def test_a_damaged_checkpoint_is_passed_over_and_told(tmp_path: Path) -> None:
    expected, _ = train(how=execution(tmp_path, checkpoint_every=2, stop_at=4))
    weights = tmp_path / "checkpoints" / "step-00000004" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with Run(RECIPE, execution(tmp_path), resume="auto") as run:
        trained = Trained(run)
        assert [done.step for done in trained.steps()] == [3, 4, 5, 6]
        assert run.digest() == train()[0] != expected
    (told,) = read_events(tmp_path / "events.jsonl", "passed_over")
    assert told["what"] == "step-00000004"


@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_fails_ends_the_run_and_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    save = Store.save

    def full(self: Store, snapshot: Any, identity: Any) -> Path:
        if snapshot.step == 4:
            raise CheckpointError("cannot save the checkpoint of step 4", found="No space left on device")
        return save(self, snapshot, identity)

    monkeypatch.setattr(Store, "save", full)
    recipe = Recipe(batch=8, micro_batch=1, lanes=4, steps=40)
    with (
        Run(recipe, execution(tmp_path, checkpoint_every=2, async_checkpoint=background)) as run,
        pytest.raises(CheckpointError, match="No space left"),
    ):
        Trained(run).steps()
    assert run.position < 40
    assert (tmp_path / "checkpoints" / "step-00000002").is_dir()
    assert not (tmp_path / "checkpoints" / "step-00000004").exists()
    (error,) = [e["error"] for e in read_events(tmp_path / "events.jsonl", "checkpoint") if "error" in e]
    assert "No space left" in error


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    x_SF, y_SF = (tensor.clone() for tensor in DATA.tensors)
    x_SF[:] = torch.nan
    with Run(RECIPE, execution(tmp_path)) as run, pytest.raises(NonFiniteError, match="step 1"):
        Trained(run).steps(TensorDataset(x_SF, y_SF))


def test_hooks_and_threads_are_gone_after_a_run_and_the_model_is_plain() -> None:
    with Run(RECIPE) as run:
        trained = Trained(run)
        trained.steps()
    for parameter in trained.model.parameters():
        assert not parameter._post_accumulate_grad_hooks
    assert list(trained.model.state_dict()) == list(nn.Sequential(*trained.model).state_dict())
    trained.model.zero_grad()
    trained.model(torch.zeros(2, 4)).sum().backward()
