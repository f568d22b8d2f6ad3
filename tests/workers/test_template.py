"""Workers forked from a template, with real processes: what they find, how their end is seen, what stays: nothing."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.supervisor import processes
from paceline.supervisor.processes import Process, Template

DEADLINE_S = 60.0
PROLOGUE = """
import sys
torch_was_there = "torch" in sys.modules
import json, os, signal, socket, time
from pathlib import Path

def tell(**facts):
    temporary = Path(sys.argv[1] + ".part")
    temporary.write_text(json.dumps(facts))
    temporary.rename(sys.argv[1])
"""


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with Template() as opened:
        until(lambda: opened.ready)
        yield opened


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


class Worker:
    """A process that runs ``body``, in which ``tell(...)`` hands facts to the test."""

    def __init__(self, template: Template, folder: Path, body: str, **environ: str) -> None:
        self.facts_file = folder / f"facts-{len(list(folder.iterdir()))}"
        script = self.facts_file.with_suffix(".py")
        script.write_text(PROLOGUE + textwrap.dedent(body))
        self.process = template.start(["script", str(script), str(self.facts_file)], environ)

    def told(self) -> dict[str, Any]:
        until(self.facts_file.exists)
        facts: dict[str, Any] = json.loads(self.facts_file.read_text())
        return facts

    def end(self) -> int:
        """Its exit code, by itself."""
        assert self.process.wait(DEADLINE_S) is not None
        return self.process.reap()


def kill(process: Process) -> int:
    process.kill_group(signal.SIGKILL)
    return process.reap()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_subreaper() -> bool:
    flag = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(flag), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    return bool(flag.value)


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def test_a_worker_finds_torch_imported_and_what_it_was_given_and_nothing_else(
    template: Template, tmp_path: Path
) -> None:
    worker = Worker(
        template,
        tmp_path,
        """
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        handlers = [signal.getsignal(getattr(signal, name)) for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGTSTP")]
        descriptors = {fd for fd in range(100) if os.path.exists(f"/proc/self/fd/{fd}")}
        tell(
            torch=torch_was_there, dynamo="torch._dynamo" in sys.modules, environ=dict(os.environ), argv=sys.argv[2:],
            path=sys.path[0], pid=os.getpid(), group=os.getpgid(0), parent=os.getppid(), stdin=sys.stdin.read(),
            interrupted=signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            default=not blocked and set(handlers) == {signal.SIG_DFL}, descriptors=sorted(descriptors),
        )
        """,
        NAME="ä \udcff",
        LARGE="x" * 500_000,  # more than fits into one message between processes
    )
    told = worker.told()
    link = told["environ"].pop("PACELINE_LINK_FD")
    assert told["torch"] and told["dynamo"]
    assert told["environ"] == {"NAME": "ä \udcff", "LARGE": "x" * 500_000}
    assert told["argv"] == [] and told["path"] == str(tmp_path)
    assert told["pid"] == told["group"] == worker.process.pid
    assert told["parent"] == os.getpid()
    assert told["stdin"] == ""
    assert told["interrupted"] and told["default"]
    assert told["descriptors"] == sorted({0, 1, 2, int(link)})
    assert worker.end() == 0


def test_a_worker_leads_its_group_before_it_does_anything(template: Template, tmp_path: Path) -> None:
    started = [Worker(template, tmp_path, "time.sleep(60)") for _ in range(4)]
    assert [os.getpgid(worker.process.pid) for worker in started] == [worker.process.pid for worker in started]
    assert [kill(worker.process) for worker in started] == [-signal.SIGKILL] * 4


def test_the_link_carries_messages_both_ways_and_ends_with_the_worker(template: Template, tmp_path: Path) -> None:
    worker = Worker(
        template,
        tmp_path,
        """
        link = socket.socket(fileno=int(os.environ["PACELINE_LINK_FD"]))
        link.send(b"one")
        link.send(link.recv(100).upper())
        """,
    )
    worker.process.link.settimeout(DEADLINE_S)
    worker.process.link.send(b"two")
    assert [worker.process.link.recv(100) for _ in range(3)] == [b"one", b"TWO", b""]
    assert worker.end() == 0


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.abort()", -signal.SIGABRT),
    ],
)
def test_how_it_ended_is_seen_and_seen_again_before_it_is_reaped(
    template: Template, tmp_path: Path, body: str, code: int
) -> None:
    process = Worker(template, tmp_path, body).process
    ended, _, _ = select.select([process.pidfd], [], [], DEADLINE_S)
    assert ended == [process.pidfd]
    assert process.ended() == process.ended() == code
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    process.signal(signal.SIGTERM)  # to nobody
    assert process.reap() == process.reap() == process.ended() == code
    process.signal(signal.SIGTERM)
    process.kill_group(signal.SIGTERM)
    assert not psutil.pid_exists(process.pid)


def test_it_ends_as_an_interpreter_does(template: Template, tmp_path: Path) -> None:
    worker = Worker(template, tmp_path, "import atexit; atexit.register(lambda: tell(exit='handled'))")
    assert worker.end() == 0
    assert worker.told() == {"exit": "handled"}


def test_signals_reach_the_worker_alone_or_its_group(template: Template, tmp_path: Path) -> None:
    body = """
    import subprocess
    child = subprocess.Popen(["sleep", "60"])
    signal.signal(signal.SIGUSR1, lambda *_: tell(heard=True, child=child.pid, alive=child.poll() is None))
    tell(child=child.pid)
    while True:
        time.sleep(0.01)
    """
    worker = Worker(template, tmp_path, body)
    child = worker.told()["child"]
    worker.process.signal(signal.SIGUSR1)
    until(lambda: worker.told().get("heard") is True)
    assert worker.told()["alive"]
    worker.process.kill_group(signal.SIGKILL)
    until(lambda: gone(child))
    assert worker.process.reap() == -signal.SIGKILL
    assert not psutil.pid_exists(child)  # an orphan, reaped too


@pytest.mark.parametrize("wayward", [False, True])
def test_what_a_worker_leaves_running_ends_with_it(template: Template, tmp_path: Path, wayward: bool) -> None:
    command = ["sh", "-c", "trap '' TERM; echo; while true; do sleep 0.1; done"] if wayward else ["sleep", "60"]
    wait = "child.stdout.readline()" if wayward else ""
    worker = Worker(
        template,
        tmp_path,
        f"""
        import subprocess
        child = subprocess.Popen({command}, stdout=subprocess.PIPE)
        {wait}
        tell(child=child.pid)
        os._exit(0)
        """,
    )
    child = worker.told()["child"]
    assert worker.end() == 0
    assert not psutil.pid_exists(child)


def test_what_it_prints_goes_where_it_is_told_to(template: Template, tmp_path: Path) -> None:
    script = tmp_path / "prints.py"
    script.write_text("import os, sys; print('said'); print('wrong', file=sys.stderr); os.system('echo so too')")
    before = descriptors()
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        process = template.start(["script", str(script)], dict(os.environ), (out.fileno(), err.fileno()))
    assert process.wait(DEADLINE_S) == process.reap() == 0
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["said", "so too"]
    assert (tmp_path / "err").read_text() == "wrong\n"
    assert descriptors() == before


def test_workers_draw_different_random_numbers(template: Template, tmp_path: Path) -> None:
    body = "import random, numpy; tell(drawn=[int(numpy.random.randint(2**31)), random.getrandbits(31)])"
    workers = [Worker(template, tmp_path, body) for _ in range(2)]
    (one, one_too), (other, other_too) = (worker.told()["drawn"] for worker in workers)
    assert one != other and one_too != other_too
    assert [worker.end() for worker in workers] == [0, 0]


def test_training_gives_the_bits_of_a_process_of_its_own(template: Template, tmp_path: Path) -> None:
    """Several times: without `resolve_kernels`, one in fifteen differs."""
    body = """
    import torch
    from paceline.determinism import configure_process, digest
    configure_process(threads=2, device=torch.device("cpu"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Dropout(), torch.nn.GELU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(128, 256)).square().sum().backward()
        optimizer.step()
    tell(digest=digest(model.state_dict()))
    """
    alone = tmp_path / "alone.py"
    alone.write_text(PROLOGUE + textwrap.dedent(body))
    subprocess.run([sys.executable, alone, tmp_path / "alone"], check=True, timeout=DEADLINE_S)
    forked = []
    for _ in range(6):
        worker = Worker(template, tmp_path, body)
        assert worker.end() == 0
        forked.append(worker.told())
    assert forked == [json.loads((tmp_path / "alone").read_text())] * 6


def test_the_store_serves_on_the_loopback_interface_only_and_ends_with_its_link(template: Template) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        process = template.start_store(listener)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        process.signal(number)
    store, other = (dist.TCPStore("127.0.0.1", port, wait_for_workers=False) for _ in range(2))  # type: ignore[attr-defined]
    store.set("key", "value")
    assert other.get("key") == b"value"
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    listening = [fields[1] for fields in lines if fields[1].endswith(f":{port:04X}") and fields[3] == "0A"]
    assert listening == [f"0100007F:{port:04X}"]
    assert process.ended() is None
    del store, other
    process.link.close()
    assert process.wait(DEADLINE_S) == process.reap() == 0


def test_signals_meant_for_workers_do_not_end_the_template(template: Template, tmp_path: Path) -> None:
    pid = template.pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGTSTP):
        os.kill(pid, number)
    assert Worker(template, tmp_path, "").end() == 0
    assert template.pid == pid


def test_a_template_that_was_killed_or_hangs_is_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Template() as template:
        first = template.pid
        os.kill(first, signal.SIGKILL)  # while it imports
        worker = Worker(template, tmp_path, "time.sleep(60)")
        second = template.pid
        assert second != first and template.ready
        os.kill(second, signal.SIGKILL)  # noticed before anybody asks for a worker
        until(lambda: gone(second))
        assert not template.ready
        template.revive()
        template.revive()
        until(lambda: template.ready)
        third = template.pid
        os.kill(third, signal.SIGSTOP)
        monkeypatch.setattr(processes, "_ANSWER_S", 0.5)
        assert Worker(template, tmp_path, "").end() == 0
        assert len({first, second, third, template.pid}) == 4
        assert worker.process.wait(0.1) is None  # workers do not mind
        assert kill(worker.process) == -signal.SIGKILL


def test_a_template_that_cannot_be_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    before = descriptors()
    with Template() as template, pytest.raises(PacelineError, match=r"cannot start a worker: found .* exit code: 1"):
        template.start(["script", "x.py"], {})
    assert descriptors() == before
    assert capfd.readouterr().err.count("ImportError: broken") == 2


def test_nothing_is_left_and_the_process_is_no_subreaper_any_more(tmp_path: Path) -> None:
    was_subreaper, before = is_subreaper(), descriptors()  # another template of this module may be open
    with Template() as template:
        with Template() as other:
            assert is_subreaper()
            pids = [template.pid, other.pid]
        assert is_subreaper()
        workers = [Worker(template, tmp_path, "") for _ in range(2)]
        assert [worker.end() for worker in workers] == [0, 0]
    assert is_subreaper() == was_subreaper
    assert descriptors() == before
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    (tmp_path / "sleep.py").write_text("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()")
    code = f"""
import socket, time
from paceline.supervisor.processes import Template
with Template() as template:
    store = template.start_store(socket.create_server(("127.0.0.1", 0)))
    workers = [template.start(["script", {str(tmp_path / "sleep.py")!r}], {{}}) for _ in range(2)]
    print(template.pid, store.pid, *(worker.pid for worker in workers), flush=True)
    time.sleep(60)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(word) for word in supervisor.stdout.readline().split()]
        assert len(pids) == 4 and not any(gone(pid) for pid in pids)
        supervisor.kill()
        assert supervisor.wait() == -signal.SIGKILL
        until(lambda: all(gone(pid) for pid in pids))
        assert supervisor.stdout.read() == ""  # they die silently
    for pid in pids:
        with contextlib.suppress(ChildProcessError):  # beside another template of this module they came to this process
            os.waitpid(pid, 0)


def test_a_template_ends_when_nobody_can_ask_it_any_more(capfd: pytest.CaptureFixture[str]) -> None:
    with Template() as template:
        until(lambda: template.ready)
        template._process.link.close()
        assert template._process.wait(DEADLINE_S) == 0
    assert capfd.readouterr().err == ""
