"""Options, and fixtures that fail a test which leaves anything behind: threads, processes, files, settings."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from pool import Pool
from resident import Resident

GRACE_S = 30.0
"""How long a thread or process may take to end after its test, on a busy machine too; nobody waits who need not."""

OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
"""Set by pytest, by torch when it first imports its compiler, and by scikit-learn."""

LONGEST_FIRST = ("command", "workers", "tests", "unit")
"""Folders of tests, for who deals them to processes."""

hypothesis.settings.register_profile("short", deadline=None, max_examples=50)
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda"], help="device of the workers (default: cpu)")
    parser.addoption("--long", action="store_true", help="the whole of the sweeps of which a sample runs by default")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: a part of a sweep that runs with --long only")
    hypothesis.settings.load_profile("long" if config.getoption("--long") else "short")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # of pytest-xdist: long files first, so that no process is left with one at last
        items.sort(key=lambda item: LONGEST_FIRST.index(item.path.parent.name))
    if config.getoption("--long"):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    if left_out:
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """One thread in this process unless a test asks for more: its tensors are small, and threads that wait for work in
    two such processes at once take several times the CPU that the work takes. And what is imported by now is looked
    through for garbage no more: that takes tenths of a second, each time that a process is forked for loading data."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """``recipe.device`` of the tests that train."""
    choice: str = request.config.getoption("--device")
    return choice


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Processes for jobs of several workers, kept for the whole session."""
    with Pool(tmp_path_factory.mktemp("pool")) as kept:
        yield kept


@pytest.fixture(scope="session")
def resident() -> Iterator[Resident]:
    """A process from which commands are forked, kept for the whole session."""
    with Resident() as opened:
        yield opened


@pytest.fixture(scope="module", autouse=True)
def commands_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """In the folder of those that start commands."""
    if request.path.parent.name != "command":
        yield
        return
    import driving

    with driving.forking_from(request.getfixturevalue("resident")):
        yield


@pytest.fixture
def process_state() -> Iterator[None]:
    """For tests that train in this process: puts back what a `Run` or ``train`` sets for the process."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    handlers = _signal_handlers()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test after which something is there, or set, that was not before."""
    before = {look.__name__: look() for look in (_threads, _children, _files, _shared_memory)}
    environment, settings = dict(os.environ), _settings()
    yield
    leaks = [
        *_appeared(before["_threads"], _threads, "thread"),
        *_appeared(before["_children"], _children, "child process"),
        *_appeared(before["_files"], _files, "open file"),
        *_appeared(before["_shared_memory"], _shared_memory, "shared memory"),
        *_changed(environment, dict(os.environ), "environment"),
        *_changed(settings, {name: value for name, value in _settings().items() if name in settings}, "setting"),
    ]
    assert not leaks, "the test leaves behind: " + "; ".join(leaks)


def _threads() -> dict[Any, str]:
    return {thread: thread.name for thread in threading.enumerate()}


def _children() -> dict[Any, str]:
    multiprocessing.active_children()  # reaps those that have ended
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # none at all, which is quicker to learn than their names
        return {}
    found = {}
    for child in psutil.Process().children():
        try:
            found[child.pid] = f"{child.pid} {' '.join(child.cmdline()[:4])}"
        except psutil.ZombieProcess:
            found[child.pid] = f"{child.pid}, ended but never waited for"
        except psutil.NoSuchProcess:
            continue
    return found


def _files() -> dict[Any, str]:
    """Open regular files; sockets and pipes come and go with the pool's processes."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue  # the descriptor of this very listing
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
            found[link.name, target] = target
    return found


def _shared_memory() -> dict[Any, str]:
    """Of this process: torch puts its id into the names."""
    return {name: name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name}  # noqa: PTH208 (names)


def _appeared(before: dict[Any, str], look: Callable[[], dict[Any, str]], what: str) -> list[str]:
    deadline = time.monotonic() + GRACE_S
    while new := [name for key, name in look().items() if key not in before]:
        if time.monotonic() > deadline:
            return [f"{what} {name}" for name in new]
        gc.collect()  # a reference cycle may hold it
        time.sleep(0.02)
    return []


def _settings() -> dict[str, Any]:
    settings: dict[str, Any] = {f"handler of {number.name}": handler for number, handler in _signal_handlers().items()}
    if "torch" in sys.modules:  # a test that needs no torch shall not wait for it
        import torch

        settings |= {
            "torch threads": torch.get_num_threads(),
            "default dtype": torch.get_default_dtype(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            "autocast": torch.is_autocast_enabled("cpu"),
            "grad mode": torch.is_grad_enabled(),
            "process group": torch.distributed.is_initialized(),
        }
    return settings


def _signal_handlers() -> dict[signal.Signals, Any]:
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}


def _changed(before: dict[str, Any], after: dict[str, Any], what: str) -> list[str]:
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    return [f"{what} {name}: {before.get(name)} became {after.get(name)}" for name in changed if name not in OTHERS]
