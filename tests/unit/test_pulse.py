"""A pulse says what was entered last and how long things took, to another process, also after its writer's death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import get_args

import pytest

from paceline.pulse import Activity, Beat, Pulse, read_pulse


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pulse"


@pytest.fixture
def pulse(path: Path) -> Iterator[Pulse]:
    with closing(Pulse(path)) as made:
        yield made


def read(path: Path) -> Beat:
    beat = read_pulse(path)
    assert beat is not None
    return beat


def test_a_pulse_begins_with_start_knowing_nothing(pulse: Pulse, path: Path) -> None:
    beat = read(path)
    assert beat.activity == "start"
    assert (beat.step, beat.phase, beat.lane, beat.call) == (None, None, None, None)
    assert (beat.seen, beat.longest_s) == ({}, {})
    assert beat.main_thread == threading.main_thread().ident
    assert 0 <= time.monotonic() - beat.since_s < 10
    assert 0 <= time.monotonic() - beat.beat_s < 10


@pytest.mark.parametrize("activity", get_args(Activity))
def test_every_activity_is_read_as_it_was_entered(pulse: Pulse, path: Path, activity: Activity) -> None:
    before_s = time.monotonic()
    assert pulse.enter(activity, step=1, phase=0, lane=0) == "start"
    beat = read(path)
    assert (beat.activity, beat.step, beat.phase, beat.lane) == (activity, 1, 0, 0)
    assert before_s <= beat.since_s <= time.monotonic()
    assert pulse.enter("end") == activity


def test_what_is_not_given_stays(pulse: Pulse, path: Path) -> None:
    pulse.enter("load", step=12, phase=1, lane=3)
    pulse.enter("compute")
    pulse.enter("compute", lane=4)
    beat = read(path)
    assert (beat.activity, beat.step, beat.phase, beat.lane) == ("compute", 12, 1, 4)


def test_the_longest_leaves_the_first_out(pulse: Pulse, path: Path) -> None:
    for pause_s in (0.2, 0.02, 0.05, 0.01):
        pulse.enter("compute")
        time.sleep(pause_s)
        pulse.enter("wait")
        if pause_s == 0.2:
            assert read(path).longest_s == {}
    beat = read(path)
    assert beat.seen == {"start": 1, "compute": 4, "wait": 3}
    assert set(beat.longest_s) == {"compute", "wait"}
    assert 0.05 <= beat.longest_s["compute"] < 0.2
    assert beat.longest_s["wait"] < 0.05


def test_the_heart_beats_apart_from_what_is_done(pulse: Pulse, path: Path) -> None:
    first = read(path)
    pulse.beat()
    second = read(path)
    assert second.beat_s > first.beat_s
    assert second.since_s == first.since_s
    pulse.enter("load")
    assert read(path).beat_s == second.beat_s


def test_a_call_is_told_while_it_is_waited_in(pulse: Pulse, path: Path) -> None:
    pulse.call("run.gather (train.py:31)")
    assert read(path).call is None
    pulse.enter("wait")
    assert read(path).call == "run.gather (train.py:31)"
    pulse.call("exchange")
    assert read(path).call == "exchange"
    pulse.enter("compute")
    assert read(path).call is None


@pytest.mark.parametrize("name", ["x" * 1000, "ü" * 1000, "x" + "ü" * 1000])
def test_a_long_call_is_cut_between_characters(pulse: Pulse, path: Path, name: str) -> None:
    pulse.enter("wait")
    pulse.call(name)
    call = read(path).call
    assert call is not None
    assert name.startswith(call)
    assert 199 <= len(call.encode()) <= 200


@pytest.mark.parametrize("content", [None, b"", bytes(10), bytes(10_000)])
def test_a_file_that_says_nothing_yet(path: Path, content: bytes | None) -> None:
    if content is not None:
        path.write_bytes(content)
    assert read_pulse(path) is None


def test_a_file_that_is_there_is_begun_anew(path: Path) -> None:
    for step in (7, None):
        with closing(Pulse(path)) as pulse:
            assert read(path).step is None
            pulse.enter("compute", step=step)


def test_nobody_looks(tmp_path: Path) -> None:
    pulse = Pulse(None)
    assert pulse.enter("load", step=1, phase=0, lane=0) == "start"
    assert pulse.enter("wait") == "load"
    pulse.call("exchange")
    pulse.beat()
    pulse.close()
    assert pulse.enter("end") == "wait"
    assert list(tmp_path.iterdir()) == []


def test_after_closing_the_file_stays_as_it_was(pulse: Pulse, path: Path) -> None:
    pulse.enter("end", step=3)
    before = read(path)
    pulse.close()
    assert pulse.enter("start") == "end"
    pulse.beat()
    pulse.call("exchange")
    assert read(path) == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_another_process_reads_it_after_death_and_while_stopped(path: Path, number: signal.Signals) -> None:
    script = (
        "import os, sys; from pathlib import Path; from paceline.pulse import Pulse; pulse = Pulse(Path(sys.argv[1]));"
        "pulse.enter('compute', step=57, lane=5); os.kill(os.getpid(), int(sys.argv[2]))"
    )
    before_s = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", script, str(path), str(int(number))]) as process:
        try:
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
            assert ended is not None
            assert ended.si_status == number
            beat = read(path)
        finally:
            process.kill()
    assert (beat.activity, beat.step, beat.lane) == ("compute", 57, 5)
    assert before_s <= beat.beat_s <= beat.since_s <= time.monotonic()  # one clock for both processes


def test_a_beat_meets_closing(path: Path) -> None:
    """The thread that beats may be in the middle of it."""
    failures: list[BaseException] = []

    def beat(pulse: Pulse) -> None:
        try:
            for _ in range(2000):
                pulse.beat()
        except BaseException as error:
            failures.append(error)

    for _ in range(20):
        pulse = Pulse(path)
        thread = threading.Thread(target=beat, args=(pulse,))
        thread.start()
        pulse.close()
        thread.join()
    assert failures == []


def test_it_costs_about_a_microsecond(pulse: Pulse) -> None:
    """Ten times that is permitted, of the quickest of many rounds: this machine may be busy."""
    assert quickest_us(lambda: pulse.enter("compute", step=12, phase=0, lane=3)) < 10
    assert quickest_us(pulse.beat) < 10
    assert quickest_us(lambda: Pulse.enter(nobody, "compute", step=12, phase=0, lane=3)) < 5


nobody = Pulse(None)


def quickest_us(call: Callable[[], object]) -> float:
    rounds = []
    for _ in range(50):
        began_s = time.perf_counter()
        for _ in range(200):
            call()
        rounds.append((time.perf_counter() - began_s) / 200 * 1e6)
    return min(rounds)
