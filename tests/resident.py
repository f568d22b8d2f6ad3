"""Commands in processes forked from one that has imported torch: what costs seconds of CPU each costs milliseconds.

A command is a process of its own as if its user had started it: a session, a working directory, an environment, output
in files, an exit code. Two imports are saved, its own and that of the template from which it forks its workers: the
template is forked too, and so are the workers of torchrun. What a fresh interpreter would do otherwise is little (it
hashes strings by another key), and each module of tests starts some commands anew; see `driving.start`.

Run as a program, this file is the process that commands are forked from.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paceline
from paceline import env
from paceline.supervisor.processes import Process, Template
from paceline.worker import finish

__all__ = ["Forked", "Resident"]

START_S = 300.0
"""The longest that importing everything takes."""
ALSO = (
    "cloudpickle",
    "paceline.launcher",
    "paceline.planning.command",
    "paceline.planning.fitting",
    "paceline.supervisor",
    "sklearn.datasets",
    "torch.utils.flop_counter",
)
"""What commands import beside what the template does."""


class Forked:
    """A command that was forked: what a test uses of a `subprocess.Popen`.

    Args:
        link: where the resident says the command's id, and at its end the exit code.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        link.settimeout(START_S)
        self.pid = int(self._told())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, as soon as it has ended; negative: the signal that killed it."""
        if self.returncode is None and select.select([self._link], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._told())
            self._link.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _told(self) -> bytes:
        told = self._link.recv(16)
        assert told, "the process that commands are forked from has died; look above for what it printed"
        return told


class Resident:
    """The process that commands are forked from. A context: it ends with it."""

    def __init__(self, requests: socket.socket | None = None) -> None:
        """``requests``: of one that runs already."""
        if requests is not None:
            self._requests = requests

    def __enter__(self) -> Resident:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=env.for_template(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.close()
        self._process.wait()

    def start(self, words: Sequence[str], cwd: Path, environ: Mapping[str, str], out: Path, err: Path) -> Forked:
        """A command that has started.

        Args:
            words: what stands behind ``python``: ``-m paceline`` or ``-m torch.distributed.run`` and its words, ``-c``
                and a program, or a script; and their arguments.
            cwd: where it runs.
            environ: its whole environment.
            out: the file of what it prints; made, or added to.
            err: the same for its errors.
        """
        told = [list(words), str(cwd), dict(environ), str(out.absolute()), str(err.absolute())]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, os.fdopen(os.memfd_create("request"), "w", encoding="utf-8") as request:  # of any size
            json.dump(told, request)
            request.flush()
            descriptors = [theirs.fileno(), request.fileno(), self._requests.fileno()]
            socket.send_fds(self._requests, [b"command"], descriptors)
        return Forked(ours)


class Nested(Forked):
    """A worker that torchrun has started: what torchrun uses of a `subprocess.Popen`."""

    def __init__(
        self,
        resident: Resident,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: None,
        stderr: None,
        start_new_session: bool,
    ) -> None:
        assert args[0] == sys.executable and start_new_session
        out, err = (Path(f"/proc/self/fd/{number}").readlink() for number in (1, 2))
        self.__dict__ |= resident.start(args[1:], Path.cwd(), env, out, err).__dict__

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._link], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("", timeout or 0.0)
        return super().wait()


def serve(requests: socket.socket) -> Any:
    """Forks a command for every request, until ``requests`` is closed. What each process ends with."""
    from paceline import template

    for name in ALSO:
        importlib.import_module(name)
    template._prepare()
    running: dict[int, tuple[int, int]] = {}  # by descriptor of the process: its id, and its link
    while True:
        watched: list[Any] = [requests, *running]
        ready, _, _ = select.select(watched, [], [])
        for ended in running.keys() & set(ready):
            command, link = running.pop(ended)
            _, status = os.waitpid(command, 0)
            os.write(link, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(link)
            os.close(ended)
        if requests not in ready:
            continue
        message, descriptors, *_ = socket.recv_fds(requests, 16, 3, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return 0
        link, request, again = descriptors
        command = os.fork()
        if command == 0:
            break
        running[os.pidfd_open(command)] = command, link
        os.close(request)
        os.close(again)
    requests.close()
    os.setsid()
    os.write(link, str(os.getpid()).encode())
    os.close(link)
    for descriptor, (_, others) in running.items():
        os.close(descriptor)
        os.close(others)
    return run(request, again)


def run(request: int, requests: int) -> Any:
    """A command's life. What torchrun starts is forked from the same process, to which ``requests`` lead."""
    with os.fdopen(request, encoding="utf-8") as file:
        file.seek(0)
        words, cwd, environ, out, err = json.load(file)
    os.chdir(cwd)
    for descriptor, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environ)
    if threads := environ.get("OMP_NUM_THREADS"):  # read when torch is imported
        import torch

        torch.set_num_threads(int(threads))
    sys.path[:1] = [cwd, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    if words[0] == "-u":
        del words[0]
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.argv[:] = words
    me = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    template = os.fork()
    if template == 0:
        return run_template(me, theirs)
    theirs.close()
    adopt(template, ours)
    again = socket.socket(fileno=requests)
    match words:
        case ["-m", "torch.distributed.run", *rest]:
            from torch.distributed import run as torchrun
            from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

            subprocess_handler.Popen = functools.partial(Nested, Resident(again))  # type: ignore[assignment, attr-defined]
            torchrun.main(rest)
        case ["-m", "paceline", *rest]:
            from paceline.cli import main

            sys.argv[:] = [str(Path(paceline.__file__).with_name("__main__.py")), *rest]
            again.close()
            finish(main())  # which has not imported torch, when it starts by itself
        case ["-c", program, *_]:
            again.close()
            sys.argv[:] = ["-c", *words[2:]]
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        case _:
            again.close()
            sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    return 0


def run_template(command: int, requests: socket.socket) -> int:
    """`python -m paceline.template`, as it is after its imports."""
    from paceline import template

    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != command:
        os._exit(1)
    os.closerange(3, requests.fileno())
    os.closerange(requests.fileno() + 1, 256)
    os.environ.update(env.for_template())
    sys.argv[:] = [template.__file__]
    return template.main(command, requests)


def adopt(pid: int, link: socket.socket) -> None:
    """Makes the forked template that of the command's first `Template`; should it die, the next is started as ever."""
    start_anew = Template._start

    def take(self: Template) -> None:
        Template._start = start_anew  # type: ignore[method-assign]
        self._popen = SimpleNamespace(returncode=None)  # type: ignore[assignment]
        self._process = Process(pid, link)

    Template._start = take  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1]))))
