"""Peaks of this very process: memory is allocated and touched, and the kernel, or a GPU's allocator, has seen it."""

from __future__ import annotations

import mmap
import subprocess
import sys
from typing import Any

import pytest
import torch

from paceline.errors import UsageError
from paceline.memory.peak import Peak, resident_bytes

MIB = 2**20
SLACK = 8 * MIB
"""What else a process may take or give back meanwhile, and how far the kernel's own sums may lag."""


def touch(mib: int, device: str) -> torch.Tensor:
    """So much memory, with something in every page of it. New to the process: malloc might give what others freed."""
    if device == "cpu":
        pages = mmap.mmap(-1, mib * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
    return torch.ones(mib * MIB, dtype=torch.uint8, device=device)


def test_a_peak_sees_what_was_there_in_its_block_only(device: str) -> None:
    before = resident_bytes(device)
    with Peak(device) as first:
        touch(64, device)
    with Peak(device) as second:
        touch(40, device)
    expected = {"cpu": "process peak (VmHWM)", "cuda": "CUDA allocator"}[device]
    assert first.source == second.source == expected
    assert abs(first.bytes - before - 64 * MIB) < SLACK
    assert abs(second.bytes - before - 40 * MIB) < SLACK


def test_what_was_there_before_counts_too(device: str) -> None:
    before = resident_bytes(device)
    there = touch(64, device)
    assert abs(resident_bytes(device) - before - there.nbytes) < SLACK
    with Peak(device) as peak:
        pass
    assert abs(peak.bytes - before - there.nbytes) < SLACK
    del there
    assert abs(resident_bytes(device) - before) < SLACK


def test_it_can_be_read_while_it_goes_on_and_stays_when_it_is_over(device: str) -> None:
    before = resident_bytes(device)
    with Peak(device) as peak:
        early = peak.bytes
        touch(64, device)
        late = peak.bytes
    touch(128, device)
    assert abs(early - before) < SLACK
    assert abs(late - before - 64 * MIB) < SLACK
    assert late <= peak.bytes < late + SLACK


def test_an_inner_peak_takes_nothing_from_an_outer_one(device: str) -> None:
    before = resident_bytes(device)
    with Peak(device) as outer:
        touch(64, device)
        with Peak(device) as inner:
            touch(40, device)
        with Peak(device) as later:
            touch(48, device)
    grown = [(peak.bytes - before) / MIB for peak in (outer, inner, later)]
    assert grown == pytest.approx([64, 40, 48], abs=SLACK / MIB)


def test_an_error_ends_it_and_it_begins_anew(device: str) -> None:
    before = resident_bytes(device)
    peak = Peak(device)
    with pytest.raises(ValueError, match="mine"), peak:
        touch(64, device)
        raise ValueError("mine")
    assert abs(peak.bytes - before - 64 * MIB) < SLACK
    with peak:
        touch(40, device)
    assert abs(peak.bytes - before - 40 * MIB) < SLACK


REFUSED = """
import ctypes, mmap, os, resource
from paceline.memory.peak import Peak, resident_bytes

def show():
    with Peak() as peak:
        pass
    print(peak.bytes - before, peak.source)

before = resident_bytes()
mmap.mmap(-1, 64 * 2**20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)[:] = b"x" * (64 * 2**20)
# A user who may not write to the process's own /proc/self/clear_refs: not even root when it is no longer that.
ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE
if os.getuid() == 0:
    os.setuid(65534)
show()
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # no file can be opened
show()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what Linux refuses")
def test_where_the_kernel_cannot_begin_anew_it_says_so_and_is_not_too_low() -> None:
    ended = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    for counter, line in zip(["VmHWM", "ru_maxrss"], ended.stdout.splitlines(), strict=True):
        grown, _, source = line.partition(" ")
        assert source == f"process peak since its start ({counter})"
        assert int(grown) > 64 * MIB - SLACK


@pytest.mark.parametrize("name", ["meta", "cuda", "tpu", "", None])
def test_a_device_that_is_not_there_is_refused(name: Any) -> None:
    if name == "cuda" and torch.cuda.is_available():
        name = "xpu"
    for measure in (Peak, resident_bytes):
        with pytest.raises(UsageError, match=rf"cannot measure the memory of {name}: found .*, need cpu, or cuda"):
            measure(name)


def test_a_model_in_place_of_a_device_is_named_shortly() -> None:
    with pytest.raises(UsageError, match="cannot measure the memory of a Sequential: found no device that torch knows"):
        Peak(torch.nn.Sequential(torch.nn.Linear(2, 2)))  # type: ignore[arg-type]
