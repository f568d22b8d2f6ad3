"""The sockets of this process, to cut those of a group.

[Note: why sockets are cut] After a loss a worker may wait for one that lives and waits itself. gloo's own abort does
not end a collective that waits, and destroying a group blocks while one does. A connection that is shut down ends the
wait on both of its ends at once, from whatever thread, also while copies of the socket live on in forked processes.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

__all__ = ["cut", "open_sockets"]

_LOOPBACK = ("127.", "::1", "::ffff:127.")


def open_sockets() -> dict[int, str]:
    """Each socket's descriptor, and what the kernel calls it: descriptors are given again to others."""
    sockets = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            link = str(descriptor.readlink())
            if link.startswith("socket:"):
                sockets[int(descriptor.name)] = link
    return sockets


def cut(sockets: Mapping[int, str]) -> None:
    """Shuts down those of ``sockets`` that are still the same, and connected over TCP with a process of this machine.
    Safe in any thread."""
    now = open_sockets()
    for descriptor in (fd for fd, link in sockets.items() if now.get(fd) == link):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if sockets[descriptor] != f"socket:[{os.fstat(one.fileno()).st_ino}]":
                continue  # given to another since
            # The name of the peer raises for one that listens, whose end gloo takes for a bug.
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[0].startswith(_LOOPBACK):
                one.shutdown(socket.SHUT_RDWR)
