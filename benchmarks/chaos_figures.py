"""What failover costs, and that it leaves nothing growing: the rows of `chaos.py` that measure a long run."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chaos_cases import CONFIG, SCRIPT, Case, Figures, Place, expect
from chaos_run import Started, paceline, torchrun

__all__ = ["BARS", "FIGURES"]

PERIOD_S = 5.0
STORM_S = 180.0
KEPT = 0.85
"""Least part of the undisturbed tokens under a kill every `PERIOD_S`."""
REFORMINGS = 100
FLAT_KIB = 4096
"""A survivor may have grown by so much after the first tenth of its re-formings: allocators keep what they free."""
ROUNDS = 9
COSTS = 0.01
"""Of a step, at most, while nothing happens."""
RECOVERED_S = 1.0
"""From a kill to the next finished step, at most, besides that step itself."""


# A kill every few seconds


def storm(place: Place) -> Figures:
    """The same number of steps twice: in peace, and with a random worker killed every `PERIOD_S`."""
    workers = 2
    steps_per_s = _steps_per_s(place, workers)
    steps = int(steps_per_s * STORM_S)
    print(f"  {steps_per_s:.1f} steps/s; {steps} steps in peace", flush=True)
    calm = _long_run(place, "calm", workers, steps)
    with calm as run:
        run.end()
    print(f"  the same with a kill every {PERIOD_S:g} s", flush=True)
    stormy = _long_run(place, "stormy", workers, steps)
    kills = 0
    with stormy as run:
        run.until(lambda: run.last_step() >= 1)
        begun = time.monotonic()
        while time.monotonic() - begun < STORM_S and run.sleep(PERIOD_S):
            pids = list(run.workers().values())
            run.kill(place.moments.choice(pids))
            kills += 1
            print(f"  kill {kills}, step {run.last_step()}", flush=True)
        run.end()
    expect(_result(calm)["digest"] == _result(stormy)["digest"], "another digest")
    steps_by = {run: _finished_by(run, STORM_S) for run in (calm, stormy)}
    kept = steps_by[stormy] / steps_by[calm]
    lost = sum(event["lost"] for event in stormy.events("membership"))
    expect(kept >= KEPT, f"kept {kept:.3f} of the undisturbed tokens")
    return {"tokens kept": kept, "kills": kills, "losses": lost, "undisturbed steps/s": steps_by[calm] / STORM_S}


def _long_run(place: Place, name: str, workers: int, steps: int) -> Started:
    """`paceline train` with steps of some 100 ms, which is short enough for trouble and long enough for a network."""
    words = ["--task.width", "128", "--task.layers", "4", "--recipe.steps", str(steps)]
    words += ["--execution.checkpoint_every", "200", "--execution.evaluate_every", "null"]
    return _train(place, name, workers, *words)


def _train(place: Place, name: str, workers: int, *words: str) -> Started:
    run_dir = place.run_dir.with_name(f"{place.run_dir.name}-{name}")
    command = paceline("train", CONFIG, "-n", str(workers), "--run-dir", str(run_dir), *words)
    return Started(command, run_dir, deadline_s=1200)


def _steps_per_s(place: Place, workers: int) -> float:
    with _long_run(place, "calibration", workers, 60) as run:
        run.end()
    times = [float(event["time"]) for event in run.events("step")]
    return (len(times) - 20) / (times[-1] - times[19])


def _finished_by(run: Started, seconds: float) -> float:
    """Steps finished so many seconds after the first; of a run that was over before, as many as it would have."""
    times = [event["time"] for event in run.events("step")]
    within = [at - times[0] for at in times if at - times[0] <= seconds]
    return len(within) if len(within) < len(times) else len(times) * seconds / within[-1]


def _result(run: Started) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((run.run_dir / "result.json").read_text())
    return told


# Re-forming again and again


def flat(place: Place) -> Figures:
    """Descriptors, threads and memory of a worker that survives the other one so many times."""
    words = ["--recipe.steps", "1000000", "--execution.checkpoint_every", "null"]
    words += ["--execution.evaluate_every", "null", "--execution.log_every", "100"]
    samples: list[dict[str, int]] = []
    with _train(place, "run", 2, *words) as run:
        run.until(lambda: len(run.workers()) == 2)
        survivor = run.workers()[0]
        while len(samples) <= REFORMINGS:
            pids = run.workers().values()
            (other,) = (pid for pid in pids if pid != survivor)
            time.sleep(0.3)  # steps of the new generation
            samples.append(_held(survivor) | {f"supervisor's {k}": v for k, v in _held(run.process.pid).items()})
            run.kill(other)
            expect(run.until(lambda: _is_mended(run, other)), f"ended: {run.said()}")  # noqa: B023 (waited for here)
            if len(samples) % 10 == 1:
                print(f"  {len(samples) - 1} kills: {samples[-1]}", flush=True)
        run.kill(run.process.pid, signal.SIGTERM)
        run.end(75)
    early, late = samples[REFORMINGS // 10], samples[-1]
    for name, before in early.items():
        room = FLAT_KIB if name.endswith("KiB") else 0
        expect(late[name] <= before + room, f"{name} grew from {before} to {late[name]}")
    return {f"{name}, after {REFORMINGS // 10} kills": float(value) for name, value in early.items()} | {
        f"{name}, after {REFORMINGS} kills": float(value) for name, value in late.items()
    }


def _is_mended(run: Started, lost: int) -> bool:
    pids = run.workers().values()
    return len(pids) == 2 and lost not in pids


def _held(pid: int) -> dict[str, int]:
    process = Path("/proc", str(pid))
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return {
        "descriptors": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
        "resident KiB": int(status["VmRSS"].split()[0]),
    }


# While nothing happens


def ready(place: Place) -> Figures:
    """The same script under `paceline launch`, which can fail over, and under torchrun, which cannot; in turns."""
    seconds: dict[str, list[float]] = {"launch": [], "torchrun": []}
    cpu_seconds: dict[str, list[float]] = {"launch": [], "torchrun": []}
    shares = []
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # as the supervisor sets it
    for number in range(ROUNDS):
        for side in sorted(seconds, reverse=bool(number % 2)):
            run_dir = place.run_dir.with_name(f"{place.run_dir.name}-{side}-{number}")
            run_dir.mkdir()
            words = [SCRIPT, str(run_dir), "--steps", "320", "--pace-ms", "0", "--width", "512"]
            words += ["--checkpoint-every", "1000"]
            command = torchrun(2, *words) if side == "torchrun" else paceline("launch", "-n", "2", *words)
            with Started(command, run_dir, deadline_s=300) as run:
                if side == "launch" and run.until(lambda: run.last_step() >= 20):
                    shares.append(_cpu_share(run, 2.0))
                run.end()
            seconds[side].append(float(_result(run)["step_s"]))
            cpu_seconds[side].append(float(_result(run)["cpu_s"]))
        last = {side: f"{1000 * values[-1]:.2f} ms" for side, values in seconds.items()}
        print(f"  round {number + 1}/{ROUNDS}: {last}, supervisor {100 * shares[-1]:.2f} % of a core", flush=True)
    ratios, cpu_ratios = (
        [ours / theirs for ours, theirs in zip(both["launch"], both["torchrun"], strict=True)]
        for both in (seconds, cpu_seconds)
    )
    return {
        "step with failover, ms": 1000 * statistics.median(seconds["launch"]),
        "step without, ms": 1000 * statistics.median(seconds["torchrun"]),
        "ratio, median of rounds": statistics.median(ratios),
        "ratio, least": min(ratios),
        "ratio, most": max(ratios),
        "worker's CPU time of a step, ratio, median of rounds": statistics.median(cpu_ratios),
        "supervisor, part of a core": statistics.median(shares),
    }


def _cpu_share(run: Started, seconds: float) -> float:
    """What the supervisor itself uses."""
    begun, before = time.monotonic(), _cpu_s(run.process.pid)
    run.sleep(seconds)
    return (_cpu_s(run.process.pid) - before) / (time.monotonic() - begun) if run.running() else 0.0


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/schedstat") as file:  # noqa: PTH123 (nanoseconds, of the main thread)
        return int(file.read().split()[0]) / 1e9


# Bars on the figures of whole rows


def _bar_of_kill(figures: Mapping[str, Sequence[float]]) -> str | None:
    seconds = figures.get("kill to next step, s")
    if not seconds or statistics.median(seconds) <= RECOVERED_S:
        return None
    return f"median time from kill to next step {statistics.median(seconds):.2f} s, at most {RECOVERED_S:g} s allowed"


def _bar_of_ready(figures: Mapping[str, Sequence[float]]) -> str | None:
    ratio = statistics.median(figures.get("ratio, median of rounds", [1.0]))
    return f"costs {100 * (ratio - 1):.1f} % of a step" if ratio > 1 + COSTS else None


BARS: dict[str, Callable[[Mapping[str, Sequence[float]]], str | None]] = {"kill": _bar_of_kill, "ready": _bar_of_ready}

FIGURES: dict[str, tuple[Case, int, str]] = {
    "storm": (storm, 1, f"a kill every {PERIOD_S:g} s for {STORM_S / 60:g} minutes, 2 workers"),
    "flat": (flat, 1, f"one worker of two killed {REFORMINGS} times: what the other one holds"),
    "ready": (ready, 1, "a step while nothing happens, with failover and without, interleaved"),
}
