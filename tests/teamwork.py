"""Steps of a small model by a team, below `Run`: for tests of what a step does with any number of workers.

Torch's generator belongs to the process, so teams of threads may draw no random numbers: no dropout here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from paceline.data.loader import Loader
from paceline.data.order import Plan
from paceline.determinism import digest, tensor_digest
from paceline.reduction.buffers import LaneBuffers
from paceline.reduction.reducer import Reducer
from paceline.step import Done, Policy, Signals, Step
from paceline.team import Team, ThreadTeam

__all__ = ["Seen", "Setup", "plan_of", "same_bytes", "work", "work_in_threads"]

TrainStep = Callable[[Step, nn.Module, torch.optim.Optimizer], None]


def plan_of(samples: int, lanes: int, *, micro_batch: int = 2, micro_steps: int = 1) -> Plan:
    """A plan in the order of the data, each sample once an epoch."""
    return Plan(
        samples=samples,
        batch=lanes * micro_batch * micro_steps,
        micro_batch=micro_batch,
        lanes=lanes,
        tail="short",
        order="sequential",
        seed=0,
    )


def plain_step(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Squared error of ``model(x)``."""
    for x_BF, y_BF in step:
        step.backward((model(x_BF) - y_BF).square().sum(), weight=len(x_BF))
    step.update(optimizer, max_norm=1.0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Everything:
    """What is tracked: whatever a step asks for."""

    def __contains__(self, thing: object) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the steps are made of; everything but the workers."""

    model: nn.Module
    plan: Plan
    data: Dataset[Any] = field(
        default_factory=lambda: TensorDataset(
            *torch.randn(2, 64, 6, generator=torch.Generator().manual_seed(7)).unbind()
        )
    )
    steps: int = 2
    train_step: TrainStep = plain_step
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    bucket_bytes: int = 2**20
    gradients: Literal["exact", "allreduce"] = "exact"
    compress: Literal["none", "bf16"] = "none"
    overlap: bool = True
    policy: Policy = field(default_factory=lambda: Policy(on_nonfinite="raise", skip_loss_above=None))
    signals: Callable[[Team], Signals] = lambda team: Signals()
    loader_workers: int = 0


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One worker's view of the end.

    Args:
        digest: of the model with its buffers, and the optimizer's state.
        grads: by parameter name, as they stand after the last step.
    """

    digest: str
    grads: dict[str, Tensor | None]
    done: list[Done]
    model: nn.Module


def work(team: Team, setup: Setup) -> Seen:
    """The steps of ``setup``, by one worker of ``team``. Collective."""
    model = copy.deepcopy(setup.model)
    optimizer = setup.optimizer(model)
    reducer = Reducer(
        team,
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lanes=setup.plan.lanes,
        bucket_bytes=setup.bucket_bytes,
        gradients=setup.gradients,
        compress=setup.compress,
        overlap=setup.overlap,
    )
    buffers = LaneBuffers({"model": model})
    loader = Loader(
        setup.data, seed=0, collate=None, device=team.device, loader_workers=setup.loader_workers, threads=1
    )
    batches = loader.train(setup.plan, reducer.lanes, range(setup.steps))
    done: list[Done] = []
    try:
        for number in range(setup.steps):
            step = Step(
                number=number,
                phase=0,
                plan=setup.plan,
                batches=batches,
                reducer=reducer,
                buffers=buffers,
                team=team,
                policy=setup.policy,
                signals=setup.signals(team),
                tracked=Everything(),
            )
            done.append(step.run(lambda step: setup.train_step(step, model, optimizer)))
    finally:
        reducer.close()
    return Seen(
        digest=digest(model.state_dict()),
        grads={name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        done=done,
        model=model,
    )


def work_in_threads(workers: int, setup: Setup) -> list[Seen]:
    """`work` by ``workers`` threads; one result each."""
    return ThreadTeam.run(workers, lambda team: work(team, setup))


def same_bytes(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal dtype, shape and bytes, so that -0.0 differs from 0.0 and a NaN equals itself; or both ``None``."""
    if a is None or b is None:
        return a is b
    return tensor_digest("", a) == tensor_digest("", b)
