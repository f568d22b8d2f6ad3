"""Who is said to hang, and who never: every rule of the watch, on pulses made up for it."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.pulse import Activity, Beat
from paceline.supervisor.watch import Hang, Watch, Watched, is_stopped, oom_kills

ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
STEPPING: tuple[Activity, ...] = ("load", "compute", "update", "body")
REGULAR: tuple[Activity, ...] = ("load", "compute", "update", "evaluate")
TIMEOUT_S = 600.0
START_S = 10_000.0
"""When the tests' time begins."""


def member(
    activity: Activity = "wait",
    since_s: float = START_S,
    *,
    rank: int = 0,
    id: int | None = None,
    beat_s: float | None = None,
    stopped: bool = False,
    step: int | None = 12,
    phase: int | None = None,
    seen: int = 50,
    longest_s: float = 0.2,
) -> Watched:
    """A member that has been at ``activity`` since then. Its heart goes on beating unless ``beat_s`` is given."""
    beat = Beat(
        beat_s=START_S + 1e6 if beat_s is None else beat_s,
        since_s=since_s,
        activity=activity,
        step=step,
        phase=phase,
        lane=3,
        call=None,
        seen=dict.fromkeys(ACTIVITIES, seen) if seen else {},
        longest_s=dict.fromkeys(ACTIVITIES, longest_s) if seen > 1 else {},
        main_thread=1,
    )
    return Watched(id=rank if id is None else id, rank=rank, beat=beat, stopped=stopped)


def found(watch: Watch, members: list[Watched], until_s: float) -> tuple[Hang, float] | None:
    """The first hang and when it was seen, looking twice a second from the start of time."""
    for turn in range(int((until_s - START_S) * 2) + 1):
        now_s = START_S + turn / 2
        if (hang := watch.look(members, now_s)) is not None:
            return hang, now_s
    return None


def after_s(watch: Watch, *members: Watched) -> float | None:
    """Seconds until one of ``members`` is found to hang."""
    seen = found(watch, list(members), START_S + 2 * TIMEOUT_S)
    return seen[1] - START_S if seen else None


@pytest.mark.parametrize("activity", ACTIVITIES)
def test_the_users_own_deadline_is_for_the_course_of_steps(activity: Activity) -> None:
    watch = Watch(hang_after_s=40, timeout_s=TIMEOUT_S)
    expected = {"wait": None, "evaluate": 30.5} | dict.fromkeys(STEPPING, 40.5)
    assert after_s(watch, member(activity)) == expected.get(activity, TIMEOUT_S + 0.5)


@pytest.mark.parametrize("activity", ACTIVITIES)
def test_otherwise_what_is_regular_has_a_deadline_learned_from_the_run(activity: Activity) -> None:
    watch = Watch(hang_after_s=None, timeout_s=TIMEOUT_S)
    expected = {"wait": None} | dict.fromkeys(REGULAR, 70.5)
    assert after_s(watch, member(activity, longest_s=7.0)) == expected.get(activity, TIMEOUT_S + 0.5)


@pytest.mark.parametrize(
    ("longest_s", "timeout_s", "deadline_s"), [(0.001, 600, 30), (3.1, 600, 31), (100, 600, 600), (1, 20, 20)]
)
def test_a_learned_deadline_has_bounds(longest_s: float, timeout_s: float, deadline_s: float) -> None:
    seen = found(Watch(None, timeout_s), [member("compute", longest_s=longest_s)], START_S + 700)
    assert seen is not None
    assert (seen[0].deadline_s, seen[1]) == (deadline_s, START_S + deadline_s + 0.5)


@pytest.mark.parametrize("hang_after_s", [None, 40.0])
@pytest.mark.parametrize("activity", STEPPING)
def test_the_first_time_of_a_member_may_take_long_however_quick_the_others_are(
    activity: Activity, hang_after_s: float | None
) -> None:
    new = member(activity, rank=1, seen=0)
    assert after_s(Watch(hang_after_s, TIMEOUT_S), member("wait"), new) == TIMEOUT_S + 0.5


def test_a_member_in_its_first_step_has_not_come_to_the_code_between_steps() -> None:
    watched = member("compute")
    assert watched.beat is not None
    beat = replace(watched.beat, seen={"start": 1, "load": 5, "compute": 5}, longest_s={"load": 0.2, "compute": 0.2})
    for hang_after_s in (40.0, None):
        assert after_s(Watch(hang_after_s, TIMEOUT_S), replace(watched, beat=beat)) == TIMEOUT_S + 0.5


@pytest.mark.parametrize(("seen", "deadline_s"), [(2, TIMEOUT_S), (3, 30.0)])
def test_three_measured_times_of_all_members_together_are_enough(seen: int, deadline_s: float) -> None:
    """Of each member the first time is not measured: 2 x 1 are too few, 2 x 2 enough."""
    members = [member("wait", seen=seen), member("compute", rank=1, seen=seen)]
    assert after_s(Watch(None, TIMEOUT_S), *members) == deadline_s + 0.5


def test_what_the_dead_taught_is_not_forgotten() -> None:
    watch = Watch(None, TIMEOUT_S)
    watch.look([member("compute", START_S, longest_s=9.0)], START_S - 0.5)
    new = member("compute", rank=0, id=1, seen=2, longest_s=0.5)
    assert after_s(watch, new) == 90.5


def test_one_that_says_nothing_is_starting() -> None:
    hang_s = after_s(Watch(hang_after_s=40, timeout_s=TIMEOUT_S), Watched(id=4, rank=1, beat=None, stopped=False))
    assert hang_s == TIMEOUT_S + 0.5


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=5), st.sampled_from([None, 1.0, 40.0]))
def test_when_all_wait_nobody_hangs(waiting_s: list[float], hang_after_s: float | None) -> None:
    members = [member("wait", START_S - waited_s, rank=rank) for rank, waited_s in enumerate(waiting_s)]
    assert Watch(hang_after_s, 1.0).look(members, START_S) is None


@given(
    st.lists(st.tuples(st.sampled_from(STEPPING), st.floats(0, 1e4)), min_size=1, max_size=5),
    st.floats(1, 1e3),
)
def test_the_one_longest_over_its_deadline_is_to_blame(
    doing: list[tuple[Activity, float]], hang_after_s: float
) -> None:
    members = [member(activity, START_S - time_s, rank=rank) for rank, (activity, time_s) in enumerate(doing)]
    waits = member("wait", START_S - 1e5, rank=len(doing))
    hang = Watch(hang_after_s, TIMEOUT_S).look([waits, *members], START_S)
    longest_s = max(START_S - (START_S - time_s) for _, time_s in doing)
    if longest_s <= hang_after_s:
        assert hang is None
    else:
        assert hang is not None
        assert hang.elapsed_s == longest_s
        assert hang.rank != waits.rank


def test_over_the_deadline_counts_not_the_time_alone() -> None:
    watch = Watch(hang_after_s=10, timeout_s=100)
    saves, computes = member("save", START_S - 105, rank=0), member("compute", START_S - 50, rank=1)
    hang = watch.look([saves, computes], START_S)
    assert hang is not None
    assert (hang.rank, hang.elapsed_s, hang.deadline_s) == (1, 50, 10)


@pytest.mark.parametrize("activity", ACTIVITIES)
@pytest.mark.parametrize(("hang_after_s", "deadline_s"), [(None, 5.0), (40.0, 5.0), (2.0, 2.0)])
def test_a_stopped_process_hangs_whatever_it_was_doing(
    activity: Activity, hang_after_s: float | None, deadline_s: float
) -> None:
    seen = found(
        Watch(hang_after_s, TIMEOUT_S), [member(activity, beat_s=START_S, stopped=True, seen=0)], START_S + 1000
    )
    assert seen is not None
    hang, now_s = seen
    assert now_s == START_S + deadline_s + 0.5
    assert (hang.stopped, hang.silent, hang.elapsed_s, hang.deadline_s) == (True, False, deadline_s + 0.5, deadline_s)


def test_one_that_is_stopped_for_a_moment_is_left_alone() -> None:
    assert Watch(None, TIMEOUT_S).look([member(beat_s=START_S - 4, stopped=True)], START_S) is None


def test_one_that_waits_and_keeps_all_its_threads_from_running_does_not_wait() -> None:
    silent = member("wait", START_S - 1e4, beat_s=START_S, longest_s=7.0)
    seen = found(Watch(None, TIMEOUT_S), [silent, member("wait", rank=1)], START_S + 1000)
    assert seen is not None
    hang, now_s = seen
    assert (hang.rank, hang.silent, hang.stopped, hang.deadline_s) == (0, True, False, 70)
    assert now_s == START_S + 70.5
    assert "no sign of life for 70.5 s" in hang.told(None)


def test_a_heart_that_stops_changes_nothing_for_one_that_computes() -> None:
    silent = member("compute", beat_s=START_S)
    seen = found(Watch(40, TIMEOUT_S), [silent, member("wait", rank=1)], START_S + 1000)
    assert seen is not None
    assert (seen[0].silent, seen[1]) == (True, START_S + 40.5)


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """Such as after Ctrl-Z and `fg`: everybody's time and every heartbeat is old, and the first look finds it so."""
    watch = Watch(hang_after_s=40, timeout_s=TIMEOUT_S)
    members = [member("compute"), member("wait", rank=1, beat_s=START_S, stopped=True)]
    assert watch.look(members, START_S + 1) is None
    later_s = START_S + 5000
    assert watch.look(members, later_s) is None
    assert watch.look(members[:1], later_s + 2) is None
    hangs = [watch.look(members[:1], later_s + second) for second in range(4, 50, 2)]
    assert [hang is not None for hang in hangs].index(True) == (42 - 4) // 2


@pytest.mark.parametrize("how", ["it was stopped", "nobody looked"])
def test_nothing_is_learned_from_a_pause(how: str) -> None:
    watch = Watch(None, TIMEOUT_S)
    watch.look([member("compute", longest_s=4.0)], START_S)
    if how == "it was stopped":
        watch.look([member("compute", stopped=True, longest_s=4.0)], START_S + 1)
    paused_s = START_S + 1 if how == "it was stopped" else START_S + 3600
    watch.look([member("wait", longest_s=3600.0)], paused_s)
    watch.look([member("wait", longest_s=3600.0), member("compute", paused_s, rank=1, longest_s=4.5)], paused_s + 1)
    hangs = [
        watch.look([member("wait", longest_s=3600.0), member("compute", paused_s, rank=1, longest_s=4.5)], paused_s + s)
        for s in range(2, 100)
    ]
    first = next(hang for hang in hangs if hang is not None)
    assert (first.rank, first.deadline_s, first.longest_s) == (1, 45.0, 4.5)


def told(activity: Activity, line: str | None = None, *, elapsed_s: float = 34.12, **more: object) -> str:
    watched = member(activity, START_S - elapsed_s, rank=1, **more)  # type: ignore[arg-type]
    hang = Watch(hang_after_s=5, timeout_s=30).look([watched], START_S)
    assert hang is not None
    return hang.told(line)


@pytest.mark.parametrize(
    ("sentence", "made"),
    [
        (
            "worker 1 hangs in step 12, lane 3, at train.py:31: computing for 34.1 s, so far 0.2 s at most",
            lambda: told("compute", "train.py:31"),
        ),
        (
            "worker 1 hangs in step 12, phase 2, lane 3: waiting for its next micro-batch for 34.1 s, so far 4 ms at "
            "most",
            lambda: told("load", phase=1, longest_s=0.004),
        ),
        ("worker 1 hangs in step 12: updating for 34.1 s", lambda: told("update", seen=1)),
        (
            "worker 1 hangs after step 12, at train.py:50: in the code between steps for 34.1 s, so far 0.2 s at most",
            lambda: told("body", "train.py:50"),
        ),
        ("worker 1 hangs after step 12: saving a checkpoint for 34.1 s", lambda: told("save", seen=0)),
        ("worker 1 hangs before its first step: starting for 34.1 s", lambda: told("start", step=None, seen=0)),
        ("worker 1 hangs while joining: catching up with the others for 34.1 s", lambda: told("join", seen=0)),
        (
            "worker 1 hangs in step 12, lane 3, at train.py:31: computing for 34.1 s, so far 0.2 s at most (its other "
            "threads do not run either: a call into C code that keeps the GIL)",
            lambda: told("compute", "train.py:31", beat_s=START_S - 30),
        ),
        (
            "worker 1 is stopped (SIGSTOP) in step 12, lane 3",
            lambda: told("compute", "train.py:31", beat_s=START_S - 30, stopped=True),
        ),
        (
            "worker 1 is stopped (SIGSTOP) before its first step",
            lambda: told("start", step=None, beat_s=START_S - 30, stopped=True),
        ),
    ],
)
def test_a_hang_is_told_in_a_sentence(sentence: str, made: Callable[[], str]) -> None:
    assert made() == sentence


def test_a_process_is_stopped_whatever_its_name_is(tmp_path: Path) -> None:
    program = tmp_path / "a) S (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as process:
        try:
            assert not is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            eventually(lambda: is_stopped(process.pid))
            process.send_signal(signal.SIGCONT)
            eventually(lambda: not is_stopped(process.pid))
        finally:
            process.kill()
    assert not is_stopped(process.pid)


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_the_kernel_tells_how_often_it_ran_out_of_memory() -> None:
    kills = oom_kills()
    assert kills is None or kills >= 0
    assert (kills is None) == ("\noom_kill " not in Path("/proc/vmstat").read_text())
