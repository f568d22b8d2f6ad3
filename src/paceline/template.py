"""The process that workers are forked from: it has imported what they need, so that a new one is ready in milliseconds.

    python -m paceline.template SUPERVISOR DESCRIPTOR      started by `paceline.supervisor.processes.Template` alone

Importing torch and its compiler takes seconds of CPU for each process, and whoever replaces a lost worker should not
wait for it. Nothing in here may compute on several threads: after a parallel region of OpenMP the next one in a forked
child would hang. Nor may it ask for a GPU: CUDA does not outlive a fork.

[Note: whose child a worker is] The template forks twice. The child between ends at once, and its own child goes to the
nearest subreaper above, which is the supervisor: so the supervisor can wait for each worker, and the kernel ends each
worker with it (PR_SET_PDEATHSIG). That signal comes with the death of the parent *thread*, not process; an orphan goes
to the first live thread of a subreaper, the main one, whichever thread has asked for the worker. The template itself is
the child of the thread that started it.

[Note: who speaks first] A new process says its own id on its link, as the first message, once all that the supervisor
relies on is so: it is the supervisor's child and dies with it, leads a group of its own, and hears signals. If the link
ends without, there is no new process. What fails later is the end of a process that the supervisor knows.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import warnings
from typing import NoReturn

from paceline import env, worker

__all__ = ["main"]

_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGTSTP)
"""Meant for workers. Whoever signals all processes of a job would end what lost workers are replaced from."""
_PRELOADED = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.nn.functional",
    "torch._dynamo",  # every optimizer imports it
    "paceline.run",
    "paceline.train",
)


def main(supervisor: int, requests: socket.socket) -> int:
    """Forks a process for every request, until ``requests`` is closed. Returns an exit code: its own, or in the forked
    process that one's.

    Args:
        supervisor: process id of who asks, and whose children the forked processes become.
        requests: each message is the kind of process, ``worker`` or ``store``, with descriptors: the process's end of
            its link, and for a worker a file with its words and environment as JSON, for a store its listening socket.
            Two more are a worker's standard output and error, if they are not the template's. The template says
            ``ready`` there when the first can be answered.
    """
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    _prepare()
    requests.send(b"ready")
    while True:
        try:
            kind, descriptors, *_ = socket.recv_fds(requests, 16, 4, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # closed by who had not read that this one was ready
            return 0
        if not kind:
            return 0
        if _fork_for(supervisor):
            break
        for descriptor in descriptors:
            os.close(descriptor)
    requests.close()
    link, descriptor, *output = descriptors
    for standard, file in enumerate(output, start=1):
        os.dup2(file, standard)
        os.close(file)
    if kind == b"worker":
        for number in _DEAF_TO:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        os.write(link, str(os.getpid()).encode())
    except BrokenPipeError:  # nobody waits for it any more
        return 1
    if kind == b"store":
        _host_store(link, descriptor)
    return _work(link, descriptor)


def _prepare() -> None:
    """All that every worker would have to do again."""
    for name in _PRELOADED:
        importlib.import_module(name)
    from paceline.determinism import resolve_kernels

    resolve_kernels()
    # Groups of torch.distributed that a worker has left may still be in reference cycles, and a process that it forks,
    # such as for loading data, must not be the one to destroy them: their threads are not there.
    os.register_at_fork(after_in_child=gc.freeze)
    gc.collect()
    gc.freeze()  # else the first collection in each worker would write to, and so copy, all memory that it shares


def _work(link: int, request: int) -> int:
    """The life of a worker, as `python -m paceline.worker WORDS` would live it in that environment."""
    from paceline.determinism import forget_inherited_randomness

    with os.fdopen(request, encoding="utf-8") as file:
        file.seek(0)  # the place in it is shared with who wrote it
        words, environ = json.load(file)
    env.become(environ, link=link)
    forget_inherited_randomness()
    sys.argv[1:] = words
    return worker.main(words)


def _host_store(link: int, listener: int) -> NoReturn:
    """Serves the key-value store in which workers meet, until the supervisor closes the link."""
    import torch.distributed as dist

    with socket.socket(fileno=listener) as listening:
        host, port = listening.getsockname()
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    os.read(link, 1)
    del store
    worker.end(0)


def _fork_for(supervisor: int) -> bool:
    """Whether this is the new process: a child of the supervisor, that leads its group and dies with the supervisor."""
    between = _fork()
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    if _fork():
        os._exit(0)
    os.setpgid(0, 0)
    while os.getppid() == between:
        time.sleep(0.0002)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != supervisor:  # gone before that
        os._exit(1)
    return True


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads, which may hold locks. Here they are OpenBLAS's, started when numpy
        # is imported, and OpenBLAS ends and renews them around a fork by itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))))
