"""The store in which the ranks meet, in a process of its own: forked from the rank that has imported torch first.

[Note: why it is forked] torchrun's agent serves the store, and goes on when ranks end; so does this. But importing
torch takes seconds of a core, and that rank has just done it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import NoReturn

__all__ = ["FAILED", "serve_once"]

FAILED = "store-failed"
"""File of the run in which it is said why there is no store."""
_CLAIMED = "store-served"


def serve_once(listener: int, home: Path) -> None:
    """Starts the store's process, unless another rank has. To be called when torch is imported.

    That process is no child of this one, so that nobody who waits for children meets it, and does not end with it.

    Args:
        listener: descriptor of the socket at which it listens; closed here.
        home: folder of the run.
    """
    try:
        os.close(os.open(home / _CLAIMED, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        with warnings.catch_warnings():  # that there are threads: none holds what is needed there
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            _begin(listener, home)
        with contextlib.suppress(ChildProcessError):  # of scripts that let the kernel reap theirs
            os.waitpid(child, 0)
    except FileExistsError:
        pass
    except OSError as error:
        _tell_failure(home, error)
    finally:
        os.close(listener)  # so that nobody waits there if there is no store


def _begin(listener: int, home: Path) -> NoReturn:
    """In a child, which ends at once: it is its own child that goes on."""
    try:
        if os.fork() == 0:
            _serve(listener)
    except BaseException as error:
        _tell_failure(home, error)
    finally:
        os._exit(0)


def _serve(listener: int) -> None:
    """Until it is killed, with all that belong to the run."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _close_all_but(listener)
    with socket.socket(fileno=os.dup(listener)) as listening:
        host, port = listening.getsockname()
    store = sys.modules["torch.distributed"].TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener
    )
    while store is not None:
        signal.pause()


def _tell_failure(home: Path, error: BaseException) -> None:
    (home / FAILED).write_text(f"{type(error).__name__}: {error}")


def _close_all_but(kept: int) -> None:
    """What it has from the rank: the ends of its pipes, which shall be seen to end with it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor != kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)
