"""Stacks of real processes in every state in which a worker can hang, and the whole way from the pulse to the line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from paceline.pulse import Beat, read_pulse
from paceline.stacks import STACKS_SIGNAL, Dumping, collect, dump_on_signal, new_file, users_line
from paceline.supervisor.watch import Hang, Watch, Watched, is_stopped

DEADLINE_S = 20.0
STATES = {
    "in a call that keeps the GIL": "re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "asleep": "time.sleep(600)",
    "in a loop": "[None for _ in itertools.count()]",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "in a library": "threading.Event().wait()",
}
PROGRAM = """
import itertools, os, re, select, signal, sys, threading, time
from pathlib import Path
from paceline.pulse import Pulse
from paceline.stacks import dump_on_signal

folder, name = Path(sys.argv[1]), sys.argv[2]
dump = dump_on_signal(folder / f"{name}.stacks")
pulse = Pulse(folder / f"{name}.pulse")

def live():
    while True:
        if select.select([sys.stdin], [], [], 0.05)[0] and os.read(0, 1):
            dump()
        pulse.beat()

def train_step(step):
    pulse.enter("compute", lane=3)
    if step == 3:
        (folder / f"{name}.ready").touch()
        STATE
    pulse.enter("update")

threading.Thread(target=live, daemon=True).start()
for step in (1, 2, 3):
    pulse.enter("load", step=step)
    train_step(step)
    pulse.enter("body")
"""


STEPS_AT = PROGRAM.splitlines().index("    train_step(step)") + 1


class Workers:
    """Processes that run a small program of a user's until they come to what they shall hang in."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack

    def start(self, name: str, state: str) -> subprocess.Popen[bytes]:
        """Returns once it is there, and stopped if that is what it does."""
        script = self.folder / f"{name}.py"
        script.write_text(PROGRAM.replace("STATE", state))
        process = self.run([sys.executable, script, self.folder, name])
        eventually((self.folder / f"{name}.ready").exists)
        if state == STATES["stopped"]:
            eventually(lambda: is_stopped(process.pid))
        return process

    def run(self, command: list[str | Path]) -> subprocess.Popen[bytes]:
        """A process that is killed at the end of the test; its input and output are pipes."""
        popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process = self._stack.enter_context(popen)
        self._stack.callback(process.kill)
        return process

    def dumping(self, rank: int, name: str, process: subprocess.Popen[bytes], *, ask: bool = True) -> Dumping:
        """``ask``: a thread of it, not by the signal at once."""
        assert process.stdin is not None
        return Dumping(
            rank=rank,
            pid=process.pid,
            path=self.folder / f"{name}.stacks",
            doing=f"it is {name}",
            ask=partial(write, process.stdin.fileno()) if ask else None,
        )

    def beat(self, name: str) -> Beat:
        beat = read_pulse(self.folder / f"{name}.pulse")
        assert beat is not None
        return beat

    def line(self, name: str) -> str:
        """Where it hangs."""
        lines = (self.folder / f"{name}.py").read_text().splitlines()
        return f"{name}.py:{2 + next(number for number, line in enumerate(lines) if 'touch()' in line)}"


def write(descriptor: int) -> None:
    os.write(descriptor, b"?")


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with ExitStack() as stack:
        yield Workers(tmp_path, stack)


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.005)


@pytest.mark.parametrize("ask", [True, False], ids=["asked", "signalled"])
@pytest.mark.parametrize("state", STATES)
def test_the_line_of_the_user_is_found_whatever_a_worker_hangs_in(workers: Workers, state: str, ask: bool) -> None:
    process = workers.start("train", STATES[state])
    text = text_of(workers, process, ask=ask)
    main = workers.beat("train").main_thread
    assert users_line(text, main) == workers.line("train")
    by_signal = not ask or state in ("stopped", "in a call that keeps the GIL")
    assert by_signal == (f"Current thread 0x{main:016x} " in text)
    assert " in live\n" in text
    assert " in train_step\n" in text
    assert process.poll() is None


def text_of(workers: Workers, process: subprocess.Popen[bytes], *, ask: bool = True) -> str:
    return collect([workers.dumping(1, "train", process, ask=ask)], 1, None)


def test_the_stacks_of_all_are_told_the_culprits_first(workers: Workers, tmp_path: Path) -> None:
    names = {rank: f"worker{rank}" for rank in range(len(STATES))}
    processes = {rank: workers.start(names[rank], state) for rank, state in enumerate(STATES.values())}
    members = [workers.dumping(rank, names[rank], process) for rank, process in processes.items()]
    into = new_file(tmp_path / "hangs", 3, 2)
    began_s = time.monotonic()
    text = collect(members, 2, into)
    assert time.monotonic() - began_s < 10
    assert into.name == "step-00000003-worker-2.txt"
    assert into.read_text() == text
    headings = [f"=== worker {rank} (process {processes[rank].pid}): it is worker{rank}" for rank in (2, 0, 1, 3, 4)]
    assert [line for line in text.splitlines() if line.startswith("===")] == headings
    assert "no more stacks" not in text
    for section in text.split("=== ")[1:]:
        assert section.count("thread 0x") + section.count("Thread 0x") == 2
        assert section.rstrip().endswith(" in <module>")
    assert users_line(text, workers.beat("worker2").main_thread) == workers.line("worker2")


def test_each_time_only_what_is_new_is_told(workers: Workers) -> None:
    process = workers.start("train", STATES["asleep"])
    for ask in (False, True):
        first, second = text_of(workers, process, ask=ask), text_of(workers, process, ask=ask)
        assert first == second
        assert first.count(" in live\n") == 1


def test_a_process_that_was_stopped_goes_on(workers: Workers) -> None:
    process = workers.start("train", STATES["stopped"])
    text_of(workers, process)
    assert process.wait(DEADLINE_S) == 0


def test_who_does_not_listen_is_not_killed_by_the_question(workers: Workers, tmp_path: Path) -> None:
    deaf = workers.run([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"])
    ended = workers.start("ended", "os._exit(3)")
    gone = workers.run(["true"])
    assert deaf.stdout is not None
    deaf.stdout.readline()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # not reaped, as the supervisor leaves it
    gone.wait()
    members = [
        Dumping(rank=0, pid=deaf.pid, path=tmp_path / "none", doing="starting"),
        workers.dumping(1, "ended", ended),
        Dumping(rank=2, pid=gone.pid, path=tmp_path / "none", doing="ending"),
    ]
    text = collect(members, 1, None)
    assert text.count("no stacks: the process has ended, or has not come far enough") == 3
    assert users_line(text, workers.beat("ended").main_thread) is None
    assert deaf.poll() is None


def test_one_that_dies_of_the_question_is_not_waited_for(workers: Workers) -> None:
    """A handler of the user's, in place of ours, that ends the process."""
    process = workers.start("train", f"signal.signal({int(STACKS_SIGNAL)}, lambda *_: os._exit(3)); time.sleep(600)")
    began_s = time.monotonic()
    assert text_of(workers, process, ask=False).endswith("\n\nno more stacks: the process has ended meanwhile\n")
    assert time.monotonic() - began_s < 2


def test_one_that_does_not_answer_is_not_waited_for_long(workers: Workers, tmp_path: Path) -> None:
    """It listens, but has the signal blocked in its only thread."""
    script = (
        "import signal, sys, time; from pathlib import Path; from paceline.stacks import STACKS_SIGNAL, dump_on_signal;"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [STACKS_SIGNAL]); dump_on_signal(Path(sys.argv[1]));"
        "print(flush=True); time.sleep(600)"
    )
    deaf = workers.run([sys.executable, "-c", script, tmp_path / "stacks"])
    assert deaf.stdout is not None
    deaf.stdout.readline()
    began_s = time.monotonic()
    text = collect([Dumping(rank=0, pid=deaf.pid, path=tmp_path / "stacks", doing="computing")], 0, None)
    assert 2 <= time.monotonic() - began_s < 5
    assert text.endswith("\n\nno more stacks: the process has not answered in 2 s\n")


class Team:
    """What a supervisor does: looks at the pulses of real processes until one hangs."""

    def __init__(self, workers: Workers, names: list[str], processes: list[subprocess.Popen[bytes]]) -> None:
        self._workers, self._names, self._processes = workers, names, processes

    def hang(self, watch: Watch) -> Hang:
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            members = [
                Watched(id=rank, rank=rank, beat=self._workers.beat(name), stopped=is_stopped(process.pid))
                for rank, (name, process) in enumerate(zip(self._names, self._processes, strict=True))
            ]
            if (hang := watch.look(members, time.monotonic())) is not None:
                return hang
            time.sleep(0.02)
        raise AssertionError("nobody is said to hang")


@pytest.mark.parametrize("state", STATES)
def test_from_the_pulse_to_the_sentence(workers: Workers, state: str) -> None:
    waits = workers.start("waits", "pulse.call('exchange'); pulse.enter('wait'); time.sleep(600)")
    hangs = workers.start("hangs", STATES[state])
    began_s = time.monotonic()
    team, watch = Team(workers, ["waits", "hangs"], [waits, hangs]), Watch(hang_after_s=1.0, timeout_s=600.0)
    hang = team.hang(watch)
    assert time.monotonic() - began_s < 1.0 + 2.0
    if state == "in a call that keeps the GIL":  # the last beat may be a moment younger than what it does
        eventually(lambda: team.hang(watch).silent)
    else:
        assert not hang.silent
    text = collect(
        [workers.dumping(0, "waits", waits), workers.dumping(1, "hangs", hangs)], hang.rank, workers.folder / "hang.txt"
    )
    told = hang.told(users_line(text, workers.beat("hangs").main_thread))
    assert (hang.rank, hang.step, hang.lane, hang.activity) == (1, 3, 3, "compute")
    assert hang.stopped == (state == "stopped")
    if state == "stopped":
        assert told == "worker 1 is stopped (SIGSTOP) in step 3, lane 3"
    else:
        line = re.escape(workers.line("hangs"))
        assert re.match(rf"worker 1 hangs in step 3, lane 3, at {line}: computing for \d\.\d s, so far ", told)


@pytest.mark.parametrize("ask", [True, False], ids=["asked", "signalled"])
def test_a_long_dump_is_told_whole(workers: Workers, ask: bool) -> None:
    """Its last line is the last of the main thread, which is the oldest."""
    many = "deep = lambda n: deep(n - 1) if n else time.sleep(600); "
    many += "[threading.Thread(target=deep, args=(80,), daemon=True).start() for _ in range(60)]; "
    process = workers.start("train", many + STATES["asleep"])
    eventually(lambda: len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 62)
    for _ in range(3):
        text = text_of(workers, process, ask=ask)
        assert text.count("hread 0x") == 62
        assert text.endswith(f'  File "{workers.folder / "train.py"}", line {STEPS_AT} in <module>\n')


def test_who_runs_is_asked_often_without_harm(workers: Workers) -> None:
    """By the signal such a process crashes after some hundred dumps: all its threads run Python code."""
    busy = "[threading.Thread(target=lambda: [int('7' * 9) for _ in itertools.count()]).start() for _ in range(3)]; "
    process = workers.start("train", busy + STATES["in a loop"])
    began_s = time.monotonic()
    dumps = 0
    while dumps < 20 or (dumps < 300 and time.monotonic() - began_s < 3):
        assert " in train_step\n" in text_of(workers, process)
        dumps += 1
    assert process.poll() is None


@pytest.mark.parametrize(("step", "name"), [(12, "step-00000012-worker-1"), (None, "step-00000000-worker-1")])
def test_a_new_file_for_each_hang(tmp_path: Path, step: int | None, name: str) -> None:
    folder = tmp_path / "hangs"
    for suffix in ("", "-2", "-3"):
        file = new_file(folder, step, 1)
        assert file == folder / f"{name}{suffix}.txt"
        collect([], 1, file)


MAIN = 0x7F8A900A6B80
LIBRARY = os.__file__


@pytest.mark.parametrize(
    ("frames", "line"),
    [
        ([LIBRARY, "/me/train.py", "/me/main.py"], "train.py:2"),
        (["/venv/lib/python3.11/site-packages/torch/nn.py", "/me/model.py"], "model.py:2"),
        (["/usr/lib/python3/dist-packages/numpy/core.py", "/me/model.py"], "model.py:2"),
        (["<frozen runpy>", dump_on_signal.__code__.co_filename, "/me/model.py"], "model.py:3"),
        ([dump_on_signal.__code__.co_filename, "<frozen runpy>"], "stacks.py:1"),
        (["/me/caf\\xe9 \\u65e5\\U0001f600.py"], "café 日\U0001f600.py:1"),
        (['/me/a", line 7 in b.py'], 'a", line 7 in b.py:1'),
        ([], None),
    ],
)
def test_the_innermost_line_of_the_user(frames: list[str], line: str | None) -> None:
    stack = [f'  File "{file}", line {number} in f' for number, file in enumerate(frames, 1)]
    other = ["Thread 0x00007f8a8f3456c0 [link] (most recent call first):", '  File "/me/other.py", line 9 in g', ""]
    main = [f"Thread 0x{MAIN:016x} (most recent call first):", *stack]
    current = [main[0].replace("Thread", "Current thread"), *stack]
    text = "\n".join(["=== worker 1 (process 7): computing", "", *other, *main, ""])
    # The other workers are forked from the same process as the culprit: their main threads' identifiers are the same.
    next_one = textwrap.dedent(f"""\
        === worker 0 (process 8): waiting

        Thread 0x{MAIN:016x} (most recent call first):
          File "/me/elsewhere.py", line 5 in f
    """)
    assert users_line(f"{text}\n{next_one}", MAIN) == line
    assert users_line("\n".join(["=== worker 1 (process 7): computing", "", *other, *current]), MAIN) == line


def test_the_signal_is_one_that_nobody_else_uses() -> None:
    assert signal.SIGRTMIN <= STACKS_SIGNAL <= signal.SIGRTMAX
    assert signal.getsignal(STACKS_SIGNAL) == signal.SIG_DFL
