"""A process beside the ranks: serves the store in which they meet, and ends them if the doctor itself is killed.

python -m paceline.doctor.watching.store LINK LISTENER      started by `watching.ranks` alone
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys

__all__ = ["main"]


def main(link: socket.socket, listener: socket.socket) -> int:
    """Serves on ``listener`` until the other end of ``link`` is closed.

    Each message on the link is a process group; ``done`` means that all have been ended already. Else they are killed:
    a rank dies with the doctor, but what it has started itself does not.
    """
    dist = importlib.import_module("torch.distributed")
    host, port = listener.getsockname()
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    groups: list[int] = []
    while message := link.recv(64):
        if message == b"done":
            break
        groups.append(int(message))
    else:
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
    del store
    return 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(main(socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2]))))
