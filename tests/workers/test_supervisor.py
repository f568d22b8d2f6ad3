"""The supervisor with real processes: who is told what, which exit code comes out, and that nobody stays behind."""

from __future__ import annotations

import functools
import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from paceline import env, supervisor
from paceline.config import Execution, Recipe
from paceline.errors import ConfigError
from paceline.run_dir import prepare_run_dir
from paceline.supervisor import Template, processes, resolve_workers, supervision
from paceline.worker import report
from resident import Forked, Resident

DEADLINE_S = 60.0
"""Tens of times what anything here takes, so that only what hangs runs into it, also on a busy machine."""
PROLOGUE = """
import os, signal, sys, time
from pathlib import Path
from paceline import env, supervisor
from paceline.errors import ConfigError, TeamError
from paceline.worker import report

here = env.read()
rank = here.rank
folder = Path(__file__).parent

def ready():
    (folder / f"ready-{rank}").write_text(str(os.getpid()))

def fail(error):
    try:
        raise error
    except Exception as raised:
        os._exit(report(here.report_dir, rank, raised))

def hang():
    ready()
    while True:
        time.sleep(60)
"""


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert left == []


@pytest.fixture(scope="module", autouse=True)
def template() -> Iterator[Template]:
    """One for all tests: it takes seconds to import torch."""
    with Template() as open_template:
        yield open_template


@pytest.fixture
def supervise(template: Template) -> Callable[..., int]:
    return functools.partial(supervisor.supervise, template=template)


def worker(folder: Path, body: str) -> list[str]:
    """What runs ``body`` in each worker."""
    script = folder / "worker.py"
    script.write_text(PROLOGUE + textwrap.dedent(body))
    return ["script", str(script)]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def pids(folder: Path, workers: int) -> list[int]:
    """The process ids of the workers, once all are ready."""

    def written() -> list[str]:
        return [path.read_text() for path in folder.glob("ready-*")]

    until(lambda: sum(bool(text) for text in written()) == workers)
    return [int(text) for text in written()]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


Start = Callable[[list[str], int], Forked]


def program(command: list[str], workers: int) -> str:
    return f"import sys; from paceline.supervisor import supervise; sys.exit(supervise({command!r}, {workers}))"


@pytest.fixture
def start(resident: Resident, tmp_path: Path) -> Start:
    """Starts a supervisor in a process of its own."""
    out, err = tmp_path / "out", tmp_path / "err"
    return lambda command, workers: resident.start(["-c", program(command, workers)], tmp_path, os.environ, out, err)


def end(process: Forked, folder: Path) -> tuple[int, str]:
    """Its exit code, and what it has printed to standard error."""
    until(lambda: process.poll() is not None)
    return process.wait(), (folder / "err").read_text()


def test_every_worker_knows_its_place_and_finds_the_store(tmp_path: Path, supervise: Callable[..., int]) -> None:
    command = worker(
        tmp_path,
        """
        import socket
        socket.create_connection((here.master_addr, here.master_port), timeout=5).close()
        (folder / f"place-{rank}").write_text(f"{here.rank} {here.world_size} {here.local_rank} {here.store_hosted}")
        """,
    )
    assert supervise(command, 3, record=tmp_path / "workers.json") == 0
    assert [(tmp_path / f"place-{rank}").read_text() for rank in range(3)] == [f"{r} 3 {r} True" for r in range(3)]
    told = json.loads((tmp_path / "workers.json").read_text())
    assert told["generation"] == 0 and [entry["rank"] for entry in told["workers"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("codes", "whole"), [([0, 0], 0), ([75, 75], 75), ([130, 130], 130), ([0, 3], 1), ([75, 2], 1)]
)
def test_exit_codes(tmp_path: Path, codes: list[int], whole: int, supervise: Callable[..., int]) -> None:
    assert supervise(worker(tmp_path, f"sys.exit({codes}[rank])"), 2) == whole


def test_the_first_failure_is_shown_and_its_echoes_are_folded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], supervise: Callable[..., int]
) -> None:
    command = worker(
        tmp_path,
        """
        if rank == 2:
            ready()
            fail(ZeroDivisionError("in the user's code"))
        while not (folder / "ready-2").exists():
            time.sleep(0.01)
        fail(TeamError("worker 2 is gone"))
        """,
    )
    assert supervise(command, 4) == 1
    err = capfd.readouterr().err
    assert err.count("Traceback") == 1 and "ZeroDivisionError: in the user's code" in err
    assert "worker 2 failed" in err and "3 other workers ended because of it" in err
    assert "is gone" not in err


def test_one_mistake_of_all_is_told_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], supervise: Callable[..., int]
) -> None:
    command = worker(tmp_path, 'fail(ConfigError("cannot start", found="x=1", needed="x=2", fix="Write x: 2"))')
    assert supervise(command, 2) == 2
    err = capfd.readouterr().err
    assert err.count("cannot start: found x=1, need x=2. Write x: 2.") == 1
    assert "Traceback" not in err


def test_two_different_failures_are_both_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], supervise: Callable[..., int]
) -> None:
    command = worker(
        tmp_path,
        """
        if rank == 1:
            while not (here.report_dir / "worker-0.json").exists():
                time.sleep(0.01)
        fail(ValueError(f"mine is {rank}"))
        """,
    )
    assert supervise(command, 2) == 1
    err = capfd.readouterr().err
    assert err.count("Traceback") == 1
    assert "worker 0 failed:" in err and "worker 1 failed too: ValueError: mine is 1" in err


def test_workers_that_wait_for_ever_end_with_the_first_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], supervise: Callable[..., int]
) -> None:
    monkeypatch.setattr(supervision, "_GRACE_S", 0.2)
    command = worker(
        tmp_path,
        """
        if rank == 1:
            fail(ValueError("mine"))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        hang()
        """,
    )
    begun = time.monotonic()
    assert supervise(command, 3) == 1
    assert time.monotonic() - begun < 5
    assert "2 other workers ended because of it" in capfd.readouterr().err


def test_a_killed_worker_is_told_in_four_beats(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], supervise: Callable[..., int]
) -> None:
    command = worker(
        tmp_path,
        """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        fail(TeamError("a peer is gone"))
        """,
    )
    assert supervise(command, 2) == 1
    err = capfd.readouterr().err
    assert "worker 1 was killed: found SIGKILL" in err and "dmesg" in err and "1 other worker ended" in err
    assert "Traceback" not in err


def test_a_program_that_is_not_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], supervise: Callable[..., int]
) -> None:
    assert supervise(["script", str(tmp_path / "nothing.py")], 1) == 1
    assert "FileNotFoundError" in capfd.readouterr().err


def test_what_a_worker_started_ends_with_it(tmp_path: Path, supervise: Callable[..., int]) -> None:
    command = worker(
        tmp_path,
        """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / f"child-{rank}").write_text(str(child.pid))
        sys.exit(rank)
        """,
    )
    assert supervise(command, 2) == 1
    children = [int((tmp_path / f"child-{rank}").read_text()) for rank in range(2)]
    until(lambda: all(gone(child) for child in children))


def test_workers_die_with_a_killed_supervisor(tmp_path: Path, start: Start) -> None:
    before = set(psutil.Process().children())
    process = start(worker(tmp_path, "hang()"), 2)
    workers = pids(tmp_path, 2)
    process.send_signal(signal.SIGKILL)
    end(process, tmp_path)
    until(lambda: all(gone(pid) for pid in workers))

    def orphans_ended() -> bool:  # the tests' template makes this process a subreaper: they come to it
        orphans = set(psutil.Process().children()) - before
        for orphan in orphans:
            if orphan.status() == psutil.STATUS_ZOMBIE:
                orphan.wait()
        return not orphans

    until(orphans_ended)  # the killed supervisor's own template too, which ends in its own time


def test_a_worker_without_its_supervisor_does_not_begin(tmp_path: Path) -> None:
    words = [sys.executable, "-c", processes._BOOTSTRAP, "1", sys.executable, "-c", "print('begun')"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (found.returncode, found.stdout) == (1, "")


COUNTING = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
ready()
number = signal.sigwait([signal.SIGINT, signal.SIGTERM])
time.sleep(0.2)  # for a second one, which must not come
extra = signal.sigpending()
sys.exit(99 if extra else {signal.SIGINT: 130, signal.SIGTERM: 75}[number])
"""


@pytest.mark.parametrize(
    ("number", "workers", "code"), [(signal.SIGINT, 2, 130), (signal.SIGTERM, 1, 75), (signal.SIGHUP, 1, 75)]
)
def test_a_signal_is_handed_on_once(
    tmp_path: Path, start: Start, number: signal.Signals, workers: int, code: int
) -> None:
    process = start(worker(tmp_path, COUNTING), workers)
    pids(tmp_path, workers)
    process.send_signal(number)
    assert end(process, tmp_path) == (code, "")


def test_ctrl_c_on_a_terminal_reaches_each_worker_once(tmp_path: Path) -> None:
    command = worker(tmp_path, COUNTING)
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", program(command, 1)])
    try:
        pids(tmp_path, 1)
        os.write(terminal, b"\x03")
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 130
    finally:
        os.close(terminal)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)], ids=lambda value: str(value))
def test_a_worker_that_a_signal_ends_before_it_can_answer(
    tmp_path: Path, start: Start, number: signal.Signals, code: int
) -> None:
    process = start(worker(tmp_path, "signal.signal(signal.SIGINT, signal.SIG_DFL); hang()"), 1)
    pids(tmp_path, 1)
    process.send_signal(number)
    assert end(process, tmp_path) == (code, "")


def test_ctrl_z_stops_and_continues_all(tmp_path: Path, start: Start) -> None:
    process = start(worker(tmp_path, COUNTING), 1)
    (pid,) = pids(tmp_path, 1)
    process.send_signal(signal.SIGTSTP)
    until(lambda: {psutil.Process(p).status() for p in (pid, process.pid)} == {psutil.STATUS_STOPPED})
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    assert end(process, tmp_path) == (75, "")


def test_outside_of_the_main_thread(tmp_path: Path, supervise: Callable[..., int]) -> None:
    codes: list[int] = []
    command = worker(tmp_path, "sys.exit(75)")
    thread = threading.Thread(target=lambda: codes.append(supervise(command, 1)))
    thread.start()
    thread.join(DEADLINE_S)
    assert codes == [75]


def test_handlers_are_as_before(tmp_path: Path, supervise: Callable[..., int]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)]
    supervise(worker(tmp_path, ""), 1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)] == before


def test_a_report_under_another_launcher_goes_to_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert report(None, 1, ConfigError("cannot start", fix="Write x")) == 2
    assert report(None, 1, ValueError("x")) == 1
    err = capsys.readouterr().err
    assert "worker 1: error: cannot start" in err and "ValueError: x" in err


def test_a_new_run_directory_is_made(tmp_path: Path) -> None:
    prepare_run_dir(tmp_path / "a" / "b", "never")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    prepare_run_dir(tmp_path / "a" / "b", "auto")


def test_what_a_failed_start_left_behind_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "workers.json").write_text("{}")
    (tmp_path / "events.jsonl").touch()
    prepare_run_dir(tmp_path, "never")


def test_an_existing_run_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("x")
    with pytest.raises(ConfigError, match=r"config\.yaml there.*--resume.*--run-dir"):
        prepare_run_dir(tmp_path, "never")
    prepare_run_dir(tmp_path, "auto")
    with pytest.raises(ConfigError, match="no checkpoint"):
        prepare_run_dir(tmp_path, "must")
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    prepare_run_dir(tmp_path, "must")


def test_a_run_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing")):
        with pytest.raises(ConfigError, match="--run-dir"):
            prepare_run_dir(path, "auto")


def test_how_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(steps=1, device="cpu", lanes=8)
    assert resolve_workers(recipe, Execution(workers=3)) == 3
    for cores, workers in [(1, 1), (2, 1), (4, 2), (64, 8)]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert resolve_workers(recipe, Execution()) == workers


def test_a_test_that_runs_as_a_worker_would_prove_nothing() -> None:
    assert env.read() is None
