"""What is done to a run, and what it must show: a function for each kind of fault, which `chaos.py` calls many times.

A case gets a fresh run directory and random numbers of its own, raises `BrokenPromiseError` when the run does not do
what it should, and returns figures by name: seconds, mostly.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from chaos_run import ROOT, BrokenPromiseError, Started, listeners, newest_checkpoint, paceline, steps_of, torchrun

from paceline.faults import Faults

__all__ = ["CASES", "Case", "Place", "expect", "loss_after", "recovered_s"]

CONFIG = "benchmarks/chaos.yaml"
SCRIPT = "benchmarks/chaos_job.py"
STEPS = 120
"""Of `CONFIG`."""
SCRIPT_STEPS = 40
DEADLINE_S = 120.0
"""For one command: tens of times what it needs."""
HANG_AFTER_S = 4.0
SLACK_S = 2.0
"""A hang must be found this soon after its deadline."""
WITHIN_S = 0.1
"""After a step: longer than one takes."""
MISSES = 10
"""A run may be over before it is struck: then another is started, so often at most."""

Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one case runs.

    Args:
        run_dir: does not exist yet.
        moments: random numbers, of this case alone.
        number: of the case in its row, from 0.
    """

    run_dir: Path
    moments: Random
    number: int

    @property
    def workers(self) -> int:
        """2, 3, 4 in turn."""
        return 2 + self.number % 3

    def train(self, workers: int, *words: str) -> Started:
        """`paceline train` of the little job."""
        command = paceline("train", CONFIG, "-n", str(workers), "--run-dir", str(self.run_dir), *words)
        return Started(command, self.run_dir, deadline_s=DEADLINE_S)

    def script(self, workers: int, *words: str) -> Started:
        """`paceline launch` of the loop of one's own. Needs the run directory, for its notes."""
        self.run_dir.mkdir(exist_ok=True)
        options = [str(self.run_dir), "--steps", str(SCRIPT_STEPS), *words]
        return Started(paceline("launch", "-n", str(workers), SCRIPT, *options), self.run_dir, deadline_s=DEADLINE_S)


Case = Callable[[Place], Figures]


def expect(ok: object, told: str) -> None:
    """Raises unless ``ok``."""
    if not ok:
        raise BrokenPromiseError(told)


class _MissedError(BrokenPromiseError):
    """The run was over too early to be struck."""


def _again(case: Case) -> Case:
    """The case until it has struck."""

    def struck(place: Place) -> Figures:
        for miss in range(MISSES):
            run_dir = place.run_dir.with_name(f"{place.run_dir.name}-{miss}") if miss else place.run_dir
            try:
                return case(Place(run_dir=run_dir, moments=place.moments, number=place.number))
            except _MissedError:
                continue
        raise BrokenPromiseError(f"the run was over before it was struck, {MISSES} times")

    return struck


# What a run is compared with


@cache
def undisturbed(folder: Path) -> str:
    """Digest of `CONFIG` when nothing happens."""
    place = Place(run_dir=folder / "undisturbed", moments=Random(0), number=0)
    with place.train(2) as run:
        run.end()
    return _digest(place.run_dir)


@cache
def undisturbed_script(folder: Path) -> str:
    """Digest of `SCRIPT`."""
    place = Place(run_dir=folder / "undisturbed-script", moments=Random(0), number=0)
    with place.script(2) as run:
        run.end()
    return _digest(place.run_dir)


def _digest(run_dir: Path) -> str:
    return str(json.loads((run_dir / "result.json").read_text())["digest"])


def _expect_bits(run_dir: Path, digest: str) -> None:
    expect(_digest(run_dir) == digest, f"digest {_digest(run_dir)} instead of {digest}")


def _expect_whole(run_dir: Path, steps: int = STEPS) -> None:
    """No step lost, none done twice."""
    done = steps_of(_events(run_dir))
    expect(done == list(range(1, steps + 1)), f"the log has steps {_ranges(done)}")


def _ranges(steps: Sequence[int]) -> str:
    """``1-7 7-30``"""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return " ".join(f"{first}-{last}" for first, last in runs)


def _events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def loss_after(events: Sequence[dict[str, Any]], at: float) -> dict[str, Any] | None:
    """The first change of membership after ``at`` by which a worker was lost."""
    return next((e for e in events if e["event"] == "membership" and e["lost"] and e["time"] >= at), None)


def recovered_s(events: Sequence[dict[str, Any]], at: float) -> float | None:
    """From a kill to the survivors' next finished step, in seconds; ``None``: before the first or after the last."""
    steps = [event for event in events if event["event"] == "step"]
    loss = loss_after(events, at)
    if loss is None or steps[0]["time"] > at:
        return None
    return next((event["time"] - at for event in steps if event["time"] > loss["time"]), None)


def _strike(run: Started, place: Place) -> None:
    """Waits for a random moment of a run that has started: some time after a random step, on any machine."""
    step = place.moments.randrange(STEPS)
    if not (run.until(run.workers) and run.until(lambda: run.last_step() >= step)):
        raise _MissedError
    if not run.sleep(place.moments.uniform(0, WITHIN_S)):
        raise _MissedError


# Kills


def kill(place: Place) -> Figures:
    """One worker at a random moment."""
    with place.train(place.workers) as run:
        _strike(run, place)
        open_to = listeners(run.processes())
        expect(open_to, "nobody listens")
        expect(all(address.startswith("127.0.0.1:") for address in open_to), f"listens on {open_to}")
        at = run.kill(run.workers()[place.moments.randrange(place.workers)])
        run.end()
    _expect_bits(place.run_dir, undisturbed(place.run_dir.parent))
    _expect_whole(place.run_dir)
    return _recovery(place.run_dir, at) | {"listening sockets, all on loopback": len(open_to)}


def _recovery(run_dir: Path, at: float) -> Figures:
    seconds = recovered_s(_events(run_dir), at)
    return {} if seconds is None else {"kill to next step, s": seconds}


def kill_under_torchrun(place: Place) -> Figures:
    """The same under torchrun, which starts the whole team again."""
    words = ["-m", "paceline", "train", CONFIG, "--run-dir", str(place.run_dir)]
    with Started(torchrun(place.workers, *words), place.run_dir, deadline_s=DEADLINE_S) as run:
        step = place.moments.randrange(1, STEPS)
        if not (run.until(lambda: run.last_step() >= step) and run.sleep(place.moments.uniform(0, WITHIN_S))):
            raise _MissedError
        pids = run.events("start")[0]["pids"]
        at = run.kill(place.moments.choice(pids))
        run.end()
    _expect_bits(place.run_dir, undisturbed(place.run_dir.parent))
    events = _events(place.run_dir)
    starts = [number for number, event in enumerate(events) if event["event"] == "start"]
    if len(starts) < 2:
        raise _MissedError
    killed = max(steps_of(events[: starts[1]]))
    return {
        "kill to next step, s": next(e["time"] for e in events[starts[1] :] if e.get("step", 0) > killed) - at,
        "steps done again": killed - (events[starts[1]]["resumed_from"] or 0),
    }


def pair(place: Place) -> Figures:
    """Two of three or four workers together."""
    workers = 3 + place.number % 2
    with place.train(workers) as run:
        _strike(run, place)
        pids = run.workers()
        first, second = place.moments.sample(range(workers), 2)
        at = run.kill(pids[first])
        run.kill(pids[second])
        run.end()
    _expect_bits(place.run_dir, undisturbed(place.run_dir.parent))
    _expect_whole(place.run_dir)
    return _recovery(place.run_dir, at)


def any_process(place: Place) -> Figures:
    """Whatever belongs to the run, but for the command itself: workers, the store, what replacements come from."""
    with place.train(place.workers) as run:
        _strike(run, place)
        run.kill(place.moments.choice([pid for pid in run.processes() if pid != run.process.pid]))
        run.end()
    _expect_bits(place.run_dir, undisturbed(place.run_dir.parent))
    _expect_whole(place.run_dir)
    return {}


def _scripted(faults: Callable[[Place], str]) -> Case:
    """Kills at moments that only the worker itself can hit."""

    def case(place: Place) -> Figures:
        sentence = faults(place)
        with place.train(_enough(place), "--execution.faults", sentence) as run:
            run.end()
        unfired = Faults.parse(sentence).unfired(place.run_dir / "faults")
        expect(not unfired, f"never happened: {unfired}")
        _expect_bits(place.run_dir, undisturbed(place.run_dir.parent))
        _expect_whole(place.run_dir)
        return {}

    return case


def _enough(place: Place) -> int:
    """Workers: two are killed at about the same time, and one must be left."""
    return max(3, place.workers)


def _first(place: Place) -> str:
    return f"kill worker={place.moments.randrange(_enough(place))} step={place.moments.randint(2, 40)}"


@_scripted
def during_reform(place: Place) -> str:
    return f"{_first(place)}; kill worker={place.moments.randrange(_enough(place) - 1)} at=reform"


@_scripted
def during_copy(place: Place) -> str:
    """Who gives the state, which is worker 0, or who takes it, the last."""
    return f"{_first(place)}; kill worker={place.moments.choice([0, _enough(place) - 1])} at=copy"


@_scripted
def during_join(place: Place) -> str:
    return f"{_first(place)}; kill worker={_enough(place) - 1} at=join"


@_scripted
def during_evaluation(place: Place) -> str:
    """The held-out samples are few: they fill lanes of workers 0 and 1 only."""
    return f"kill worker={place.moments.randrange(2)} step={place.moments.randint(2, 110)} at=evaluate"


@_scripted
def during_save(place: Place) -> str:
    return f"kill worker=0 step={place.moments.randint(2, 110)} at=save"


# Nobody left


def all_workers(place: Place) -> Figures:
    """All at once, the command lives."""
    return _without_survivor(place, place.workers)


def alone(place: Place) -> Figures:
    """The only one."""
    return _without_survivor(place, 1)


def _without_survivor(place: Place, workers: int) -> Figures:
    with place.train(workers) as run:
        _strike(run, place)
        pids = list(run.workers().values())
        at = min(map(run.kill, pids))
        run.until(lambda: not set(pids) & set(run.processes()))
        newest = newest_checkpoint(place.run_dir)
        run.end()
    _expect_bits(place.run_dir, undisturbed(place.run_dir.parent))
    starts = [event for event in _events(place.run_dir) if event["event"] == "start"]
    if len(starts) == 1:
        raise _MissedError
    begun = starts[1]["resumed_from"] or 0
    expect(begun == newest, f"begun again from step {begun}, though there was a checkpoint of {newest}")
    steps = [event["time"] for event in _events(place.run_dir) if event["event"] == "step"]
    after = [seconds for seconds in steps if seconds > starts[1]["time"]]
    return {"kill to next step, s": after[0] - at} if after else {}


def supervisor(place: Place) -> Figures:
    """The command itself; the workers must go with it."""
    with place.train(place.workers) as run:
        _strike(run, place)
        at = run.kill(run.process.pid)
        run.process.wait()
        run.expect_nobody()
        elapsed_s = time.time() - at
    _resume(place)
    return {"until all are gone, s": elapsed_s}


def _resume(place: Place, *words: str) -> None:
    """Starts the run again, by nothing but ``--resume``."""
    newest = newest_checkpoint(place.run_dir)
    with place.train(2 + place.moments.randrange(3), "--resume", *words) as run:
        run.end()
    start = [event for event in _events(place.run_dir) if event["event"] == "start"][-1]
    expect((start["resumed_from"] or 0) == newest, f"resumed from {start['resumed_from']} instead of {newest}")
    _expect_bits(place.run_dir, undisturbed(place.run_dir.parent))


SAVE_PHASES = ("begun", "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json", "committed")


def everything_in_a_save(place: Place) -> Figures:
    """All processes at once, in each phase of a save in turn, as far as it can be hit from outside."""
    often = ("--execution.checkpoint_every", "1")
    checkpoints, phase = place.run_dir / "checkpoints", SAVE_PHASES[place.number % len(SAVE_PHASES)]
    with place.train(place.workers, *often) as run:
        step = place.moments.randint(2, 60)
        if not run.until(lambda: newest_checkpoint(place.run_dir) >= step - 1):
            raise _MissedError
        pids = run.processes()
        newest = newest_checkpoint(place.run_dir)

        def reached() -> bool:
            if phase == "committed":
                return newest_checkpoint(place.run_dir) > newest
            pattern = "step-*.tmp-*" if phase == "begun" else f"step-*.tmp-*/{phase}"
            return next(checkpoints.glob(pattern), None) is not None

        if not run.until(reached):
            raise _MissedError
        run.kill_everything(pids)
    cut = [path.name for path in checkpoints.glob("*.tmp-*")]
    _resume(place, *often)
    left = [path.name for path in checkpoints.glob("*.tmp-*")]
    expect(not left, f"left in the run directory: {left}")
    saved = {event["step"] for event in _events(place.run_dir) if event["event"] == "checkpoint"}
    again = {int(name.split(".")[0].removeprefix("step-")) for name in cut}
    expect(again <= saved, f"never saved: {sorted(again - saved)}")
    return {"of them cut off in the save": float(bool(cut))}


# Hangs


def stopped(place: Place) -> Figures:
    """SIGSTOP of a random worker at a random moment."""
    with place.train(place.workers, "--execution.hang_after_s", str(HANG_AFTER_S)) as run:
        _strike(run, place)
        rank = place.moments.randrange(place.workers)
        pid = run.workers()[rank]
        at = run.kill(pid, signal.SIGSTOP)
        run.end()
        found = _found(run, pid)
    expect(f"worker {rank} is stopped" in found["why"], f"told: {found['why']}")
    _expect_bits(place.run_dir, undisturbed(place.run_dir.parent))
    _expect_whole(place.run_dir)
    return _within_the_deadline(found["time"] - at)


def _hanging(trouble: str) -> Case:
    """A script whose worker does not come back from a line of its own."""

    def case(place: Place) -> Figures:
        loaders = 2 * (place.number % 2) if trouble == "loader" else 0
        where = {"rank": place.moments.randrange(place.workers), "at": place.moments.randint(3, 30)}
        words = [f"--{name}={value}" for name, value in where.items()]
        words += [f"--trouble={trouble}", f"--hang-after-s={HANG_AFTER_S}", f"--loader-workers={loaders}"]
        with place.script(place.workers, *words) as run:
            run.end()
            noted = json.loads((place.run_dir / "trouble.json").read_text())
            found = _found(run, *noted["pids"])
        begins = noted["line"] + 1
        lines = range(begins, begins + 2) if not loaders else [_line_of_the_loop()]
        named = any(f"{Path(SCRIPT).name}:{line}:" in found["why"] for line in lines)
        expect(named, f"none of the lines {list(lines)} in: {found['why']}")
        if trouble != "loader":
            expect(f"worker {where['rank']} hangs in step {where['at']}," in found["why"], f"told: {found['why']}")
        _expect_bits(place.run_dir, undisturbed_script(place.run_dir.parent))
        _expect_whole(place.run_dir, SCRIPT_STEPS)
        return _within_the_deadline(found["time"] - noted["time"])

    return case


def _found(run: Started, *pids: int) -> dict[str, Any]:
    """The loss of one of these processes."""
    losses = [change for change in run.changes() if change.get("pid") in pids]
    expect(losses, f"no loss of the process that hung among {run.changes()}")
    return losses[0]


def _within_the_deadline(elapsed_s: float) -> Figures:
    expect(elapsed_s <= HANG_AFTER_S + SLACK_S, f"found after {elapsed_s:.1f} s, the deadline was {HANG_AFTER_S} s")
    return {f"found after, s (deadline {HANG_AFTER_S:g})": elapsed_s}


def _line_of_the_loop() -> int:
    lines = (ROOT / SCRIPT).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.endswith(" in step:"))


# Preemption

PHASES = ("first", "step", "evaluate", "save", "loader")
TARGETS = ("command", "worker", "group", "everyone")


def preempted(place: Place) -> Figures:
    """SIGTERM and SIGUSR1 in turn, in each phase, to the command, one worker, the process group, or every process."""
    phase = PHASES[place.number % len(PHASES)]
    target = TARGETS[(place.number // len(PHASES) + place.number) % len(TARGETS)]
    number = (signal.SIGTERM, signal.SIGUSR1)[place.number // 2 % 2]
    told = f"{number.name} in phase {phase} to the {target}"
    words = ["--phases", f"--at={place.moments.randint(3, 30)}", f"--loader-workers={2 * (phase == 'loader')}"]
    noted = place.run_dir / f"phase-{'step' if phase == 'loader' else phase}"
    with place.script(place.workers, *words) as run:
        if not run.until(noted.exists):
            raise _MissedError
        time.sleep(place.moments.uniform(0, 0.1))
        at = time.time()
        if target == "group":
            os.killpg(run.process.pid, number)
        else:
            pid = run.workers()[place.moments.randrange(place.workers)]
            reached = {"command": [run.process.pid], "worker": [pid], "everyone": run.processes()}[target]
            for pid in reached:
                run.kill(pid, number)
        try:
            run.end(75)
        except BrokenPromiseError as broken:
            raise BrokenPromiseError(f"{told}: {broken}") from None
        elapsed_s = time.time() - at
    stopped_at = max(steps_of(_events(place.run_dir)), default=0)
    expect(newest_checkpoint(place.run_dir) == stopped_at, f"{told}: ended at step {stopped_at} without a checkpoint")
    with place.script(2 + place.moments.randrange(3), *words) as run:
        run.end()
    _expect_bits(place.run_dir, undisturbed_script(place.run_dir.parent))
    _expect_whole(place.run_dir, SCRIPT_STEPS)
    return {"signal to end, s": elapsed_s}


CASES: dict[str, tuple[Case, int, str]] = {
    "kill": (_again(kill), 50, "SIGKILL of a random worker at a random moment; 2, 3, 4 workers"),
    "torchrun": (_again(kill_under_torchrun), 6, "the same under `torchrun --max-restarts`, for comparison"),
    "pair": (_again(pair), 5, "two workers killed together"),
    "reform": (during_reform, 5, "a kill during re-forming"),
    "copy": (during_copy, 5, "a kill during the state copy, of who gives or who takes"),
    "join": (during_join, 5, "a kill while a replacement joins"),
    "evaluate": (during_evaluation, 5, "a kill during evaluation"),
    "save": (during_save, 5, "a kill during a save"),
    "any": (_again(any_process), 10, "SIGKILL of any process of the run but the command"),
    "stop": (_again(stopped), 5, "SIGSTOP of a random worker at a random moment"),
    "python-loop": (_hanging("python-loop"), 5, "a loop that lets other threads run"),
    "c-loop": (_hanging("c-loop"), 5, "a loop that keeps the GIL"),
    "collective": (_hanging("collective"), 5, "a collective that the others do not call"),
    "loader": (_hanging("loader"), 5, "a sample that never loads, in the worker and in a loader worker"),
    "preempt": (_again(preempted), 20, "SIGTERM, SIGUSR1 in each phase, to the command, a worker, the group, everyone"),
    "everything": (_again(everything_in_a_save), 30, "SIGKILL of everything at each phase of a save"),
    "all": (_again(all_workers), 5, "all workers killed"),
    "alone": (_again(alone), 5, "one-worker run killed"),
    "supervisor": (_again(supervisor), 5, "the command killed"),
}
