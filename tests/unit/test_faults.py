"""Faults: the sentence, when each statement is due, that it is done just so often, and what it does to a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.faults import Action, Fault, Faults, Place

DEADLINE_S = 20.0
ACTIONS: tuple[Action, ...] = get_args(Action)
PLACES: tuple[Place, ...] = get_args(Place)


@st.composite
def faults_of_any_kind(draw: st.DrawFn) -> Fault:
    place = draw(st.sampled_from(PLACES))
    steps = st.integers(1, 10**9)
    return Fault(
        action=draw(st.sampled_from(ACTIONS)),
        worker=draw(st.integers(0, 63)),
        step=draw(st.none() | steps if place in ("reform", "copy", "join") else steps),
        lane=draw(st.none() | st.integers(0, 63)) if place in ("step", "evaluate") else None,
        at=place,
        times=draw(st.integers(1, 9)),
    )


@given(st.lists(faults_of_any_kind(), min_size=1, max_size=5), st.sampled_from(["; ", ";", "\n", " ;\n ; ", ";  "]))
def test_a_sentence_and_its_faults_are_the_same_thing(listed: list[Fault], between: str) -> None:
    faults = Faults(tuple(listed))
    assert Faults.parse(str(faults)) == faults
    assert Faults.parse(between.join(map(str, listed)) + between) == faults
    assert str(Faults.parse(str(faults))) == str(faults)
    assert hash(faults) == hash(Faults.parse(str(faults)))


def test_a_call_for_each_action_adds_a_statement() -> None:
    faults = Faults()
    for action in ACTIONS:
        add = getattr(faults, "raise_" if action == "raise" else action)
        faults = add(worker=1, step=3)
    assert [fault.action for fault in faults.statements] == list(ACTIONS)
    assert str(Faults().kill(worker=0, step=2, lane=5, times=3).stop(worker=1, at="reform")) == (
        "kill worker=0 step=2 lane=5 times=3; stop worker=1 at=reform"
    )


def test_no_text_is_no_faults() -> None:
    assert Faults.parse(None) == Faults() and str(Faults()) == ""
    Faults().fire("step", worker=0, step=1, once=None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "an empty text"),
        (" ;\n; ", "an empty text"),
        ("kil worker=1 step=3", "an unknown action 'kil' in 'kil worker=1 step=3'.* Did you mean 'kill'"),
        ("worker=1 step=3", "an unknown action 'worker=1'.* Known names: crash, hang"),
        ("kill wrker=1 step=3", "an unknown key 'wrker'.* Did you mean 'worker'"),
        ("kill worker=1 step=3 at=updat", "an unknown place 'updat'.* Did you mean 'update'"),
        ("kill step=3", "no worker in 'kill step=3'"),
        ("kill", "no worker in 'kill'"),
        ("kill worker=1", "no step in 'kill worker=1'.* at=reform"),
        ("kill worker=1 at=body", "no step in 'kill worker=1 at=body'"),
        ("kill worker=1 step=0", "step=0, need a whole number from 1"),
        ("kill worker=-1 step=1", "worker=-1, need a whole number from 0"),
        ("kill worker=x step=1", "worker=x, need a whole number from 0"),
        ("kill worker=\N{ARABIC-INDIC DIGIT ONE} step=1", "need a whole number"),
        ("kill worker=\N{SUPERSCRIPT TWO} step=1", "need a whole number"),
        ("kill worker=1 step=" + "9" * 5000, "need a whole number"),
        ("kill worker=1 step=1.5", "step=1.5, need a whole number"),
        ("kill worker=1 step=3, stop worker=0 step=7", "step=3,, need a whole number.* ; between statements"),
        ("kill worker=1 step=3 times=0", "times=0, need a whole number from 1 to 1000"),
        ("kill worker=1 step=3 times=1001", "times=1001, need"),
        ("kill worker=1 step=3 lane=-2", "lane=-2, need"),
        ("kill worker = 1", "found 'worker' in 'kill worker = 1', need key=value, without spaces"),
        ("kill worker=1 step= 3", "found 'step=' in"),
        ("kill worker=1 step=3 worker=2", "worker twice in"),
        ("kill worker=1 step=3 at=update lane=2", "a lane at=update in .* Leave out lane=2"),
        ("kill worker=1 step=3; kill stop worker=0 step=1", "'stop' in 'kill stop worker=0 step=1', need key=value"),
    ],
)
def test_a_malformed_sentence_is_told_in_four_beats(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Faults.parse(text)
    assert caught.value.problem == "cannot read the faults"
    assert caught.value.found and caught.value.needed and caught.value.fix
    assert len(str(caught.value)) < 300


@given(st.text(alphabet="kilstop worker=123;\n\t", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        faults = Faults.parse(text)
    except ConfigError:
        return
    assert Faults.parse(str(faults)) == faults


@pytest.mark.parametrize(
    "given", [{"worker": True}, {"worker": None}, {"worker": 1.0}, {"step": "3"}, {"times": None}, {"at": "nowhere"}]
)
def test_what_a_script_builds_is_checked_too(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot read the faults"):
        Faults().kill(**{"worker": 1, "step": 3, **given})


@pytest.mark.parametrize(
    ("text", "size", "says"),
    [
        ("kill worker=2 step=3", {}, None),
        ("kill worker=3 step=3", {}, "worker=3 in 'kill worker=3 step=3'.* need 0 <= worker <= 2"),
        ("kill worker=0 step=12 lane=7", {}, None),
        ("kill worker=0 step=13", {}, "step=13 .* need 1 <= step <= 12.* step=12 or below, or a run with more steps"),
        ("kill worker=0 step=13 at=save", {}, "step=13"),
        ("kill worker=0 step=13", {"steps": None}, None),
        ("kill worker=0 step=1 lane=8", {}, "lane=8 .* need 0 <= lane <= 7"),
        ("kill worker=0 at=reform", {}, None),
        ("kill worker=0 step=1; stop worker=1 at=join", {"workers": 1}, "worker=1 in 'stop worker=1 at=join'"),
    ],
)
def test_a_fault_beyond_the_run_is_refused(text: str, size: dict[str, Any], says: str | None) -> None:
    faults, run = Faults.parse(text), {"workers": 3, "lanes": 8, "steps": 12, **size}
    if says is None:
        faults.check(**run)
        return
    with pytest.raises(ConfigError, match=says):
        faults.check(**run)


Moment = tuple[str, dict[str, int]]


@pytest.mark.parametrize(
    ("text", "moments", "due"),
    [
        ("worker=1 step=3", [("step", {"worker": w, "step": s}) for s in (2, 3, 4) for w in (0, 1)], [3]),
        ("worker=1 step=3", [("step", {"worker": 1, "step": 3, "lane": lane}) for lane in (4, 5)] * 2, [0]),
        ("worker=1 step=3 lane=5", [("step", {"worker": 1, "step": 3, "lane": lane}) for lane in (4, 5, 6)], [1]),
        ("worker=1 step=3 lane=5", [("step", {"worker": 1, "step": 3})], []),
        ("worker=1 step=3 times=2", [("step", {"worker": 1, "step": s}) for s in (3, 3, 3)], [0, 1]),
        ("worker=0 step=3 at=update", [(p, {"worker": 0, "step": 3}) for p in ("step", "exchange", "update")], [2]),
        ("worker=0 step=3 at=body", [("body", {"worker": 0, "step": s}) for s in (4, 3)], [1]),
        ("worker=0 step=3 at=save", [("save", {"worker": 0, "step": s}) for s in (2, 4, 5)], [1]),
        ("worker=0 step=3 at=evaluate", [("evaluate", {"worker": 0, "step": s}) for s in (2, 3)], [1]),
        ("worker=0 at=reform", [("step", {"worker": 0, "step": 3}), ("reform", {"worker": 0})], [1]),
        ("worker=0 step=3 at=copy", [("copy", {"worker": 0}), ("copy", {"worker": 0, "step": 9})], [1]),
        ("worker=0 at=join", [("join", {"worker": 0, "step": 9}), ("join", {"worker": 0, "step": 9})], [0]),
    ],
)
@pytest.mark.parametrize("kept", ["in files", "in memory"])
def test_a_statement_is_due_at_its_moment(
    text: str, moments: list[Moment], due: list[int], kept: str, tmp_path: Path
) -> None:
    faults = Faults.parse(f"raise {text}")
    acted = []
    for number, (place, moment) in enumerate(moments):
        try:
            faults.fire(place, **moment, once=tmp_path / "faults" if kept == "in files" else None)  # type: ignore[arg-type]
        except RuntimeError as error:
            assert f"asked for by the fault 'raise {text}'" in str(error)
            acted.append(number)
    assert acted == due


def test_what_has_fired_outlives_the_process_and_is_told(tmp_path: Path) -> None:
    text = "raise worker=0 step=1; raise worker=0 step=2 times=2; raise worker=0 step=9"
    once = tmp_path / "run" / "faults"
    assert Faults.parse(text).unfired(once) == text.split("; ")
    for step in (1, 2):
        with pytest.raises(RuntimeError):
            Faults.parse(text).fire("step", worker=0, step=step, once=once)
    Faults.parse(text).fire("step", worker=0, step=1, once=once)
    assert Faults.parse(text).unfired(once) == text.split("; ")[1:]
    assert sorted(path.name[:9] for path in once.iterdir()) == ["fault-1-1", "fault-2-1"]
    with pytest.raises(RuntimeError):
        Faults.parse(text).fire("step", worker=0, step=2, once=once)
    assert Faults.parse(text).unfired(once) == ["raise worker=0 step=9"]


def test_another_sentence_in_the_same_place_is_not_taken_for_done(tmp_path: Path) -> None:
    """A run that was rehearsed with, and is resumed with other faults."""
    for text in ("raise worker=0 step=1", "raise worker=0 step=2"):
        with pytest.raises(RuntimeError):
            Faults.parse(text).fire("step", worker=0, step=int(text[-1]), once=tmp_path)


def test_several_statements_may_be_due_at_once(tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        faults = Faults().usr1(worker=0, step=1).usr1(worker=0, step=1).usr1(worker=0, step=2)
        faults.fire("step", worker=0, step=1, once=tmp_path)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1] * 2


# Without faults it is called for every micro-batch.


def test_no_faults_cost_nothing_to_speak_of() -> None:
    faults = Faults()
    best_s = min(
        timeit.repeat(lambda: faults.fire("step", worker=1, step=3, lane=2, once=None), number=10_000, repeat=20)
    )
    assert best_s / 10_000 < 1e-6


# What the actions do, to processes of their own.

WORKER = """
import sys, threading, time
from pathlib import Path
from paceline.faults import Faults

faults, once = Faults.parse(sys.argv[1]), Path(sys.argv[2])
lived = Path(sys.argv[3])
def tell():
    while True:
        lived.write_text("x" * (len(lived.read_text()) + 1))
        time.sleep(0.005)
lived.write_text("")
threading.Thread(target=tell, daemon=True).start()
print("begun", flush=True)
sys.stdin.readline()
faults.fire("step", worker=0, step=1, once=once)
print("went on", flush=True)
"""


class Worker:
    """A process that meets the faults at step 1 when told to; a thread of it counts in a file meanwhile."""

    def __init__(self, text: str, place: Path, name: str = "worker") -> None:
        self.beats = place / f"{name}.beats"
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, text, str(place / "faults"), str(self.beats)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "begun\n"

    def meet(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err

    def state(self) -> str:
        """As in ``ps``: R, S, T, ..."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def beat(self) -> int:
        return len(self.beats.read_text())


@contextmanager
def worker(text: str, place: Path) -> Iterator[Worker]:
    started = Worker(text, place)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("action", "number"),
    [
        ("kill", signal.SIGKILL),
        ("crash", signal.SIGSEGV),
        ("term", signal.SIGTERM),
        ("usr1", signal.SIGUSR1),
        ("interrupt", signal.SIGINT),
    ],
)
def test_signals_that_end_a_process(action: str, number: signal.Signals, tmp_path: Path) -> None:
    with worker(f"{action} worker=0 step=1", tmp_path) as started:
        started.meet()
        code, out, err = started.end()
    assert code == -number and "went on" not in out
    assert ("KeyboardInterrupt" in err) == (action == "interrupt"), err
    assert Faults.parse(f"{action} worker=0 step=1").unfired(tmp_path / "faults") == []


def test_stop_stops_every_thread_until_it_may_go_on(tmp_path: Path) -> None:
    with worker("stop worker=0 step=1", tmp_path) as started:
        started.meet()
        until(lambda: started.state() == "T")
        beat = started.beat()
        time.sleep(0.05)
        assert started.state() == "T" and started.beat() == beat
        os.kill(started.process.pid, signal.SIGCONT)
        code, out, _ = started.end()
    assert (code, out) == (0, "went on\n")


def test_a_hang_leaves_other_threads_alone(tmp_path: Path) -> None:
    with worker("hang worker=0 step=1", tmp_path) as started:
        started.meet()
        until(lambda: (tmp_path / "faults").exists())
        beat = started.beat()
        until(lambda: started.beat() > beat + 5)
        assert started.process.poll() is None


def test_a_spin_holds_every_thread_and_hears_no_signal(tmp_path: Path) -> None:
    with worker("spin worker=0 step=1", tmp_path) as started:
        started.meet()
        until(lambda: (tmp_path / "faults").exists())
        time.sleep(0.05)
        beat = started.beat()
        os.kill(started.process.pid, signal.SIGINT)  # Python's handler would raise KeyboardInterrupt
        time.sleep(0.2)
        assert started.beat() <= beat + 1 and started.process.poll() is None
        assert started.state() == "R"


def test_raise_raises(tmp_path: Path) -> None:
    with worker("raise worker=0 step=1", tmp_path) as started:
        started.meet()
        code, _, err = started.end()
    assert code == 1 and err.endswith("RuntimeError: asked for by the fault 'raise worker=0 step=1'\n")


def test_of_processes_at_the_same_moment_as_many_are_killed_as_asked(tmp_path: Path) -> None:
    text = "kill worker=0 step=1 times=2"
    racing = [Worker(text, tmp_path, str(number)) for number in range(4)]
    for started in racing:
        started.meet()
    codes = sorted(started.end()[0] for started in racing)
    assert codes == [-signal.SIGKILL] * 2 + [0, 0]
    assert Faults.parse(text).unfired(tmp_path / "faults") == []


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("kept", ["in files", "in memory"])
def test_of_threads_at_the_same_moment_as_many_act_as_asked(kept: str, tmp_path: Path) -> None:
    faults = Faults.parse("raise worker=0 step=1 times=20")
    gate = threading.Barrier(8)
    acted: list[None] = []

    def meet() -> None:
        gate.wait(DEADLINE_S)
        for _ in range(20):
            try:
                faults.fire("step", worker=0, step=1, once=tmp_path if kept == "in files" else None)
            except RuntimeError:
                acted.append(None)

    threads = [threading.Thread(target=meet) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(acted) == 20
