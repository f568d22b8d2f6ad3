"""Writers that are killed at every system call of a save, and disks that are full: real processes, real disks.

Run as a program, this file is the process that forks writers and kills them: it has no threads and imports torch once.
"""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from paceline.checkpoint import Snapshot, Store, Writer
from paceline.checkpoint.manifest import Name, parse, verify
from paceline.config import Identity
from paceline.errors import CheckpointError

IDENTITY = Identity.of({"recipe": {"seed": 0}})
SYSTEM_CALLS = {"open", "mkdir", "write", "flush", "fsync", "rename", "flock", "unlink", "rmdir", "scandir", "close"}


def snapshot(step: int) -> Snapshot:
    state = {"weight": torch.full((1000,), float(step)), "more": [torch.full((7,), step)]}
    return Snapshot(step=step, states={"model": state}, position={"step": step})


def check_whole(store: Store, at_least: int) -> int:
    """The newest step, after checking its contents and that every directory named as a checkpoint is one."""
    for path in store.directory.iterdir():
        if name := Name.parse(path.name):
            verify(
                parse((path / "manifest.json").read_bytes()),
                name.step,
                {f.name: f.stat().st_size for f in path.iterdir()},
            )
    loaded = Store(store.directory).load(IDENTITY)
    assert loaded is not None, "no checkpoint is left"
    assert loaded.passed_over == [], loaded.passed_over
    assert loaded.step >= at_least, (loaded.step, at_least)
    assert torch.equal(loaded.states["model"]["weight"], torch.full((1000,), float(loaded.step)))
    return loaded.step


def die_at(call: int) -> None:
    """Arranges that this process kills itself right before its ``call``-th system call."""
    seen = 0

    def profile(frame: FrameType, event: str, function: Any) -> None:
        nonlocal seen
        if event == "c_call" and function.__name__ in SYSTEM_CALLS:
            if seen == call:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.setprofile(profile)


def kill_at_every_system_call(directory: Path) -> int:
    """Saves, dies at call 0, saves again; dies at call 1, ...; returns how many calls a save makes."""
    store = Store(directory, keep=2)
    store.save(snapshot(1), IDENTITY)
    store.save(snapshot(2), IDENTITY)
    done = 2
    for call in itertools.count():
        child = os.fork()
        if child == 0:
            die_at(call)
            store.save(snapshot(done + 1), IDENTITY)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        check_whole(store, done)
        if os.WIFEXITED(status):
            assert status == 0, status
            return call
        store.save(snapshot(done + 1), IDENTITY)
        done = check_whole(store, done + 1)
        assert not [path.name for path in directory.iterdir() if ".tmp-" in path.name]
    raise AssertionError


def kill_at_random_moments(directory: Path, kills: int) -> None:
    """A writer that saves without pause, killed from outside within its first 20 ms."""
    store = Store(directory, keep=2)
    done = 1
    store.save(snapshot(done), IDENTITY)
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            for step in itertools.count(done + 1):
                store.save(snapshot(step), IDENTITY)
        time.sleep(random.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        done = check_whole(store, done)
        store.save(snapshot(done), IDENTITY)
        done = check_whole(store, done)


def save_with_a_file_limit(directory: Path) -> None:
    """What a full disk is where nothing can be mounted: no file may grow beyond 100 kB."""
    store = Store(directory)
    store.save(snapshot(1), IDENTITY)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    check_full(store, 200_000)


def check_full(store: Store, numbers: int) -> None:
    """Saves a checkpoint that does not fit: an error in four beats, no trace, the one before whole."""
    big = Snapshot(step=2, states={"model": {"weight": torch.zeros(numbers)}}, position={})
    with Writer(store) as writer:
        writer.start(big, IDENTITY)
        writer.wait()
        error = writer.outcome()
    assert isinstance(error, CheckpointError), error
    assert error.problem == "cannot save the checkpoint of step 2"
    assert "No space left on device" in str(error.found) or "File too large" in str(error.found), error.found
    assert "MiB" in str(error.needed) or "bytes" in str(error.needed)
    assert error.fix
    assert error.exit_code == 1
    assert [path.name for path in store.directory.iterdir()] == ["step-00000001"]
    assert check_whole(store, 1) == 1
    store.save(snapshot(2), IDENTITY)
    assert check_whole(store, 2) == 2


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else tmp_path) as directory:
        yield Path(directory)


def run(job: str, directory: Path) -> str:
    command = [sys.executable, __file__, job, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_writer_killed_at_any_moment_costs_nothing_committed(ram: Path) -> None:
    assert int(run("kill", ram)) > 30


def test_a_full_disk_fails_the_save_and_nothing_else(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0:
        try:
            store = Store(tmp_path / "checkpoints")
            store.save(snapshot(1), IDENTITY)
            check_full(store, 400_000)
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)
    else:
        run("limit", tmp_path)


if __name__ == "__main__":
    where = Path(sys.argv[2])
    if sys.argv[1] == "kill":
        print(kill_at_every_system_call(where / "calls"))
        kill_at_random_moments(where / "moments", 10)
    else:
        save_with_a_file_limit(where / "limited")
