"""What `paceline plan` says a run will need, beside what the run then has; and what fits a fixed budget how fast.

    python benchmarks/memory.py [--quick] [--only plan,budget] [--out memory.md]

**plan**: for a dozen configurations (widths, depths, contexts, vocabularies, precisions, ways to recompute, chunks of
the loss, lanes, workers)

* activations: the plan's, from shapes alone, against the most bytes of tensors alive in a real forward and backward
  (`LiveBytes`; without what was there before), in a process of its own. Beside it how much that process grew, which
  holds what kernels take for themselves, too.
* worker: "most at once" of `paceline plan CONFIG` against VmHWM, the kernel's "high water mark" of resident memory, of
  the worker of a real `paceline train CONFIG` that has the most: six steps of two micro-batches a lane, since gaps in
  the heap grow for some, with a checkpoint after the fourth and the last. Pages that a worker shares with the process
  it was forked from count in full. A checkpoint that is written in the background counts as there when the next step is
  at its peak, which on a fast disk it is not: so these save in the foreground.
* verdict: `paceline plan CONFIG --memory X` must refuse if X is one byte less than what the run had, or it would say
  "fits" of what does not. With ``recompute: auto``, which chooses anew for X, the run must keep its own budget.

Bars: activations within 5 %, the worker within 10 %, and never "fits" of what does not.

**budget**: ``memory_budget.py``. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from memory_budget import JOBS, QUICK_JOBS, budget_figures, in_child
from torch import Tensor

from paceline.determinism import autocast, configure_process
from paceline.events import read_events
from paceline.memory.live import LiveBytes, gradients_in_place
from paceline.memory.peak import Peak, resident_bytes
from paceline.memory.recompute import set_levels
from paceline.parsing import Settings, parse
from paceline.planning.grid import Cell, cell
from paceline.planning.looks import look
from paceline.planning.state import footprint, process_bytes
from paceline.sizes import parse_size, show_size

MIB = 2**20
POLL_S = 0.005
DEADLINE_S = 300.0
ACTIVATIONS_BAR, WORKER_BAR = 0.05, 0.10


@dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration.

    Args:
        room: for ``auto``: how much of what ``all`` would free there is room for all the same.
    """

    width: int
    layers: int
    context: int
    vocabulary: int
    micro_batch: int
    lanes: int = 1
    workers: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    recompute: str = "none"
    room: float = 0.5
    loss_chunks: int | None = None
    dropout: float = 0.0
    optimizer: str = "AdamW"

    def write(self, path: Path, data: Path, memory: int | None) -> None:
        """As a configuration file; JSON is YAML."""
        names = ("width", "layers", "context", "vocabulary", "dropout")
        arguments = {"data": str(data), **{name: getattr(self, name) for name in names}}
        recipe = {
            "batch": 2 * self.micro_batch * self.lanes,
            "micro_batch": self.micro_batch,
            "lanes": self.lanes,
            "steps": 6,
            "device": "cpu",
            "precision": self.precision,
            "loss_chunks": self.loss_chunks,
            "optimizer": {"class_path": self.optimizer},
        }
        execution = {
            "workers": self.workers,
            "recompute": self.recompute,
            "memory": None if memory is None else f"{memory}B",
            "checkpoint_every": 4,
            "async_checkpoint": False,
        }
        task = {"class_path": "paceline.tasks.Language", "init_args": arguments}
        path.write_text(json.dumps({"task": task, "recipe": recipe, "execution": execution}, indent=1))

    def __str__(self) -> str:
        """What is not as in most others."""
        shape = f"{self.layers} x {self.width}, {self.context} tokens of {self.vocabulary:,}"
        rest = [f"micro-batch {self.micro_batch}", self.precision, self.recompute]
        rest += [f"{self.loss_chunks} loss chunks"] if self.loss_chunks else []
        rest += [f"dropout {self.dropout}"] if self.dropout else []
        rest += [self.optimizer] if self.optimizer != "AdamW" else []
        rest += [f"{self.lanes} lanes"] if self.lanes > 1 else []
        rest += [f"{self.workers} workers"] if self.workers > 1 else []
        return f"{shape}; {', '.join(rest)}"


CASES = [
    Case(width=256, layers=8, context=256, vocabulary=8192, micro_batch=4, lanes=2),
    Case(width=256, layers=8, context=256, vocabulary=8192, micro_batch=4, lanes=2, recompute="all"),
    Case(width=128, layers=12, context=256, vocabulary=512, micro_batch=8, recompute="every:2"),
    Case(width=256, layers=6, context=512, vocabulary=512, micro_batch=2, recompute="selective"),
    Case(width=384, layers=6, context=128, vocabulary=8192, micro_batch=8, precision="bf16", lanes=2, workers=2),
    Case(width=256, layers=4, context=128, vocabulary=50_304, micro_batch=4),
    Case(width=256, layers=6, context=128, vocabulary=50_304, micro_batch=8, recompute="all", loss_chunks=8),
    Case(width=512, layers=4, context=64, vocabulary=2048, micro_batch=16, optimizer="SGD", lanes=4),
    Case(width=256, layers=12, context=128, vocabulary=4096, micro_batch=8, recompute="auto", lanes=2, workers=2),
    Case(width=128, layers=8, context=512, vocabulary=1024, micro_batch=4, precision="bf16", recompute="all"),
    Case(
        width=256,
        layers=4,
        context=128,
        vocabulary=257,
        micro_batch=8,
        recompute="every:2",
        dropout=0.1,
    ),
    Case(
        width=192,
        layers=10,
        context=256,
        vocabulary=8192,
        micro_batch=4,
        recompute="auto",
        room=0.25,
        loss_chunks=4,
        lanes=4,
        workers=2,
    ),
]


QUICK = [
    Case(width=128, layers=8, context=128, vocabulary=512, micro_batch=8, recompute="every:2"),
    Case(width=128, layers=6, context=256, vocabulary=512, micro_batch=8, recompute="auto"),
]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one configuration, in bytes.

    Args:
        activations, worker: planned and measured.
        grown: how much a process with nothing else grew by for the activations.
        kept: the plan refuses what is too little; with ``auto``, the run stayed in its budget.
    """

    case: Case
    activations: tuple[int, int]
    worker: tuple[int, int]
    grown: int
    kept: bool

    @property
    def missed(self) -> list[str]:
        """The bars that are."""
        off = {"activations": (self.activations, ACTIVATIONS_BAR), "worker": (self.worker, WORKER_BAR)}
        missed = [f"{what} {_off(*pair)}" for what, (pair, bar) in off.items() if abs(pair[0] / pair[1] - 1) > bar]
        return missed + ([] if self.kept else ['the plan says "fits" of what does not'])


def _off(planned: int, measured: int) -> str:
    return f"{100 * (planned / measured - 1):+.1f} %"


# ---- activations


@dataclass(frozen=True, kw_only=True)
class Looks:
    """What a process of its own has seen; ``budget``: what to give ``auto``."""

    planned: int
    measured: int
    grown: int
    budget: int | None


def looks(config: Path, room: float) -> Looks:
    """Planned on shapes, then for real; in a process that has imported the package and nothing else."""
    settings = parse([str(config)])
    configure_process(threads=settings.recipe.threads, device=torch.device("cpu"))
    planned, budget = _planned(settings, room)
    recipe = settings.recipe
    task = settings.task.make()
    task.chunk_loss(recipe.loss_chunks)
    model = task.build_model().train()
    batch = task.example(recipe.micro_batch)
    set_levels(model, planned.levels)

    def step() -> None:
        with autocast(recipe.precision, torch.device("cpu")):
            loss: Tensor = task.loss(model, batch)[0]
        loss.backward()

    with gradients_in_place(model):
        before = resident_bytes()
        with Peak() as peak:
            step()
            step()
        grown = peak.bytes - before
        with LiveBytes() as live:
            step()
    return Looks(planned=planned.activations, measured=live.peak, grown=grown, budget=budget)


def _planned(settings: Settings, room: float) -> tuple[Cell, int | None]:
    recipe, execution, workers = settings.recipe, settings.execution, settings.execution.workers
    assert isinstance(workers, int) and isinstance(execution.recompute, str)
    nothing_else = (False, False)
    looked = look(settings, own_mode=execution.recompute, most=1, further=lambda _: nothing_else, tell=lambda *_: None)
    (costs,) = looked.costs.values()
    process, batch = process_bytes(recipe), looked.sample_bytes * recipe.micro_batch
    there = footprint(
        looked.state, recipe, execution, lanes=recipe.lanes, workers=workers, process=process, batch=batch
    )
    cells = {name: cell(costs, there, mode, 0) for name, mode in looked.modes.items()}
    budget: int | None = None
    if execution.recompute == "auto":
        none, all_recomputed = cells["none"], cells["all"]
        assert none is not None and all_recomputed is not None
        budget = all_recomputed.peak + int(room * (none.peak - all_recomputed.peak))
        cells["auto"] = cell(costs, there, "auto", budget)
    found = cells[execution.recompute]
    assert found is not None
    return found, budget


# ---- the whole worker


def train(config: Path, run_dir: Path) -> int:
    """Trains for real; the largest VmHWM of its workers."""
    command = [sys.executable, "-m", "paceline", "train", str(config), "--run-dir", str(run_dir)]
    peaks = {0: 0}
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None and time.monotonic() - begun < DEADLINE_S:
            for pid in _workers(run_dir):
                peaks[pid] = _high_water_mark(pid) or peaks.get(pid, 0)
            time.sleep(POLL_S)
        if process.poll() is None:
            process.kill()
        if process.wait() or not max(peaks.values()):
            output.seek(0)
            raise SystemExit(f"paceline train {config} ended with {process.returncode}:\n{output.read()}")
    return max(peaks.values())


def _workers(run_dir: Path) -> list[int]:
    try:
        return [worker["pid"] for worker in json.loads((run_dir / "workers.json").read_text())["workers"]]
    except OSError:
        return []  # not there yet


def _high_water_mark(pid: int) -> int | None:
    """It only rises, so the last one read before the process ends is the one."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = re.search(r"VmHWM:\s*(\d+) kB", status)  # a process that is over has none
    return None if found is None else 1024 * int(found[1])


def plan(config: Path, *options: str) -> tuple[int, bool]:
    """What the command says: the most bytes at once, and whether that fits."""
    command = [sys.executable, "-m", "paceline", "plan", str(config), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    found = re.search(r"^most at once +(\S+ \w+)", ended.stdout, re.MULTILINE)
    if found is None:
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    return parse_size(found[1], "the plan"), ended.returncode == 0


def figures_of(case: Case, folder: Path, data: Path) -> Figures:
    """Plans and runs it."""
    folder.mkdir()
    config = folder / "config.json"
    case.write(config, data, None)
    seen = in_child(looks, config, case.room)
    case.write(config, data, seen.budget)
    run_dir = folder / "run"
    measured = train(config, run_dir)
    if seen.budget is None:
        planned, fits = plan(config, "--memory", f"{measured - 1}B")
        kept = not fits
    else:
        planned, fits = plan(config)
        (chosen,) = read_events(run_dir / "events.jsonl", "recompute")
        assert fits and chosen["planned"] <= seen.budget
        kept = measured <= seen.budget
    shutil.rmtree(run_dir)
    activations, worker = (seen.planned, seen.measured), (planned, measured)
    return Figures(case=case, activations=activations, worker=worker, grown=seen.grown, kept=kept)


def plan_figures(cases: Sequence[Case], folder: Path, data: Path) -> list[Figures]:
    """Of all, two at a time: no times are measured."""
    all_figures: list[Figures] = []
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        folders = [folder / f"case-{number}" for number in range(len(cases))]
        for case, found in zip(cases, pool.map(figures_of, cases, folders, [data] * len(cases)), strict=True):
            told = f"{case}: activations {_off(*found.activations)}, worker {_off(*found.worker)}"
            verdict = f"  MISSED: {'; '.join(found.missed)}" if found.missed else ""
            print(f"plan {len(all_figures) + 1}/{len(cases)}  {told}{verdict}", flush=True)
            all_figures.append(found)
    return all_figures


def plan_table(all_figures: Sequence[Figures]) -> str:
    """As Markdown."""
    text = "| configuration | activations planned | measured | off | process grew | worker planned | measured | off |\n"
    text += "|---|--:|--:|--:|--:|--:|--:|--:|\n"
    for found in all_figures:
        sizes = [*map(show_size, found.activations), _off(*found.activations), show_size(found.grown)]
        sizes += [*map(show_size, found.worker), _off(*found.worker) + ("" if found.kept else " (too low)")]
        text += f"| {found.case} | {' | '.join(sizes)} |\n"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("plan", "budget"))
    parser.add_argument("--quick", action="store_true", help="small ones: a check that it runs")
    parser.add_argument("--cases", help="only these configurations of plan, by number from 1: 1,5")
    parser.add_argument("--rounds", type=int, default=5, help="of budget")
    parser.add_argument("--out", type=Path, help="Markdown")
    arguments = parser.parse_args()
    cases = [CASES[int(number) - 1] for number in arguments.cases.split(",")] if arguments.cases else CASES
    load = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start; torch {torch.__version__}"
    parts, missed = [load], []
    with tempfile.TemporaryDirectory(prefix="paceline-memory-") as name:
        data = Path(name) / "tokens.bin"
        np.random.default_rng(0).integers(0, 256, size=400_000).astype("<u2").tofile(data)
        if arguments.only != "budget":
            figures = plan_figures(QUICK if arguments.quick else cases, Path(name), data)
            parts.append(plan_table(figures))
            missed += [f"{found.case}: {what}" for found in figures for what in found.missed]
        if arguments.only != "plan":
            table, misses = budget_figures(QUICK_JOBS if arguments.quick else JOBS, data, rounds=arguments.rounds)
            parts.append(table)
            missed += misses
    parts.append("\n".join(f"MISSED: {what}" for what in missed) or "All bars are met.")
    text = "\n\n".join(parts)
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(f"{text}\n")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
