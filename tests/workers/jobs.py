"""What the processes of the pool run: small trainings that touch all that could move a bit."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.config import Execution, Recipe, Resume
from paceline.determinism import seed_by
from paceline.events import Sink
from paceline.progress import TensorBoard
from paceline.run import Run
from paceline.step import Step
from paceline.tasks import Language, Task
from paceline.train import train


class Waves(Dataset[Any]):
    """Sequences with a class each. A sample is made with noise from each of the three generators."""

    def __init__(self, samples: int) -> None:
        drawn = torch.Generator().manual_seed(11)
        self.x_SCT = torch.randn(samples, 3, 8, generator=drawn)
        self.y_S = torch.randint(5, (samples,), generator=drawn)

    def __len__(self) -> int:
        return len(self.y_S)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(3, 8) * 0.1 + float(np.random.randn()) * 0.1
        return self.x_SCT[index] * (1 if random.random() < 0.5 else -1) + noise, self.y_S[index]


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.mix, self.norm, self.dropout = nn.Conv1d(6, 6, 1), nn.BatchNorm1d(6), nn.Dropout(dropout)

    def forward(self, x_BCT: Tensor) -> Tensor:
        y_BCT: Tensor = self.dropout(self.norm(self.mix(x_BCT)))
        return x_BCT + (y_BCT if random.random() < 0.5 else y_BCT.relu())


class Net(nn.Module):
    """BatchNorm, dropout, tied weights, a branch that not every micro-batch takes, a layer that nothing uses, and two
    that can be recomputed."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv1d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm1d(6)
        self.layers = nn.ModuleList([Layer(dropout) for _ in range(2)])
        self.mix = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.mix.weight
        self.rare, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 5)

    def forward(self, x_BCT: Tensor) -> Tensor:
        h_BCT = torch.relu(self.norm(self.stem(x_BCT)))
        for layer in self.layers:
            h_BCT = layer(h_BCT)
        h_BD = h_BCT.mean(-1)
        h_BD = self.dropout(self.tied(torch.tanh(self.mix(h_BD))))
        if float(x_BCT.detach()[0, 0, 0]) > 1:
            h_BD = h_BD + self.rare(h_BD)
        logits_BV: Tensor = self.head(h_BD)
        return logits_BV


class Classify(Task):
    """`Net` on `Waves`; the last 20 samples are held out."""

    def __init__(self, samples: int = 69, dropout: float = 0.2) -> None:
        self.samples, self.dropout = samples, dropout

    def build_model(self) -> nn.Module:
        return Net(self.dropout)

    def train_data(self) -> Dataset[Any]:
        return Waves(self.samples)

    def valid_data(self) -> Dataset[Any]:
        return Waves(20)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        x_BCT, y_B = batch
        return nn.functional.cross_entropy(model(x_BCT).float(), y_B, reduction="sum"), len(y_B)


class Recorder(Sink):
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, event: Mapping[str, Any]) -> None:
        self.events.append(dict(event))

    def close(self) -> None:
        pass


def train_task(
    task: Task, recipe: Recipe, execution: Execution, resume: Resume = "never", sinks: Sequence[Sink] = ()
) -> dict[str, Any]:
    """``train``; on worker 0 the digest, and every loss that was logged, to the last bit."""
    recorder = Recorder()
    sinks = [recorder, *sinks]
    if execution.tensorboard and os.environ.get("RANK", "0") == "0":
        sinks.append(TensorBoard(Path(execution.run_dir or "") / "tensorboard"))
    code = train(task, recipe, execution, resume=resume, sinks=sinks)
    told = recorder.events
    ends = [event for event in told if event["event"] == "end"]
    return {
        "code": code,
        "digest": ends[0]["digest"] if ends else None,
        "step": ends[0]["step"] if ends else None,
        "losses": {event["step"]: float(event["loss"]).hex() for event in told if event["event"] == "step"},
        "held out": {event["step"]: float(event["loss"]).hex() for event in told if event["event"] == "evaluate"},
        "kinds": sorted({event["event"] for event in told}),
    }


def classify(recipe: Recipe, execution: Execution, resume: Resume = "never", **task: Any) -> dict[str, Any]:
    return train_task(Classify(**task), recipe, execution, resume)


def language(data: str, recipe: Recipe, execution: Execution, resume: Resume = "never") -> dict[str, Any]:
    """A GPT on a headerless ``.bin``."""
    task = Language(data, width=16, layers=2, heads=2, kv_heads=1, hidden=32, context=8, dropout=0.1, vocabulary=40)
    return train_task(task, recipe, execution, resume)


def own_loop(recipe: Recipe, execution: Execution) -> dict[str, Any]:
    """The loop-level API, with what ``train`` does not do: noise on the gradients, and evaluation amid training."""
    with Run(recipe, execution) as run:
        seed_by("other weights on every worker", run.rank)  # tracking makes them equal
        model = Net(dropout=0.3).to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.track(model=model, optimizer=optimizer)

        def train_step(step: Step) -> None:
            for x_BCT, y_B in step:
                loss = nn.functional.cross_entropy(model(x_BCT), y_B, reduction="sum")
                step.backward(loss, weight=len(y_B))
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad += 0.01 * torch.randn_like(parameter.grad)
            step.update(optimizer, max_norm=1.0)

        def score(batch: Any) -> dict[str, tuple[Tensor | float, float]]:
            x_BCT, y_B = batch
            logits_BV = model(x_BCT)
            right = float((logits_BV.argmax(-1) == y_B).sum())
            return {
                "loss": (nn.functional.cross_entropy(logits_BV, y_B, reduction="sum"), len(y_B)),
                "right": (right, 1),
            }

        history = []
        for done in run.steps(Waves(69), train_step):
            scores = run.evaluate(Waves(21), score)
            history.append((done.step, done.loss.hex(), sorted((k, v.hex()) for k, v in scores.items())))
        return {"digest": run.digest(), "history": history}


# Jobs that fail.


def fail_on(rank: int, step_number: int, execution: Execution, how: str = "raise") -> str:
    """Trains until worker ``rank`` fails in ``step_number``, before its first backward."""
    with Run(Recipe(batch=16, micro_batch=2, steps=10), execution) as run:
        model = Net(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)

        def train_step(step: Step) -> None:
            for x_BCT, y_B in step:
                if run.rank == rank and step.number == step_number:
                    if how == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise ValueError(f"a mistake on worker {rank}")
                step.backward(nn.functional.cross_entropy(model(x_BCT), y_B, reduction="sum"), weight=len(y_B))
            step.update(optimizer)

        for _ in run.steps(Waves(30), train_step):
            pass
        return run.digest()


def fail_after_the_exchange(rank: int, execution: Execution) -> None:
    """Worker ``rank`` fails between the loop over the step and the update, the others wait in their next step."""
    with Run(Recipe(batch=16, micro_batch=2, steps=10), execution) as run:
        model = Net(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)

        def train_step(step: Step) -> None:
            for x_BCT, y_B in step:
                step.backward(nn.functional.cross_entropy(model(x_BCT), y_B, reduction="sum"), weight=len(y_B))
            if run.rank == rank and step.number == 2:
                raise ValueError(f"a late mistake on worker {rank}")
            step.update(optimizer)

        for _ in run.steps(Waves(30), train_step):
            pass


class Poisoned(Waves):
    """One sample is not a number."""

    def __init__(self, samples: int, bad: int) -> None:
        super().__init__(samples)
        self.x_SCT[bad] = torch.nan


def train_poisoned(recipe: Recipe, execution: Execution, bad: int) -> dict[str, Any]:
    with Run(recipe, execution) as run:
        seed_by("model")
        model = nn.Sequential(nn.Flatten(), nn.Linear(24, 5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)

        def train_step(step: Step) -> None:
            for x_BCT, y_B in step:
                step.backward(nn.functional.cross_entropy(model(x_BCT), y_B, reduction="sum"), weight=len(y_B))
            step.update(optimizer, max_norm=1.0)

        skipped = [done.step for done in run.steps(Poisoned(40, bad), train_step) if done.skipped]
        return {"digest": run.digest(), "skipped": skipped}


def differ_in_architecture(execution: Execution) -> None:
    with Run(Recipe(batch=16, micro_batch=2, steps=1), execution) as run:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3 if run.rank == 1 else 4))
        run.track(model=model)
        run.digest()


def differ_in_untracked_ways(execution: Execution) -> None:
    with Run(Recipe(batch=16, micro_batch=2, steps=1), execution) as run:
        model = nn.Linear(4, 4)
        run.track(model=model)
        run.digest()
        with torch.no_grad():
            model.bias.add_(run.rank)
        run.digest()


def late_by(seconds: float, execution: Execution) -> None:
    """Worker 1 is slower than the others wait."""
    with Run(Recipe(batch=16, micro_batch=2, steps=1), execution) as run:
        if run.rank == 1:
            time.sleep(seconds)
        run.track(model=nn.Linear(2, 2))
        run.digest()


def die_with_loaders(directory: str, rank: int, execution: Execution) -> None:
    """Worker ``rank`` notes its loader processes and is killed."""
    with Run(Recipe(batch=16, micro_batch=2, steps=50), execution) as run:
        model = Net(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)

        def train_step(step: Step) -> None:
            for x_BCT, y_B in step:
                if run.rank == rank and step.number == 2:
                    children = psutil.Process().children()
                    Path(directory, "loaders").write_text(" ".join(str(child.pid) for child in children))
                    os.kill(os.getpid(), signal.SIGKILL)
                step.backward(nn.functional.cross_entropy(model(x_BCT), y_B, reduction="sum"), weight=len(y_B))
            step.update(optimizer)

        for _ in run.steps(Waves(30), train_step):
            pass


def stop_by_signal(number: int, step_number: int, rank: int, recipe: Recipe, execution: Execution) -> dict[str, Any]:
    """``train`` in which worker ``rank`` alone gets a signal in the middle of a step."""

    mine = os.environ.get("RANK", "0") == str(rank)
    micro_batches = recipe.lanes // int(os.environ.get("WORLD_SIZE", "1"))
    calls: list[int] = []

    class Signalled(Classify):
        def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
            if model.training:
                calls.append(1)
                if mine and len(calls) == 1 + step_number * micro_batches:
                    os.kill(os.getpid(), number)
            return super().loss(model, batch)

    return train_task(Signalled(), recipe, execution)


def nothing() -> int:
    return os.getpid()


def wait_for_ever() -> None:
    time.sleep(600)


def leak_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(60,), name="forgotten", daemon=True).start()
