"""The most memory that this process has had, and what it has now: a GPU's by its allocator, a CPU's by the kernel."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import psutil
import torch

from paceline.errors import UsageError

__all__ = ["Peak", "resident_bytes"]

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """The most memory that this process has while the ``with`` block runs. Not collective.

    On a GPU these are the bytes of tensors, as torch's allocator counts them: without the driver's own, and without
    what the allocator reserves. On a CPU it is the whole resident process, with interpreter and libraries, and with
    what was freed but is kept for reuse. Less `resident_bytes` of before, it is what came on top: too little if the
    block could reuse much, so measure in a fresh process. Where the kernel does not let the peak begin anew, it is that
    of the process since its start. Peaks may lie inside one another.

    Args:
        device: ``run.device``, say.

    Attributes:
        source: who counted, and since when, in words. Set when the block begins.

    Raises:
        UsageError: a device that nothing is counted for.

    >>> with Peak() as peak:
    ...     x = torch.ones(4 * 2**20)
    >>> peak.bytes >= x.nbytes
    True
    """

    # A process has one counter for each device. Who begins it anew writes down for the others what it was.
    _open: ClassVar[list[Peak]] = []

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = _known(device)
        self._most = 0
        self.source = ""

    @property
    def bytes(self) -> int:
        """The most so far; behind the block, the most in it."""
        return max(self._most, self._counted()) if self in self._open else self._most

    def __enter__(self) -> Peak:
        for other in self._open:
            other._most = other.bytes
        self._most, self.source = 0, self._begin()
        self._open.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._most = self.bytes
        self._open.remove(self)

    def _begin(self) -> str:
        """Begins the count anew, if that is possible."""
        if self._device.type == "cuda":
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats(self._device)
            return "CUDA allocator"
        try:
            _CLEAR_REFS.write_text("5")  # see proc_pid_clear_refs(5)
        except OSError:
            kernel = "VmHWM" if _process_peak() is not None else "ru_maxrss"
            return f"process peak since its start ({kernel})"
        return "process peak (VmHWM)"

    def _counted(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        peak = _process_peak()
        if peak is not None:
            return peak
        # On Linux it may be that of the process that started this one, if that had more.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_bytes(device: torch.device | str = "cpu") -> int:
    """What this process has now, counted as `Peak` counts: its resident memory, or its tensors on a GPU.

    Raises:
        UsageError: a device that nothing is counted for.
    """
    device = _known(device)
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def _process_peak() -> int | None:
    """The kernel's "high water mark" of resident memory; ``None``: it does not tell."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


def _known(device: torch.device | str) -> torch.device:
    try:
        known = torch.device(device)
    except (RuntimeError, TypeError):
        named = device if device is None or isinstance(device, str) else f"a {type(device).__name__}"
        raise UsageError(
            f"cannot measure the memory of {named}",
            found="no device that torch knows",
            needed="cpu, or cuda where there is one",
            fix="Give run.device",
        ) from None
    if known.type == "cpu" or (known.type == "cuda" and torch.cuda.is_available()):
        return known
    raise UsageError(
        f"cannot measure the memory of {known}",
        found="no CUDA device" if known.type == "cuda" else f"a device of type {known.type}",
        needed="cpu, or cuda where there is one",
        fix="Give run.device",
    )
