"""Workers are killed, hang, crash and are preempted, and the run ends in the bits of the one that nothing happened to.

Most runs here share one process from which workers are forked, so that each takes a second or two instead of the time
that importing torch takes; what is signalled from outside is a command of its own. `make chaos` has the same kinds of
faults at random moments, many times.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from driving import Started, paceline, reached, result, script, start, wait_for, write_tiny

from paceline.errors import EXIT_NO_PROGRESS, EXIT_POISONED, EXIT_PREEMPTED
from paceline.events import read_events
from paceline.faults import Faults
from paceline.supervisor import Outcome, Template, run_workers

DEADLINE_S = 120.0
"""For one run: tens of times what it needs, so that only what hangs runs into it."""
STEPS = 20
"""Of the example."""

OFTEN = ("--execution.log_every", "1", "--execution.evaluate_every", "5", "--execution.checkpoint_every", "5")

SCRIPT = '''
"""Two networks in turns, a state of the user's own, and calls of the run in the loop's body."""
import argparse, itertools, os, sys, time
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn
import paceline

parser = argparse.ArgumentParser()
parser.add_argument("run_dir")
parser.add_argument("--faults")
parser.add_argument("--loader-workers", type=int, default=0)
parser.add_argument("--whole", type=int, help="go slowly while there are fewer workers")
parser.add_argument("--trouble", nargs="*", default=[], choices=["all_reduce", "load", "early"])
parser.add_argument("--slow-step", type=int, help="takes for ever")
options = parser.parse_args()


def begins(trouble):
    if trouble not in options.trouble:
        return False
    try:
        Path(options.run_dir, trouble).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Points(torch.utils.data.Dataset):
    def __init__(self, size, seed):
        self.x = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if index == 77 and begins("load"):
            time.sleep(1e6)  # trouble: load
        return self.x[index]


class Average:
    """Of a network's weights, as many people keep one beside it."""

    def __init__(self, net):
        self.net, self.mean = net, [p.detach().clone() for p in net.parameters()]

    def add(self):
        for mean, p in zip(self.mean, self.net.parameters()):
            mean.lerp_(p.detach(), 0.1)

    def state_dict(self):
        return {str(i): mean for i, mean in enumerate(self.mean)}

    def load_state_dict(self, state):
        for i, mean in enumerate(self.mean):
            mean.copy_(state[str(i)])


class Counter:
    """Changed by a train step before its gradients are summed."""

    seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


recipe = paceline.Recipe(batch=24, micro_batch=3, lanes=8, steps=20, device="cpu")
execution = paceline.Execution(
    run_dir=options.run_dir, checkpoint_every=5, loader_workers=options.loader_workers, faults=options.faults,
    hang_after_s=2.0,
)
run = paceline.Run(recipe, execution, resume="auto")
before = run.gather("before the loop")
g = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 8))
d = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
g_optimizer, d_optimizer = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(g_optimizer, 20)
average, counter = Average(g), Counter()
run.track(g=g, d=d, g_optimizer=g_optimizer, d_optimizer=d_optimizer, scheduler=scheduler, average=average)
run.track(counter=counter)
data, held_out = Points(312, seed=0), Points(60, seed=1)


def d_step(step):
    for x in step:
        if step.number == 4 and run.rank == 1 and begins("all_reduce"):
            torch.distributed.all_reduce(x)  # trouble: all_reduce
        if step.number + 1 == options.slow_step:
            Path(options.run_dir, "slow").touch()
            time.sleep(1e6)
        fake = g(torch.randn_like(x)).detach()
        step.backward(F.softplus(-d(x)).sum() + F.softplus(d(fake)).sum(), weight=len(x))
    step.update(d_optimizer)


def g_step(step):
    if "early" in options.trouble:
        counter.seen += 1
    for x in step:
        step.backward(F.softplus(-d(g(torch.randn_like(x)))).sum(), weight=len(x))
    step.update(g_optimizer, schedulers=[scheduler], max_norm=1.0)
    average.add()


for of_d, of_g in run.steps(data, d_step, g_step):
    run.events.emit("step", step=of_g.step, loss=of_g.loss)
    assert set(run.gather(of_g.step)) == {of_g.step}
    if of_g.step % 4 == 0:
        scores = run.evaluate(held_out, lambda x: {"score": (d(x).sum(), len(x))})
        run.events.emit("evaluate", step=of_g.step, **scores)
    if of_g.step % 8 == 0:
        run.save()
    if run.world_size < (options.whole or 0):
        time.sleep(0.2)
scores = run.evaluate(held_out, lambda x: {"score": (d(x).sum(), len(x))})
told = f"{run.digest()} {scores['score']}"
if run.is_main:
    Path(options.run_dir, "digest").write_text(told)
'''

LAUNCHES = """
import sys

import torch
import paceline

def train(run_dir, faults):
    recipe = paceline.Recipe(batch=16, micro_batch=2, lanes=8, steps=12, device="cpu")
    run = paceline.Run(recipe, paceline.Execution(run_dir=run_dir, faults=faults))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)

    def train_step(step):
        for (x,) in step:
            step.backward((model(x) - x.sum(1, keepdim=True)).square().sum(), weight=len(x))
        step.update(optimizer)

    data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
    for done in run.steps(data, train_step):
        pass
    digest = run.digest()
    run.close()
    return digest

alone = train(None, None)
stormy = paceline.launch(train, sys.argv[1], "kill worker=0 step=5; kill worker=1 step=9 at=body", workers=3)
print(alone, *stormy)
"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A working directory with the example, and what workers are forked from."""

    path: Path
    template: Template

    def run(self, words: Sequence[str], workers: int, run_dir: str | None = None) -> Outcome:
        """Runs ``words`` in workers of this process. What hangs is ended at the deadline, and fails."""
        over = threading.Event()
        parent = os.getpid()

        def watch() -> None:
            if not over.wait(DEADLINE_S):
                for _ in range(2):  # the second one ends all at once
                    os.kill(parent, signal.SIGTERM)
                    time.sleep(1)

        watcher = threading.Thread(target=watch)
        watcher.start()
        begun = time.monotonic()
        try:
            record = self.path / run_dir / "workers.json" if run_dir is not None else None
            outcome = run_workers(words, workers, record=record, is_run=words[0] == "call", template=self.template)
        finally:
            over.set()
            watcher.join()
        assert time.monotonic() - begun < DEADLINE_S, "it hangs"
        return outcome

    def train(self, name: str, workers: int, *words: str) -> Outcome:
        """`paceline train` of the example, in ``name``."""
        command = ["call", "paceline.cli.running:train_as_worker", "tiny.yaml", "--run-dir", str(self.path / name)]
        return self.run([*command, *OFTEN, *words], workers, name)

    def faulty(self, name: str, workers: int, sentence: str, *words: str) -> Outcome:
        """The same, disturbed; every fault must have struck."""
        outcome = self.train(name, workers, "--execution.faults", sentence, *words)
        self.expect_struck(name, sentence)
        return outcome

    def script(self, name: str, workers: int, *words: str) -> Outcome:
        """The script, in ``name``."""
        (self.path / name).mkdir()
        return self.run(["script", str(self.path / "loop.py"), str(self.path / name), *words], workers)

    def expect_struck(self, name: str, sentence: str) -> None:
        assert Faults.parse(sentence).unfired(self.path / name / "faults") == []

    def expect_whole(self, name: str) -> None:
        """Every step once, in order."""
        steps = read_events(self.path / name / "events.jsonl", "step")
        assert [event["step"] for event in steps] == list(range(1, STEPS + 1))

    def told(self, name: str) -> str:
        """What the script says in the end: its digest, and what it has measured."""
        return (self.path / name / "digest").read_text()

    def memberships(self, name: str) -> list[dict[str, Any]]:
        return read_events(self.path / name / "events.jsonl", "membership")

    def changes(self, name: str) -> list[dict[str, Any]]:
        changes: list[dict[str, Any]] = json.loads((self.path / name / "workers.json").read_text())["changes"]
        return changes


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    path = tmp_path_factory.mktemp("place")
    write_tiny(path, "cpu")
    (path / "loop.py").write_text(SCRIPT)
    with contextlib.chdir(path), Template() as template:
        yield Place(path=path, template=template)


@pytest.fixture(scope="module")
def digest(place: Place) -> str:
    """Of the example when nothing happens."""
    assert place.train("calm", 2).exit_code == 0
    return str(result(place.path / "calm")["digest"])


@pytest.fixture(scope="module")
def told(place: Place) -> str:
    """By the script when nothing happens."""
    assert place.script("calm-script", 2).failure is None
    return place.told("calm-script")


long = pytest.mark.long


# Losses


@pytest.mark.parametrize(
    ("workers", "sentence"),
    [
        (4, "kill worker=1 step=1; kill worker=0 step=7 at=exchange; kill worker=1 step=12 at=update"),
        (3, "kill worker=1 step=5 at=evaluate; kill worker=0 step=10 at=save"),
        (4, "kill worker=1 step=4; kill worker=0 at=reform"),
        (4, "kill worker=0 step=9; kill worker=1 step=9"),
        pytest.param(2, "kill worker=1 step=6", marks=long),
        pytest.param(3, "kill worker=0 step=6 at=body", marks=long),
        pytest.param(3, "kill worker=1 step=6 at=exchange", marks=long),
        pytest.param(3, "kill worker=1 step=6 at=update", marks=long),
        pytest.param(3, "kill worker=0 step=20", marks=long),
        pytest.param(3, "kill worker=0 step=20 at=body", marks=long),
        pytest.param(3, "kill worker=0 step=20 at=evaluate", marks=long),
        pytest.param(3, "kill worker=0 step=20 at=save", marks=long),
        pytest.param(3, "kill worker=1 step=10 at=evaluate lane=3", marks=long),
        pytest.param(4, "kill worker=1 step=4; kill worker=2 at=reform; kill worker=0 at=reform", marks=long),
        pytest.param(3, "crash worker=1 step=6; crash worker=0 step=6", marks=long),
    ],
)
def test_no_step_is_lost_with_workers(
    place: Place, digest: str, request: pytest.FixtureRequest, workers: int, sentence: str
) -> None:
    name = f"losses-{sentence.replace(' ', '-').replace(';', '')}"
    outcome = place.faulty(name, workers, sentence)
    assert (outcome.exit_code, outcome.failure) == (0, None)
    assert result(place.path / name)["digest"] == digest
    place.expect_whole(name)
    assert sum(event["lost"] for event in place.memberships(name)) == len(sentence.split(";"))


def test_what_is_told_of_a_loss(place: Place, digest: str) -> None:
    assert place.faulty("told", 3, "kill worker=1 step=6", "--execution.on_loss", "shrink").exit_code == 0
    assert (result(place.path / "told")["digest"], result(place.path / "told")["workers"]) == (digest, 2)
    (event,) = place.memberships("told")
    assert (event["generation"], event["workers"], event["lost"], event["joined"]) == (1, 2, 1, 0)
    assert "worker 1 was killed by SIGKILL" in event["cause"] and event["step"] == 5
    assert 0 < event["seconds"] < DEADLINE_S
    loss, generation = place.changes("told")
    assert loss["rank"] == 1 and generation["generation"] == 1 and generation["workers"] == 2


@pytest.mark.parametrize(
    "sentence",
    [
        "kill worker=1 step=2; kill worker=2 at=join; kill worker=0 at=copy",
        pytest.param("kill worker=1 step=2; kill worker=2 at=copy", marks=long),
        pytest.param("kill worker=0 step=2; stop worker=0 at=copy", marks=long),
    ],
)
def test_a_replacement_that_is_lost_on_its_way_or_loses_its_source(place: Place, told: str, sentence: str) -> None:
    """In a loop of one's own that waits for replacements: they always have the time to come."""
    name = f"join-{sentence.replace(' ', '-').replace(';', '')}"
    outcome = place.script(name, 3, "--whole=3", f"--faults={sentence}")
    assert outcome.failure is None
    place.expect_struck(name, sentence)
    assert place.told(name) == told
    place.expect_whole(name)
    assert place.memberships(name)[-1]["workers"] == 3


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_loop_of_ones_own_with_phases_calls_and_loader_workers(place: Place, told: str, loader_workers: int) -> None:
    name = f"own-{loader_workers}"
    sentence = "kill worker=0 step=3 at=exchange; kill worker=1 step=8 at=evaluate; kill worker=0 step=12 at=body"
    words = (f"--faults={sentence}", f"--loader-workers={loader_workers}", "--whole=3")
    assert place.script(name, 3, *words).failure is None
    place.expect_struck(name, sentence)
    assert place.told(name) == told
    place.expect_whole(name)


def test_a_function_that_is_launched(place: Place) -> None:
    (place.path / "launches.py").write_text(LAUNCHES)
    ended = script("launches.py", str(place.path / "launched"), cwd=place.path).wait().check()
    alone, *stormy = ended.out.splitlines()[-1].split()
    assert len(stormy) >= 2 and set(stormy) == {alone}
    place.expect_struck("launched", "kill worker=0 step=5; kill worker=1 step=9 at=body")


@pytest.mark.usefixtures("digest")
def test_gradients_by_allreduce_fail_over_too(place: Place) -> None:
    words = ("--recipe.gradients", "allreduce")
    assert place.faulty("allreduce", 3, "kill worker=0 step=6 at=exchange", *words).exit_code == 0
    calm, stormy = (result(place.path / name)["loss"] for name in ("calm", "allreduce"))
    assert stormy == pytest.approx(calm, rel=1e-3)  # its bits are not promised
    place.expect_whole("allreduce")


# Nobody left


@pytest.mark.parametrize(
    ("workers", "sentence", "words"),
    [
        (1, "kill worker=0 step=12", ()),
        (2, "kill worker=0 step=13; kill worker=1 step=13", ()),
        (3, "kill worker=1 step=8", ("--execution.on_loss", "restart")),
    ],
)
def test_without_survivors_the_run_begins_again_by_itself(
    place: Place, digest: str, workers: int, sentence: str, words: tuple[str, ...]
) -> None:
    name = f"again-{workers}"
    assert place.faulty(name, workers, sentence, *words).exit_code == 0
    assert result(place.path / name)["digest"] == digest
    starts = read_events(place.path / name / "events.jsonl", "start")
    assert len(starts) == 2 and starts[1]["resumed_from"] in (5, 10)


@long
def test_state_changed_too_early_is_not_handed_on(place: Place) -> None:
    """A train step that has changed what is tracked before its gradients are summed cannot be done again."""
    assert place.script("early-calm", 2, "--trouble=early").failure is None
    assert place.script("early", 3, "--trouble=early", "--faults=kill worker=1 step=9 at=exchange").failure is None
    assert place.told("early") == place.told("early-calm")


def test_a_run_that_comes_no_further(place: Place) -> None:
    outcome = place.train("no-progress", 1, "--execution.faults", "kill worker=0 step=7 times=9")
    assert outcome.exit_code == EXIT_NO_PROGRESS
    assert outcome.failure is not None and re.search("came no further than step [67]", outcome.failure)


def test_a_step_that_is_poisoned(place: Place) -> None:
    sentence = "crash worker=1 step=5 lane=3; crash worker=0 step=5 lane=3 times=2"
    outcome = place.faulty("poison", 3, sentence)
    assert outcome.exit_code == EXIT_POISONED
    assert outcome.failure is not None
    assert "cannot get past step 5: found lane 3" in outcome.failure and "paceline order" in outcome.failure


def test_on_loss_stop(place: Place) -> None:
    outcome = place.faulty("stop", 3, "kill worker=1 step=6", "--execution.on_loss", "stop")
    assert outcome.exit_code == 1
    assert outcome.failure is not None and "worker 1 was killed: found SIGKILL" in outcome.failure


def test_an_exception_is_a_bug_and_ends_the_run_at_once(place: Place) -> None:
    begun = time.monotonic()
    outcome = place.faulty("raise", 3, "raise worker=1 step=6")
    assert outcome.exit_code == 1 and time.monotonic() - begun < 30
    assert outcome.failure is not None
    lines = outcome.failure.splitlines()
    assert lines[:2] == ["paceline: worker 1 failed:", "Traceback (most recent call last):"]
    assert lines[-2].startswith("RuntimeError: asked for by the fault")
    assert lines[-1] == "paceline: 2 other workers ended because of it"
    assert not place.memberships("raise")


# Hangs


def test_hangs_are_found_told_and_mended(place: Place, digest: str) -> None:
    sentence = "stop worker=1 step=4; hang worker=0 step=8; spin worker=1 step=12"
    outcome = place.faulty("hangs", 4, sentence, "--execution.hang_after_s", "2")
    assert outcome.exit_code == 0
    assert result(place.path / "hangs")["digest"] == digest
    place.expect_whole("hangs")
    stopped, looping, spinning = (change["why"] for change in place.changes("hangs") if "why" in change)
    assert stopped.startswith("worker 1 is stopped (SIGSTOP) in step 4")
    assert looping.startswith("worker 0 hangs in step 8, lane 0, at faults.py:")
    assert spinning.startswith("worker 1 hangs in step 12, lane ") and "keeps the GIL" in spinning
    files = sorted(path.name for path in (place.path / "hangs" / "hangs").iterdir())
    assert files == [f"step-{step:08}-worker-{rank}.txt" for step, rank in ((4, 1), (8, 0), (12, 1))]
    for name in files:
        text = (place.path / "hangs" / "hangs" / name).read_text()
        assert text.startswith(f"=== worker {name[-5]} ") and "most recent call first" in text


@pytest.mark.parametrize("loader_workers", [0, pytest.param(2, marks=long)])
def test_the_line_of_the_users_that_hangs_is_named(place: Place, told: str, loader_workers: int) -> None:
    """A sample that never loads, and a collective that the others do not call."""
    name = f"trouble-{loader_workers}"
    words = ("--trouble", "load", "all_reduce", f"--loader-workers={loader_workers}", "--whole=3")
    assert place.script(name, 3, *words).failure is None
    assert place.told(name) == told
    place.expect_whole(name)
    losses = [event for event in place.memberships(name) if event["lost"]]
    assert sum(event["lost"] for event in losses) == 2
    told_of = "; ".join(event["cause"] for event in losses)
    lines = {"computing": "# trouble: all_reduce", "waiting for its next micro-batch": "# trouble: load"}
    if loader_workers:
        lines["waiting for its next micro-batch"] = "for x in step:"
    for doing, end in lines.items():
        numbers = [number for number, line in enumerate(SCRIPT.splitlines(), start=1) if line.endswith(end)]
        named = [f"at loop.py:{number}: {doing}" for number in numbers]
        assert any(line in told_of for line in named), (named, told_of)


# Signals


def everyone(started: Started, run_dir: Path) -> list[int]:
    return [process.pid for process in started.all_processes() if process.is_running()]


def one_worker(started: Started, run_dir: Path) -> list[int]:
    return [json.loads((run_dir / "workers.json").read_text())["workers"][1]["pid"]]


def the_command(started: Started, run_dir: Path) -> list[int]:
    return [started.process.pid]


@pytest.mark.parametrize(
    ("number", "target", "loader_workers"),
    [
        (signal.SIGUSR1, one_worker, 0),
        (signal.SIGTERM, everyone, 1),
        pytest.param(signal.SIGTERM, the_command, 2, marks=long),
        pytest.param(signal.SIGUSR1, the_command, 0, marks=long),
        pytest.param(signal.SIGTERM, one_worker, 2, marks=long),
        pytest.param(signal.SIGUSR1, everyone, 0, marks=long),
    ],
)
@pytest.mark.parametrize("step", [1, pytest.param(8, marks=long)])
def test_preemption_loses_nothing(
    place: Place,
    digest: str,
    number: signal.Signals,
    target: Callable[[Started, Path], list[int]],
    loader_workers: int,
    step: int,
) -> None:
    """Soon, and later."""
    name = f"preempted-{number.name}-{target.__name__}-{loader_workers}-{step}"
    run_dir = place.path / name
    words = ["train", "tiny.yaml", "--run-dir", name, "-n", "2", *OFTEN]
    words += ["--execution.loader_workers", str(loader_workers)]
    started = start(*words, cwd=place.path)
    wait_for(lambda: reached(run_dir, step), started)
    for pid in target(started, run_dir):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    started.wait().check(EXIT_PREEMPTED)
    assert result(run_dir)["status"] == "preempted"
    assert place.train(name, 3, "--resume", "must").exit_code == 0
    assert result(run_dir)["digest"] == digest
    place.expect_whole(name)


@long
@pytest.mark.parametrize("target", [the_command, one_worker, everyone])
def test_preemption_before_the_first_step(
    place: Place, digest: str, target: Callable[[Started, Path], list[int]]
) -> None:
    """Where nobody listens for signals yet."""
    name = f"early-{target.__name__}"
    run_dir = place.path / name
    started = start("train", "tiny.yaml", "--run-dir", name, "-n", "2", *OFTEN, cwd=place.path)
    wait_for((run_dir / "workers.json").exists, started)
    for pid in target(started, run_dir):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    started.wait().check(EXIT_PREEMPTED)
    assert place.train(name, 3, "--resume").exit_code == 0
    assert result(run_dir)["digest"] == digest
    place.expect_whole(name)


def test_the_second_signal_ends_at_once(place: Place) -> None:
    (place.path / "second").mkdir()
    started = start("launch", "-n", "2", "loop.py", "second", "--slow-step=3", cwd=place.path)
    wait_for((place.path / "second" / "slow").exists, started)
    started.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert started.process.poll() is None  # it waits for the step to end
    started.process.send_signal(signal.SIGTERM)
    begun = time.time()
    assert started.wait().check(EXIT_PREEMPTED).time - begun < 2.0


def test_a_killed_command_leaves_no_orphans_and_resumes(place: Place, digest: str) -> None:
    words = ["train", "tiny.yaml", "--run-dir", "killed", "-n", "3", *OFTEN, "--execution.loader_workers", "1"]
    started = start(*words, cwd=place.path, anew=True)
    wait_for(lambda: reached(place.path / "killed", 7), started)
    started.all_processes()
    os.kill(started.process.pid, signal.SIGKILL)
    assert started.wait().code == -signal.SIGKILL  # and of its processes none is left
    assert place.train("killed", 2, "--resume").exit_code == 0
    assert result(place.path / "killed")["digest"] == digest


@long
def test_under_torchrun_the_agent_starts_all_again(place: Place, digest: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=2"]
    words = ["-m", "paceline", "train", "tiny.yaml", "--run-dir", "torchrun", *OFTEN]
    Started([*torchrun, *words, "--execution.faults", "kill worker=1 step=8"], place.path).wait().check()
    assert result(place.path / "torchrun")["digest"] == digest
    starts = read_events(place.path / "torchrun" / "events.jsonl", "start")
    assert [event["resumed_from"] for event in starts] == [None, 5]


@long
def test_verify_rehearses_faults(place: Place) -> None:
    words = ("verify", "tiny.yaml", "--workers", "3", "--steps", "8", "--out", "proof")
    ended = paceline(*words, "--faults", "kill worker=1 step=3; stop worker=0 step=6", cwd=place.path).check()
    assert "kill worker=1 step=3; stop worker=0 step=6" in ended.out
