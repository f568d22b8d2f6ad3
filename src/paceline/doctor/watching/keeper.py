"""A process beside the ranks that ends them, and all that they have started, if the doctor itself is killed.

python keeper.py LINK RUN_ID HOME      started by `watching.ranks` alone, as a file: it imports nothing of Paceline
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["end_all_of", "main"]

_POLL_S = 0.01
_PATIENCE_S = 5.0
"""A killed process has ended by then, unless it waits for a disk."""


def main(link: socket.socket, run_id: str, home: Path) -> int:
    """Waits until the other end of ``link`` is closed.

    Each message on the link is a process group; ``done`` means that all have been ended already. Else they are killed:
    a rank dies with the doctor, but what it has started itself does not; and ``home``, the folder of the run, is
    removed.
    """
    groups: list[int] = []
    while message := link.recv(64):
        if message == b"done":
            return 0
        groups.append(int(message))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    end_all_of(run_id)
    shutil.rmtree(home, ignore_errors=True)
    return 0


def end_all_of(run_id: str) -> None:
    """Kills the processes that a run's ranks have started, whatever group or session they have put themselves into: the
    run's id is in the environment that they were given. What they start meanwhile is ended too."""
    deadline_s, without = time.monotonic() + _PATIENCE_S, 0
    while (
        without < 2 and time.monotonic() < deadline_s
    ):  # one that is just beginning shows its environment a moment later
        without = 0 if _kill_marked(f"TORCHELASTIC_RUN_ID={run_id}".encode()) else without + 1
        time.sleep(_POLL_S)


def _kill_marked(mark: bytes) -> bool:
    """Whether there was any."""
    found = False
    for pid, pidfd in _processes():
        with contextlib.suppress(OSError):  # another user's, or ended meanwhile
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found = True
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    return found


def _processes() -> Iterator[tuple[int, int]]:
    """Process ids, each with a descriptor that means the same process even if the number is given to another one."""
    for name in (path.name for path in Path("/proc").iterdir()):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(int(name))
                try:
                    yield int(name), pidfd
                finally:
                    os.close(pidfd)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], Path(sys.argv[3])))
