"""Speed under one fixed budget: what recompute is worth if it is chosen by the plan, uniform, or written by hand.

Each row is a process of its own that trains for real with one worker: `paceline.train` with ``execution.memory`` as its
budget, or plain DDP with every other block recomputed by `torch.utils.checkpoint`, as people do by hand. All steps have
the same samples, whatever the micro-batch. The processes wait for their turn: one step of each, one after the other,
round by round (two budgets at a time, on two cores); tokens/s is the median over the rounds, and of two rows the median
of the rounds' ratios is compared. The peak is the kernel's, of the whole process (VmHWM).

For each budget: the largest micro-batch that fits with none, every:2, all and auto, by the plan; and at each of these
auto beside the best uniform choice that fits, of every:4, every:3, every:2 and all. DDP has the largest micro-batch of
which it turns out that it fits.

Bars: no run of Paceline's has more than the budget; auto has the largest micro-batch; and at equal micro-batch it is as
fast as the best uniform choice, less 3 % for what one machine's figures differ by.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

from paceline.config import Execution, Optimizer, Recipe
from paceline.determinism import configure_process
from paceline.memory.peak import Peak
from paceline.memory.plan import uniform
from paceline.optim import build_optimizer
from paceline.parsing import Settings, TaskSpec
from paceline.planning.grid import Mode, cell
from paceline.planning.looks import look
from paceline.planning.state import footprint, process_bytes
from paceline.sizes import parse_size, show_size
from paceline.tasks import Language
from paceline.train import train

T = TypeVar("T")

MODES = ("none", "every:4", "every:3", "every:2", "all", "auto")
"""From fast to slow, and then the one that is to be the best."""
BY_HAND = "DDP, every other block by hand"
WARM_STEPS = 2
EQUALLY_FAST = 0.97


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, the samples of a step, and what its worker may hold."""

    width: int
    layers: int
    context: int
    vocabulary: int
    batch: int
    budget: str

    def task(self, data: Path) -> TaskSpec:
        names = ("width", "layers", "context", "vocabulary")
        arguments = {"data": str(data), **{name: getattr(self, name) for name in names}}
        return TaskSpec(class_path="paceline.tasks.Language", init_args=arguments)

    def recipe(self, micro_batch: int) -> Recipe:
        return Recipe(batch=self.batch, micro_batch=micro_batch, lanes=1, steps=1000, device="cpu")

    def execution(self, mode: str) -> Execution:
        return Execution(workers=1, recompute=mode, memory=self.budget, checkpoint_every=None, log_every=1)

    def __str__(self) -> str:
        return (
            f"{self.layers} x {self.width}, {self.context} tokens of {self.vocabulary:,}, {self.batch} samples a step; "
            f"budget {self.budget}"
        )


JOBS = [
    Job(width=256, layers=12, context=128, vocabulary=4096, batch=16, budget="880MiB"),
    Job(width=384, layers=8, context=128, vocabulary=2048, batch=16, budget="900MiB"),
    Job(width=256, layers=8, context=256, vocabulary=8192, batch=8, budget="840MiB"),
    Job(width=192, layers=12, context=512, vocabulary=1024, batch=4, budget="640MiB"),
]
QUICK_JOBS = [Job(width=128, layers=8, context=128, vocabulary=512, batch=16, budget="420MiB")]


@dataclass(frozen=True)
class Way:
    """One row: how it recomputes, and its micro-batch."""

    mode: str
    micro_batch: int


@dataclass
class Row:
    """What a row's process had and did."""

    way: Way
    told: str
    peak: int = 0
    seconds: list[float] = field(default_factory=list)


# ---- planned


def planned_peaks(job: Job, data: Path) -> dict[Way, int]:
    """The most bytes of each mode with the three largest micro-batches, as `paceline plan` counts them."""
    configure_process(threads=1, device=torch.device("cpu"))
    process, budget = process_bytes(job.recipe(1)), parse_size(job.budget, "the budget")
    peaks: dict[Way, int] = {}
    for micro_batch in (size for size in range(1, job.batch + 1) if job.batch % size == 0 and 8 * size > job.batch):
        recipe, execution = job.recipe(micro_batch), job.execution("none")
        settings = Settings(task=job.task(data), recipe=recipe, execution=execution)
        looked = look(settings, own_mode="none", most=1, further=lambda _: (False, False), tell=lambda *_: None)
        (costs,) = looked.costs.values()
        batch = looked.sample_bytes * micro_batch
        there = footprint(looked.state, recipe, execution, lanes=1, workers=1, process=process, batch=batch)
        modes: dict[str, Mode] = {"auto": "auto", "none": uniform(costs.blocks, "keep")}
        modes |= {f"every:{k}": uniform(costs.blocks, "full", k) for k in (2, 3, 4)} | {
            "all": uniform(costs.blocks, "full")
        }
        for name, mode in modes.items():
            found = cell(costs, there, mode, budget)
            assert found is not None
            peaks[Way(name, micro_batch)] = found.peak
    return peaks


def ways_to_run(peaks: Mapping[Way, int], budget: int) -> list[Way]:
    """The modes with their largest micro-batches; and at each of these, the best uniform one that fits, and auto."""
    fitting = [way for way, peak in peaks.items() if peak <= budget]
    largest = {mode: max((w.micro_batch for w in fitting if w.mode == mode), default=0) for mode in MODES}
    ways = {Way(mode, largest[mode]) for mode in ("none", "every:2", "all", "auto")}
    for size in {*largest.values()} - {largest["none"]}:
        ways |= {Way(mode, size) for mode in (best_uniform(fitting, size), "auto") if mode is not None}
    return sorted(ways & {*fitting}, key=lambda way: (way.micro_batch, MODES.index(way.mode)))


def best_uniform(ways: Sequence[Way], micro_batch: int) -> str | None:
    """The one that recomputes the least of those there are."""
    return next((mode for mode in MODES[:-1] if Way(mode, micro_batch) in ways), None)


# ---- run


class Gate:
    """A sink that holds a run between two steps until it is this run's turn.

    Sends how long the step took and the process's peak; receives whether to go on.
    """

    def __init__(self, pipe: Connection, peak: Peak) -> None:
        self._pipe, self._peak = pipe, peak
        self._told = ""
        self._begun = time.perf_counter()

    def event(self, event: Mapping[str, Any]) -> None:
        """The run waits while this is at work."""
        if event["event"] == "recompute":
            self._told = event["told"]
        elif event["event"] == "step" and event["step"] >= WARM_STEPS:
            self.wait()

    def wait(self) -> None:
        """For the next turn, or the end."""
        self._pipe.send((time.perf_counter() - self._begun, self._peak.bytes, self._told))
        if not self._pipe.recv():
            os._exit(0)
        self._begun = time.perf_counter()

    def close(self) -> None:
        """It ends with the process."""


def with_paceline(job: Job, way: Way, data: Path, pipe: Connection) -> None:
    """`paceline train`, in a process of its own."""
    with Peak() as peak:
        execution = job.execution(way.mode)
        train(job.task(data).make(), job.recipe(way.micro_batch), execution, sinks=[Gate(pipe, peak)])


def by_hand(job: Job, way: Way, data: Path, pipe: Connection) -> None:
    """Plain DDP, as people write it; threads and deterministic kernels as Paceline sets them."""
    with Peak() as peak:
        gate = Gate(pipe, peak)
        configure_process(threads=1, device=torch.device("cpu"))
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        task = job.task(data).make()
        assert isinstance(task, Language)
        torch.manual_seed(0)
        model: nn.Module = task.build_model()
        for block in list(model.get_submodule("blocks").children())[::2]:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        model = DistributedDataParallel(model)
        optimizer = build_optimizer(model, Optimizer())
        windows = task.train_data()
        loader = DataLoader(windows, batch_size=way.micro_batch, sampler=DistributedSampler(windows), drop_last=True)
        batches = _endless(loader)
        micro_steps = job.batch // way.micro_batch
        for step in range(1, 1000):
            for micro in range(micro_steps):
                x_BT, y_BT = next(batches)
                model.require_backward_grad_sync = micro == micro_steps - 1
                loss = F.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten())
                (loss / micro_steps).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step >= WARM_STEPS:
                gate.wait()


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def in_child(function: Callable[..., T], *args: Any) -> T:
    """Calls it in a fork of this process, which has computed nothing so far."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def call() -> None:
        sending.send(function(*args))

    child = context.Process(target=call)
    child.start()
    sending.close()
    try:
        returned: T = receiving.recv()
    except EOFError:
        raise SystemExit("a process ended without an answer: see above") from None
    child.join()
    return returned


class Running:
    """A process that trains in turns."""

    def __init__(self, job: Job, way: Way, data: Path) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        body: Callable[..., None] = by_hand if way.mode == BY_HAND else with_paceline
        self._process = context.Process(target=body, args=(job, way, data, theirs))
        self._process.start()
        theirs.close()
        self.row = Row(way, "")
        self._receive()  # warm

    def step(self) -> None:
        """One, while nothing else of this benchmark runs."""
        self._pipe.send(True)
        self.row.seconds.append(self._receive())

    def end(self) -> None:
        self._pipe.send(False)
        self._process.join()

    def _receive(self) -> float:
        try:
            seconds, self.row.peak, self.row.told = self._pipe.recv()
        except EOFError:
            raise SystemExit(f"{self.row.way} has ended: see above") from None
        return float(seconds)


def largest_by_hand(job: Job, data: Path, first: int) -> Running | None:
    """DDP with the largest micro-batch of which it turns out that it fits, from ``first`` down."""
    for size in (size for size in range(first, 0, -1) if job.batch % size == 0):
        running = Running(job, Way(BY_HAND, size), data)
        if running.row.peak <= parse_size(job.budget, "the budget"):
            return running
        running.end()
    return None


# ---- told


def budget_figures(jobs: Sequence[Job], data: Path, *, rounds: int) -> tuple[str, list[str]]:
    """Tables as Markdown, and the bars that were missed. Two budgets at a time, each on a core."""
    tables: list[str] = []
    missed: list[str] = []
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        measured = pool.map(_measured, jobs, [data] * len(jobs), [rounds] * len(jobs))
        for job, (rows, peaks) in zip(jobs, measured, strict=True):
            tables.append(_table(job, rows, peaks))
            missed += [f"{job}: {what}" for what in _missed(job, rows, peaks)]
            print(f"budget {len(tables)}/{len(jobs)}  {job}: {len(rows)} ways, {rounds} rounds", flush=True)
    return "\n\n".join(tables), missed


def _measured(job: Job, data: Path, rounds: int) -> tuple[list[Row], dict[Way, int]]:
    peaks = in_child(planned_peaks, job, data)
    budget = parse_size(job.budget, "the budget")
    ways = ways_to_run(peaks, budget)
    running = [Running(job, way, data) for way in ways]
    by_two = max((way.micro_batch for way in ways if way.mode == "every:2"), default=1)
    by_hand = largest_by_hand(job, data, by_two)
    running += [] if by_hand is None else [by_hand]
    for number in range(rounds):
        for each in running if number % 2 else reversed(running):
            each.step()
    for each in running:
        each.end()
    return [each.row for each in running], peaks


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row, float]]:
    """auto, the best uniform way with as large a micro-batch, and how many times as fast auto is."""
    known = {row.way: row for row in rows}
    pairs = []
    for size in sorted({way.micro_batch for way in known}):
        mode = best_uniform([*known], size)
        if mode not in (None, "none") and Way("auto", size) in known:
            auto, uniform_one = known[Way("auto", size)], known[Way(str(mode), size)]
            pairs.append((auto, uniform_one, _times_as_fast(auto, uniform_one)))
    return pairs


def _times_as_fast(row: Row, other: Row) -> float:
    return statistics.median(b / a for a, b in zip(row.seconds, other.seconds, strict=True))


def _table(job: Job, rows: Sequence[Row], peaks: Mapping[Way, int]) -> str:
    text = f"**{job}**\n\n| way | micro-batch | tokens/s | planned | peak | chosen |\n|---|--:|--:|--:|--:|---|\n"
    for row in rows:
        speed = job.batch * job.context / statistics.median(row.seconds)
        planned = show_size(peaks[row.way]) if row.way in peaks else ""
        chosen = row.told.split(";")[0] if row.way.mode == "auto" else ""
        cells = [row.way.mode, str(row.way.micro_batch), f"{speed:.0f}", planned, show_size(row.peak), chosen]
        text += f"| {' | '.join(cells)} |\n"
    for auto, other, ratio in _pairs(rows):
        text += f"\nmicro-batch {auto.way.micro_batch}: auto is {ratio:.3f} times as fast as {other.way.mode}  "
    return text


def _missed(job: Job, rows: Sequence[Row], peaks: Mapping[Way, int]) -> Iterator[str]:
    budget = parse_size(job.budget, "the budget")
    for row in rows:
        if row.peak > budget and row.way.mode != BY_HAND:
            yield f"{row.way.mode} at micro-batch {row.way.micro_batch} has {show_size(row.peak)}"
    for auto, other, ratio in _pairs(rows):
        if ratio < EQUALLY_FAST:
            yield f"auto at micro-batch {auto.way.micro_batch} is {ratio:.3f} times as fast as {other.way.mode}"
    most = max((way.micro_batch for way, peak in peaks.items() if peak <= budget), default=0)
    if Way("auto", most) not in {row.way for row in rows}:
        yield "auto does not fit"
