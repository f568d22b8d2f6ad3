"""A loop of one's own that gets into trouble when asked: what `chaos.py` runs where a script is needed.

    paceline launch -n 3 benchmarks/chaos_job.py RUN_DIR --trouble python-loop --rank 1 --at 10

Trouble comes once in the life of a run directory, so the step that is done again meets none. When and where it began is
left in ``RUN_DIR/trouble.json``; ``RUN_DIR/phase-NAME`` appears when a phase begins that somebody waits for.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline

STUCK_SAMPLE = 77
WARM_UP = 20
"""Steps before measuring."""


class Points(Dataset[tuple[Tensor, Tensor]]):
    """512 points in 16 dimensions. One of them may take for ever to load, once.

    Args:
        stuck_in: the run directory in which that is noted; ``None``: none does.
    """

    def __init__(self, stuck_in: str | None) -> None:
        self._stuck_in = stuck_in
        self.x_NF = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
        self.y_N1 = self.x_NF.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x_NF)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == STUCK_SAMPLE and self._stuck_in is not None and begins(self._stuck_in):
            while True:
                time.sleep(60)
        return self.x_NF[index], self.y_N1[index]


def begins(run_dir: str) -> bool:
    """Whether trouble is to begin here: it has not yet. Notes when, in which line, and in which process."""
    told = {"time": time.time(), "line": inspect.stack()[1].lineno, "pids": [os.getpid(), os.getppid()]}
    with contextlib.suppress(FileExistsError), Path(run_dir, "trouble.json").open("x") as file:
        json.dump(told, file)
        return True
    return False


class Job:
    """What the command line asks for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.run: paceline.Run | None = None
        self.slow_save = False

    def due(self, trouble: str, step: int) -> bool:
        """Whether this trouble is to begin in this step of this worker."""
        options, run = self.options, self.run
        return options.trouble == trouble and run is not None and (run.rank, step) == (options.rank, options.at)

    def phase(self, name: str) -> None:
        """Whoever waits for it may strike."""
        Path(self.options.run_dir, f"phase-{name}").touch()

    # What is tracked besides: a state of the user's own, whose saving can take its time

    def state_dict(self) -> dict[str, Any]:
        if self.slow_save:
            self.slow_save = False
            self.phase("save")
            time.sleep(0.5)
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is none."""

    def train(self) -> None:
        options = self.options
        run = self.run = paceline.Run(
            paceline.Recipe(batch=32, micro_batch=4, lanes=8, steps=options.steps, device="cpu"),
            paceline.Execution(
                run_dir=options.run_dir,
                loader_workers=options.loader_workers,
                hang_after_s=options.hang_after_s,
                checkpoint_every=options.checkpoint_every,
            ),
            resume="auto",
        )
        width = options.width
        model = nn.Sequential(nn.Linear(16, width), nn.Dropout(0.1), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        model.append(nn.Linear(width, 1))
        optimizer = torch.optim.Adam(model.parameters())
        run.track(model=model, optimizer=optimizer, job=self)
        data = Points(options.run_dir if options.trouble == "loader" else None)
        clocks: dict[str, list[float]] = {"step_s": [], "cpu_s": []}

        def train_step(step: paceline.Step) -> None:
            number = step.number + 1
            for x_BF, y_B1 in step:
                if number in (1, options.at):
                    self.phase("first" if number == 1 else "step")
                time.sleep(options.pace_ms / 1000)
                if self.due("python-loop", number) and begins(options.run_dir):
                    while True:
                        pass
                if self.due("c-loop", number) and begins(options.run_dir):
                    sum(itertools.repeat(0))
                if self.due("collective", number) and begins(options.run_dir):
                    torch.distributed.all_reduce(torch.ones(3))  # which no other worker calls
                step.backward(F.mse_loss(model(x_BF), y_B1, reduction="sum"), weight=len(x_BF))
            step.update(optimizer)

        def score(batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, float]]:
            self.phase("evaluate")
            time.sleep(options.pace_ms / 1000)
            return {"loss": (F.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[0]))}

        for done in run.steps(data, train_step):
            clocks["step_s"].append(time.perf_counter())
            clocks["cpu_s"].append(time.process_time())
            run.events.emit("step", step=done.step, loss=done.loss)
            if options.phases and done.step == options.at:
                run.evaluate(data, score)
                self.slow_save = run.is_main
                run.save()
        digest = run.digest()
        if run.is_main:
            told = {"digest": digest} | {name: _median_step(times) for name, times in clocks.items()}
            Path(options.run_dir, "result.json").write_text(json.dumps(told))


def _median_step(times: Sequence[float]) -> float | None:
    """Seconds between two, warmed up; ``None``: too few."""
    seconds = [after - before for before, after in itertools.pairwise(times[WARM_UP:])]
    return statistics.median(seconds) if seconds else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--pace-ms", type=float, default=5.0, help="slept in each micro-batch")
    parser.add_argument("--trouble", choices=["python-loop", "c-loop", "collective", "loader"])
    parser.add_argument("--rank", type=int, default=0, help="whose trouble")
    parser.add_argument("--at", type=int, default=10, help="its step, and that of the phases")
    parser.add_argument("--phases", action="store_true", help="after that step evaluate and save, slowly")
    parser.add_argument("--hang-after-s", type=float)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=5)
    Job(parser.parse_args()).train()


if __name__ == "__main__":
    main()
