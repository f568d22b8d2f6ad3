"""A script for two workers with a mistake in it, as users make them: ``paceline launch -n 2 mistakes.py CASE``.

With one CASE its error ends the script. With several (``CASE,CASE``) each error is caught and told in a line of JSON,
and the next case begins a run of its own. Lines at which an error shall point end in ``# here`` or ``# there``.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Execution, PacelineError, Recipe, Run, Step
from paceline.callsite import raised_at

__all__ = ["CASES", "last_arrival", "line_of", "provoke"]

ROWS = torch.randn(18, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(ROWS)
OPEN: list[Run] = []
"""The run of the case at work."""
ARRIVED: list[float] = []
"""When the mistakes were reached, in unix seconds."""

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def line_of(name: str, mark: str) -> int:
    """The number of the line of a case that ends in ``# mark``."""
    lines, first = inspect.getsourcelines(CASES[name])
    (number,) = (first + at for at, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}"))
    return number


def begin(execution: Execution | None = None, **changes: Any) -> Run:
    run = Run(Recipe(**{"batch": 8, "micro_batch": 2, "lanes": 2, "steps": 4, **changes}), execution)
    OPEN.append(run)
    return run


def arrive() -> None:
    """Just before the mistake."""
    ARRIVED.append(time.time())
    say(f"arrived {ARRIVED[-1]}")


def last_arrival() -> float:
    """0 where this worker made no mistake."""
    return ARRIVED[-1] if ARRIVED else 0.0


def say(line: str) -> None:
    """In one piece, so that lines of two workers do not mix."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch[0]).square().sum()
    return loss


class Trained:
    """What a script has before its loop, rightly tracked."""

    def __init__(self, run: Run, model: nn.Module | None = None) -> None:
        self.run = run
        self.model = model or linear()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        run.track(model=self.model, optimizer=self.optimizer)

    def step(self, step: Step) -> None:
        for batch in step:
            step.backward(loss_of(self.model, batch), weight=len(batch[0]))
        step.update(self.optimizer)

    def steps(self, train_step: Callable[[Step], None]) -> None:
        arrive()
        for _ in self.run.steps(DATA, train_step):
            pass


def score(batch: Any) -> dict[str, tuple[Tensor | float, float]]:
    return {"mean": (batch[0].sum(), batch[0].numel())}


# Inside the step.


@case
def no_weight() -> None:
    mine = Trained(begin())

    def train_step(step: Step) -> None:
        for batch in step:
            step.backward(loss_of(mine.model, batch))  # here

    mine.steps(train_step)


@case
def no_backward() -> None:
    mine = Trained(begin())

    def train_step(step: Step) -> None:
        for batch in step:  # here
            loss_of(mine.model, batch)
        step.update(mine.optimizer)

    mine.steps(train_step)


@case
def no_loop() -> None:
    mine = Trained(begin())
    mine.steps(lambda step: step.update(mine.optimizer))  # here


@case
def no_update() -> None:
    mine = Trained(begin())

    def train_step(step: Step) -> None:
        for batch in step:
            step.backward(loss_of(mine.model, batch), weight=len(batch[0]))

    arrive()
    for _ in mine.run.steps(DATA, train_step):  # here
        pass


@case
def second_backward() -> None:
    mine = Trained(begin())

    def train_step(step: Step) -> None:
        for batch in step:
            step.backward(loss_of(mine.model, batch), weight=len(batch[0]))
            step.backward(loss_of(mine.model, batch), weight=len(batch[0]))  # here

    mine.steps(train_step)


@case
def backward_before_the_loop() -> None:
    mine = Trained(begin())

    def train_step(step: Step) -> None:
        step.backward(loss_of(mine.model, DATA[:2]), weight=2)  # here

    mine.steps(train_step)


@case
def backward_after_the_loop() -> None:
    mine = Trained(begin())

    def train_step(step: Step) -> None:
        for batch in step:
            step.backward(loss_of(mine.model, batch), weight=len(batch[0]))
        step.backward(loss_of(mine.model, batch), weight=2)  # here

    mine.steps(train_step)


@case
def backward_outside_of_the_steps() -> None:
    mine = Trained(begin())
    kept: list[Step] = []

    def train_step(step: Step) -> None:
        kept.append(step)
        mine.step(step)

    for _ in mine.run.steps(DATA, train_step):
        arrive()
        kept[0].backward(loss_of(mine.model, DATA[:2]), weight=2)  # here


@case
def plain_backward() -> None:
    mine = Trained(begin())

    def train_step(step: Step) -> None:
        for batch in step:
            loss_of(mine.model, batch).backward()  # here

    mine.steps(train_step)


@case
def mean_of_rows() -> None:
    mine = Trained(begin())

    def train_step(step: Step) -> None:
        for batch in step:
            step.backward(mine.model(batch[0]).square().sum(1), weight=1)  # here

    mine.steps(train_step)


@case
def total_in_the_loop() -> None:
    mine = Trained(begin())

    def train_step(step: Step) -> None:
        for _ in step:
            step.total(len)  # here

    mine.steps(train_step)


@case
def untracked_parameters() -> None:
    mine = Trained(begin(), nn.Linear(4, 4))
    head = nn.Linear(4, 2)
    mine.optimizer.add_param_group({"params": list(head.parameters())})

    def train_step(step: Step) -> None:
        for batch in step:
            step.backward(loss_of(nn.Sequential(mine.model, head), batch), weight=len(batch[0]))
        step.update(mine.optimizer)  # here

    mine.steps(train_step)


@case
def untracked_optimizer() -> None:
    run = begin()
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model)

    def train_step(step: Step) -> None:
        for batch in step:
            step.backward(loss_of(model, batch), weight=len(batch[0]))
        step.update(optimizer)  # here

    arrive()
    for _ in run.steps(DATA, train_step):
        pass


@case
def untracked_scheduler() -> None:
    mine = Trained(begin())
    scheduler = torch.optim.lr_scheduler.StepLR(mine.optimizer, 2)

    def train_step(step: Step) -> None:
        for batch in step:
            step.backward(loss_of(mine.model, batch), weight=len(batch[0]))
        step.update(mine.optimizer, schedulers=[scheduler])  # here

    mine.steps(train_step)


# Models that cannot be trained so.


@case
def sparse_gradients() -> None:
    run = begin()
    arrive()
    run.track(model=nn.Embedding(9, 4, sparse=True))  # here


@case
def sync_batch_norm() -> None:
    run = begin()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    arrive()
    run.track(model=model)  # here


@case
def batch_norm_over_one() -> None:
    mine = Trained(begin(micro_batch=1), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    arrive()
    for _ in mine.run.steps(DATA, mine.step):  # here
        pass


@case
def batch_norm_over_a_tail_of_one() -> None:
    """17 samples over 2 lanes: only worker 0 meets the last one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    mine = Trained(begin(), model)

    def train_step(step: Step) -> None:
        for batch in step:
            if len(batch[0]) == 1:
                arrive()
            step.backward(model(batch[0]).square().sum(), weight=len(batch[0]))  # here
        step.update(mine.optimizer)

    for _ in mine.run.steps(TensorDataset(ROWS[:17]), train_step):
        pass


@case
def data_parallel() -> None:
    run = begin()
    arrive()
    run.track(model=nn.DataParallel(linear()))  # here


@case
def distributed_data_parallel() -> None:
    run = begin()
    arrive()
    run.track(model=nn.parallel.DistributedDataParallel(linear()))  # here


@case
def wrapped_behind_the_runs_back() -> None:
    run = begin()
    mine = Trained(run)
    wrapped = nn.parallel.DistributedDataParallel(mine.model)

    def train_step(step: Step) -> None:
        for batch in step:
            step.backward(loss_of(wrapped, batch), weight=len(batch[0]))
        step.update(mine.optimizer)

    arrive()
    for _ in run.steps(DATA, train_step):  # here
        pass


@case
def lazy_parameters() -> None:
    run = begin()
    arrive()
    run.track(model=nn.LazyLinear(2))  # here


@case
def complex_parameters() -> None:
    run = begin()
    arrive()
    run.track(model=nn.Linear(4, 2, dtype=torch.complex64))  # here


@case
def nothing_tracked() -> None:
    run = begin()
    arrive()
    for _ in run.steps(DATA, lambda step: None):  # here
        pass


@case
def no_state() -> None:
    run = begin()
    arrive()
    run.track(lr=0.1)  # here


@case
def no_function() -> None:
    mine = Trained(begin())
    arrive()
    mine.run.steps(DATA, mine.model(DATA[0][0]))  # here


@case
def a_stream() -> None:
    mine = Trained(begin())
    stream: Any = iter(DATA)
    arrive()
    for _ in mine.run.steps(stream, mine.step):  # here
        pass


@case
def sum_of_floats() -> None:
    run = begin()
    half: Any = 0.5
    arrive()
    run.sum(half)  # here


@case
def gather_a_lock() -> None:
    run = begin()
    arrive()
    run.gather(threading.Lock())  # here


@case
def gather_after_the_end() -> None:
    run = begin()
    run.close()
    arrive()
    run.gather(1)  # here


@case
def gather_after_an_end_that_failed() -> None:
    run = begin()
    for end in (run.digest if run.is_main else run.close, run.close, run.close):
        with contextlib.suppress(PacelineError):
            end()
    arrive()
    run.gather(1)  # here


@case
def no_recipe() -> None:
    begin()
    arrive()
    Recipe(batch=8, lanes=16, steps=1)  # here


@case
def launch_in_a_worker() -> None:
    begin()
    arrive()
    paceline.launch(linear, workers=2)  # here


# Workers that are not alike.


@case
def other_recipe() -> None:
    recipe = Recipe(batch=8, micro_batch=2, lanes=2, steps=4, seed=int(os.environ["RANK"]))
    arrive()
    Run(recipe)  # here


@case
def other_lanes() -> None:
    recipe = Recipe(batch=8, micro_batch=2, lanes=2 + 2 * int(os.environ["RANK"]), steps=4)
    arrive()
    Run(recipe)  # here


@case
def other_buckets() -> None:
    run = begin(Execution(bucket_mib=1e-5 if os.environ["RANK"] == "0" else 25.0))
    mine = Trained(run)
    arrive()
    for _ in run.steps(DATA, mine.step):  # here
        pass


@case
def frozen_on_one() -> None:
    run = begin()
    mine = Trained(run)
    if run.is_main:
        next(iter(mine.model.parameters())).requires_grad_(False)
    arrive()
    for _ in run.steps(DATA, mine.step):  # here
        pass


@case
def unfrozen_on_one() -> None:
    run = begin()
    mine = Trained(run)
    next(iter(mine.model.parameters())).requires_grad_(False)
    for done in run.steps(DATA, mine.step):
        if done.step == 2:
            break
    if run.is_main:
        mine.model.requires_grad_(True)
    arrive()
    for _ in run.steps(DATA, mine.step):  # here
        pass


@case
def other_architecture() -> None:
    run = begin()
    mine = Trained(run, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2 + run.rank)))
    arrive()
    for _ in run.steps(DATA, mine.step):  # here
        pass


@case
def other_names() -> None:
    run = begin()
    mine = Trained(run)
    if run.is_main:
        run.track(teacher=linear())
    arrive()
    for _ in run.steps(DATA, mine.step):  # here
        pass


@case
def other_optimizer() -> None:
    run = begin()
    mine = Trained(run)
    mine.optimizer.param_groups[0]["lr"] = 0.1 * (1 + run.rank)
    arrive()
    for _ in run.steps(DATA, mine.step):  # here
        pass


@case
def other_length() -> None:
    mine = Trained(begin())
    arrive()
    for _ in mine.run.steps(TensorDataset(ROWS[mine.run.rank :]), mine.step):  # here
        pass


@case
def other_content() -> None:
    mine = Trained(begin())
    arrive()
    for _ in mine.run.steps(TensorDataset(ROWS + mine.run.rank), mine.step):  # here
        pass


@case
def other_length_evaluated() -> None:
    run = begin()
    arrive()
    run.evaluate(TensorDataset(ROWS[run.rank :]), score)  # here


# Workers that part.


@case
def gather_on_main() -> None:
    mine = Trained(begin())
    for done in mine.run.steps(DATA, mine.step):
        if mine.run.is_main:
            arrive()
            mine.run.gather(done.loss)  # here


@case
def sum_on_main() -> None:
    mine = Trained(begin())
    for done in mine.run.steps(DATA, mine.step):
        if mine.run.is_main:
            arrive()
            mine.run.sum(done.samples)  # here


@case
def evaluate_on_main() -> None:
    mine = Trained(begin())
    for _ in mine.run.steps(DATA, mine.step):
        if mine.run.is_main:
            arrive()
            mine.run.evaluate(DATA, score)  # here


@case
def digest_on_main() -> None:
    mine = Trained(begin())
    for _ in mine.run.steps(DATA, mine.step):
        pass
    if mine.run.is_main:
        arrive()
        mine.run.digest()  # here
    mine.run.max(1.0)  # there


@case
def save_on_main() -> None:
    mine = Trained(begin(Execution(run_dir="run")))
    for done in mine.run.steps(DATA, mine.step):
        if mine.run.is_main and done.step == 2:
            arrive()
            mine.run.save()  # here


@case
def gather_on_main_in_the_step() -> None:
    mine = Trained(begin())

    def train_step(step: Step) -> None:
        for batch in step:
            step.backward(loss_of(mine.model, batch), weight=len(batch[0]))
        if mine.run.is_main:
            arrive()
            mine.run.gather(1)  # here
        step.update(mine.optimizer)

    mine.steps(train_step)


@case
def total_on_main() -> None:
    mine = Trained(begin())

    def train_step(step: Step) -> None:
        if mine.run.is_main:
            arrive()
            step.total(len)  # here
        mine.step(step)

    mine.steps(train_step)


@case
def steps_on_main() -> None:
    mine = Trained(begin())
    if mine.run.is_main:
        arrive()
        for _ in mine.run.steps(DATA, mine.step):  # here
            pass
    mine.run.gather(1)  # there


@case
def gather_on_main_at_last() -> None:
    mine = Trained(begin())
    for _ in mine.run.steps(DATA, mine.step):
        pass
    if mine.run.is_main:
        arrive()
        mine.run.gather("done")  # here


@case
def break_then_evaluate() -> None:
    mine = Trained(begin())
    for done in mine.run.steps(DATA, mine.step):
        if done.step == 2 and mine.run.rank == 1:
            arrive()
            break
    mine.run.evaluate(DATA, score)  # here


@case
def break_then_steps() -> None:
    mine = Trained(begin())
    for done in mine.run.steps(DATA, mine.step):
        if done.step == 2 and mine.run.rank == 1:
            arrive()
            break
    for _ in mine.run.steps(DATA, mine.step):  # here
        pass


@case
def break_then_end() -> None:
    mine = Trained(begin())
    for done in mine.run.steps(DATA, mine.step):
        if done.step == 2 and mine.run.rank == 1:
            arrive()
            break


@case
def break_then_exit() -> None:
    mine = Trained(begin())
    for done in mine.run.steps(DATA, mine.step):
        if done.step == 2 and mine.run.rank == 1:
            arrive()
            sys.exit(0)


@case
def break_in_the_step() -> None:
    mine = Trained(begin())

    def train_step(step: Step) -> None:
        for batch in step:
            step.backward(loss_of(mine.model, batch), weight=len(batch[0]))
            if mine.run.rank == 1:
                arrive()
                break
        step.update(mine.optimizer)  # here

    mine.steps(train_step)


@case
def end_of_the_block_on_main() -> None:
    with begin() as run:
        if run.is_main:
            arrive()
            run.close()  # here
        run.gather(1)  # there


def provoke(name: str) -> None:
    """One case, its error told on the way."""
    try:
        CASES[name]()
    except PacelineError as error:
        say(f"met {type(error).__name__}")
        raise


def tell(name: str) -> None:
    """One case of several: its error is told, and the script goes on."""
    told: dict[str, Any] = {"case": name, "error": None}
    try:
        CASES[name]()
    except PacelineError as error:
        told |= {"error": type(error).__name__, "place": raised_at(error), "seconds": time.time() - ARRIVED[-1]}
        told |= {"problem": error.problem, "found": error.found, "needed": error.needed, "fix": error.fix}
    run = OPEN.pop()
    say(json.dumps({**told, "rank": run.rank}))
    run.close()


if __name__ == "__main__":
    names = sys.argv[1].split(",")
    if len(names) == 1:
        provoke(names[0])
    else:
        for name in names:
            tell(name)
