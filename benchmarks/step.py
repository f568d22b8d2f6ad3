"""Steps per second of Paceline against a hand-written DistributedDataParallel loop, interleaved in one run.

    python benchmarks/step.py [--rounds 9] [--steps 8] [--job compute] [--gradients exact]

Both sides live in the same processes (torchrun, 2 workers, one thread each), train the same model on the same tokens
with fused AdamW and clipping, and take turns: a few steps of one, a few of the other. Reported: the median over rounds
of each side's tokens per second, and the median of the rounds' ratios. Lanes = workers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from paceline.config import Execution, Optimizer, Recipe
from paceline.models import GPT, GPTConfig
from paceline.optim import build_optimizer
from paceline.run import Run
from paceline.step import Step


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model and its batch: micro_batch samples of context tokens, micro_steps times per worker and step."""

    layers: int
    width: int
    context: int
    micro_batch: int
    micro_steps: int
    vocabulary: int = 8192

    def model(self) -> GPT:
        torch.manual_seed(0)
        heads = self.width // 64
        config = GPTConfig(
            vocabulary=self.vocabulary,
            context=self.context,
            width=self.width,
            layers=self.layers,
            heads=heads,
            kv_heads=heads,
            hidden=-(-8 * self.width // (3 * 64)) * 64,
            dropout=0.0,
            tied=False,
        )
        return GPT(config)


JOBS = {
    "compute": Job(layers=4, width=256, context=256, micro_batch=4, micro_steps=2),
    "communication": Job(layers=6, width=512, context=64, micro_batch=2, micro_steps=1),
}


class RandomTokens(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random windows held in memory, so that loading costs both sides the same next to nothing."""

    keyed = False

    def __init__(self, job: Job, samples: int) -> None:
        shape = (samples, job.context + 1)
        self.tokens_NT = torch.randint(job.vocabulary, shape, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens_NT)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens_NT[index, :-1], self.tokens_NT[index, 1:]


def plain_ddp(job: Job, data: RandomTokens, group: dist.ProcessGroup) -> Iterator[None]:
    """One step per `next`: the loop as people write it."""
    model = DistributedDataParallel(job.model(), process_group=group)
    optimizer = build_optimizer(model, Optimizer())
    loader = DataLoader(data, batch_size=job.micro_batch, sampler=DistributedSampler(data))
    batches = iter(loader)
    while True:
        for micro in range(job.micro_steps):
            x_BT, y_BT = next(batches)
            model.require_backward_grad_sync = micro == job.micro_steps - 1
            loss = model(x_BT, y_BT) / y_BT.numel() / job.micro_steps
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        yield


def with_paceline(job: Job, data: RandomTokens, run: Run) -> Iterator[None]:
    """The same step by Paceline."""
    model = job.model()
    optimizer = build_optimizer(model, run.recipe.optimizer)
    run.track(model=model, optimizer=optimizer)

    def train_step(step: Step) -> None:
        for x_BT, y_BT in step:
            step.backward(model(x_BT, y_BT), weight=y_BT.numel())
        step.update(optimizer, max_norm=1.0)

    for _ in run.steps(data, train_step):
        yield


def worker(arguments: argparse.Namespace) -> None:
    job = JOBS[arguments.job]
    workers = arguments.workers
    steps = arguments.steps * (arguments.rounds + 2)
    batch = job.micro_batch * job.micro_steps * workers
    recipe = Recipe(batch=batch, micro_batch=job.micro_batch, lanes=workers, steps=steps, gradients=arguments.gradients)
    data = RandomTokens(job, steps * batch)
    run = Run(recipe, Execution())
    group = dist.new_group()  # Paceline's own thread issues all collectives of the other one
    assert group is not None
    sides = {"ddp": plain_ddp(job, data, group), "paceline": with_paceline(job, data, run)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(arguments.rounds + 2):
        for name in list(sides) if number % 2 else list(reversed(sides)):
            dist.barrier(group)
            begun = time.perf_counter()
            for _ in range(arguments.steps):
                next(sides[name])
            dist.barrier(group)
            if number >= 2:  # the first rounds allocate and learn bucket orders
                seconds[name].append(time.perf_counter() - begun)
    if run.is_main:
        tokens = batch * job.context * arguments.steps
        ratios = [ddp / ours for ddp, ours in zip(seconds["ddp"], seconds["paceline"], strict=True)]
        speeds = {name: tokens / statistics.median(values) for name, values in seconds.items()}
        print(
            f"{arguments.job:13} {workers} workers, {arguments.gradients}: "
            f"paceline {speeds['paceline']:8.0f} tokens/s, plain DDP {speeds['ddp']:8.0f} tokens/s, "
            f"ratio {statistics.median(ratios):.3f} (rounds {min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )
    os._exit(0)  # two generators hold half-finished steps: nothing is left to end in order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--job", choices=list(JOBS))
    parser.add_argument("--gradients", choices=("exact", "allreduce"), default="exact")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments)
        return
    for job in [arguments.job] if arguments.job else list(JOBS):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={arguments.workers}", __file__]
        command += ["--job", job, "--gradients", arguments.gradients]
        command += ["--workers", str(arguments.workers)]
        command += ["--rounds", str(arguments.rounds), "--steps", str(arguments.steps)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
