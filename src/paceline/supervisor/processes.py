"""The processes of a run: forked from a template that has torch imported, watched, signalled and ended. No torch here.

[Note: process groups] Each process leads a process group of its own. So Ctrl-C on a terminal reaches the supervisor
alone, which hands it on once; and ending a worker ends what it started. All die with their supervisor, even when that
is killed: the kernel's parent-death signal is set before the program begins, and a supervisor that was gone by then is
noticed by its missing process id. A dead process is left unreaped until `Process.reap`, which keeps its number, and its
group's, from being given to strangers.
"""

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
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from paceline import env
from paceline.errors import PacelineError

__all__ = ["Process", "Template"]

_IMPORT_S = 300.0
"""The longest that importing torch takes, the first time and from a disk across the network."""
_ANSWER_S = 30.0
"""The longest that forking takes once it is imported: milliseconds, unless the machine is overloaded."""
_PUT_IN_ORDER_S = 1.0
"""Who shall end has this long to put things in order, such as shared memory, and to say why."""
_POLL_S = 0.01
_BOOTSTRAP = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL; survives exec
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Process:
    """A child of this process that leads a group of its own.

    Args:
        pid: its process id, also the number of its group.
        link: this side of the sockets between the two.

    Attributes:
        pidfd: readable once it has ended, for a selector.
    """

    def __init__(self, pid: int, link: socket.socket) -> None:
        self.pid, self.link = pid, link
        self.pidfd = os.pidfd_open(pid)
        self._exit_code: int | None = None
        self._reaped = False

    def ended(self) -> int | None:
        """Its exit code (negative: the signal that killed it), or ``None`` while it lives. Does not reap it."""
        if self._exit_code is None:
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                self._exit_code = _code(result)
        return self._exit_code

    def wait(self, timeout_s: float) -> int | None:
        """As `ended`, as soon as it has ended, or after ``timeout_s``."""
        if self._exit_code is None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            poll.poll(timeout_s * 1000)
        return self.ended()

    def signal(self, number: int) -> None:
        """Signals the process alone; nothing happens if it has ended."""
        if not self._reaped:
            signal.pidfd_send_signal(self.pidfd, number)

    def kill_group(self, number: int) -> None:
        """Signals the process and all it started; nothing happens if none is left."""
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def reap(self) -> int:
        """Waits for its end, ends what it leaves running in its group, closes ``pidfd`` and ``link``. Its exit code.

        Kill it before, if it shall not go on: nothing here does.
        """
        if self._reaped:
            return self._exit_code or 0
        result = os.waitid(os.P_PID, self.pid, os.WEXITED)
        assert result is not None
        self._exit_code, self._reaped = _code(result), True
        os.close(self.pidfd)
        self.link.close()
        _end_group(self.pid)
        return self._exit_code


class Template:
    """The process from which those of a run are forked, see `paceline.template`. A context: it ends with it, the forked
    ones do not.

    It imports torch beside what this process does next. If it dies, e.g. because memory ran out, it is started anew
    when it is needed: a running team goes on having replacements. To be used by one thread at a time, and to be opened
    by one that outlives it, see [Note: whose child a worker is].

    While one is open, this process is a subreaper: orphans below it, such as what a dead worker leaves running, become
    its children.
    """

    def __enter__(self) -> Template:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_subreaper())
            self._start()
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._closing:
            self._end()

    @property
    def pid(self) -> int:
        """Of the template; another one after it was started anew."""
        return self._process.pid

    @property
    def ready(self) -> bool:
        """Whether it has imported everything, so that the next process takes milliseconds."""
        try:
            return self._process.ended() is None and bool(
                self._process.link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            )
        except BlockingIOError:
            return False

    def revive(self) -> None:
        """Starts the template anew if it has died. Returns at once."""
        if self._process.ended() is not None:
            self._end()
            self._start()

    def start(self, words: Sequence[str], environ: Mapping[str, str], output: tuple[int, int] | None = None) -> Process:
        """A new worker, once it is there: this process's child, with a group of its own and signals as by default.

        Waits until the template has imported everything, see `ready`.

        Args:
            words: what it runs, as the arguments of ``python -m paceline.worker``.
            environ: its whole environment, to which the descriptor of its end of the link is added.
            output: descriptors for its standard output and error; ``None``: the template's, which are this process's.

        Raises:
            PacelineError: the template died, or did not answer, twice.
        """
        with os.fdopen(os.memfd_create("paceline-request"), "w", encoding="utf-8") as request:  # of any size
            json.dump([list(words), dict(environ)], request)
            request.flush()
            return self._fork("worker", request.fileno(), *(output or ()))

    def start_store(self, listener: socket.socket) -> Process:
        """A new process that serves a key-value store on ``listener``, for as long as its link is open.

        Args:
            listener: a listening socket on the loopback interface. The caller may close it.

        Raises:
            PacelineError: as `start`.
        """
        return self._fork("store", listener.fileno())

    def _fork(self, kind: Literal["worker", "store"], *descriptors: int) -> Process:
        for _ in range(2):
            self.revive()
            ours, theirs = _socketpair()
            with contextlib.ExitStack() as on_failure:
                on_failure.enter_context(ours)
                ours.settimeout(_ANSWER_S if self.ready else _IMPORT_S)
                with theirs, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    socket.send_fds(self._process.link, [kind.encode()], [theirs.fileno(), *descriptors])
                with contextlib.suppress(TimeoutError):
                    if told := ours.recv(16):
                        ours.settimeout(None)
                        process = Process(int(told), ours)
                        on_failure.pop_all()
                        return process
            self._process.wait(_PUT_IN_ORDER_S)  # it may be about to end by itself, and to say why
            found = self._end()
        raise PacelineError(
            f"cannot start a {kind}",
            found=f"no answer, twice, from the process that it is forked from; that one's exit code: {found}",
            needed="one that imports torch and answers",
            fix="Look above for what it printed; is there memory left?",
        )

    def _start(self) -> None:
        me, (ours, theirs) = str(os.getpid()), _socketpair()
        with contextlib.ExitStack() as on_failure, theirs:
            on_failure.enter_context(ours)
            command = [sys.executable, "-m", "paceline.template", me, str(theirs.fileno())]
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, me, *command],
                process_group=0,
                stdin=subprocess.DEVNULL,
                env=env.for_template(),
                pass_fds=[theirs.fileno()],
            )
            self._process = Process(self._popen.pid, ours)
            on_failure.pop_all()

    def _end(self) -> int:
        self._process.kill_group(signal.SIGKILL)
        self._popen.returncode = self._process.reap()  # or it would want to wait for it too
        return self._popen.returncode


def _socketpair() -> tuple[socket.socket, socket.socket]:
    """Of messages, which arrive whole or not at all."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _code(result: os.waitid_result) -> int:
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _end_group(group: int) -> None:
    """Ends, and reaps, what a reaped process left running in its group."""
    deadline = time.monotonic() + _PUT_IN_ORDER_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        while time.monotonic() < deadline:
            _reap_group(group, os.WNOHANG)
            os.killpg(group, 0)
            time.sleep(_POLL_S)
        os.killpg(group, signal.SIGKILL)
        _reap_group(group, 0)


def _reap_group(group: int, options: int) -> None:
    """Orphans of the group are children of this process if it was a subreaper when they lost their parent."""
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_PGID, group, os.WEXITED | options) is not None:
            pass


_open_templates = 0
_was_subreaper = 0
_counting = threading.Lock()
"""The flag belongs to the process, and so does the count of those that need it."""


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Makes this process a subreaper: the kernel gives it the orphans among its descendants."""
    global _open_templates, _was_subreaper
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    with _counting:
        if _open_templates == 0:
            before = ctypes.c_int()
            prctl(37, ctypes.byref(before), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
            _was_subreaper = before.value
            prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        _open_templates += 1
    try:
        yield
    finally:
        with _counting:
            _open_templates -= 1
            if _open_templates == 0:
                prctl(36, _was_subreaper, 0, 0, 0)
