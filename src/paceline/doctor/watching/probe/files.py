"""Hooks on what leaves the process: files, downloads, trackers, lines that are printed."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.doctor import torch_names
from paceline.doctor.watching.probe.guarding import Guard, here
from paceline.doctor.watching.probe.hooking import Call, Hooked
from paceline.doctor.watching.probe.recorder import Recorder
from paceline.doctor.watching.records import Place

__all__ = ["STANDARD_TABLE", "TABLE", "TRACKERS", "events", "saving"]

_LINES = 40
"""So many lines from one place are told."""
_FILES = 2000
_WRITING = os.O_WRONLY | os.O_RDWR
_SCREEN = 1
"""The descriptor that ends on the user's screen, unless the script puts a file in its place."""


def events(recorder: Recorder) -> Mapping[str, Callable[..., None]]:
    """By audit event what tells of files that are written, of those read that were written since this process began,
    of downloads, and of another program that takes the place of this one."""
    began_s, this, told = time.time() - 1.0, os.getpid(), Counter[str]()

    def opened(path: Any, _: object, flags: int) -> None:
        if not isinstance(path, str | bytes | os.PathLike) or told["open"] > _FILES:
            return
        name = _absolute(path)
        if name.startswith(("/dev/", "/proc/", "/sys/")) or "__pycache__" in name:
            return
        if flags & _WRITING:
            told["open"] += 1
            mode = _mode(flags)
            own = recorder.called_by_user() or Path(name).is_relative_to(here())
            recorder.tell("open", path=recorder.original(name), mode=mode, own=own)
        else:
            with contextlib.suppress(OSError):
                if Path(name).stat().st_mtime >= began_s:
                    told["open"] += 1
                    recorder.tell("read", path=recorder.original(name))

    def requested(url: Any, *_: object) -> None:
        recorder.tell("download", url=str(url)[:200])

    def locked(descriptor: int, *_: object) -> None:
        recorder.tell("lock", path=recorder.original(str(Path(f"/proc/self/fd/{descriptor}").readlink())))

    def replaced(program: Any, *_: object) -> None:
        if os.getpid() == this:
            recorder.tell("exec", program=os.fsdecode(program))

    return {
        "open": opened,
        "urllib.Request": requested,
        "fcntl.flock": locked,
        "fcntl.lockf": locked,
        "os.exec": replaced,
    }


def _mode(flags: int) -> str:
    """How a file is opened for writing."""
    if flags & os.O_EXCL:
        return "exclusive"
    if flags & os.O_APPEND:
        return "append"
    return "write" if flags & (os.O_CREAT | os.O_TRUNC) else "update"


def saving(guard: Guard | None) -> dict[str, tuple[Hooked, ...]]:
    """By module its functions that write a file in C, which no audit event announces.

    Args:
        guard: what these may write to; ``None``: anything.
    """

    def row(module: str, name: str, path: str, saved: str | None = None) -> tuple[Hooked, ...]:
        hook = functools.partial(_saved, guard=guard, path_name=path, saved_name=saved)
        return (Hooked(module, name, hook, scope="save"),)

    return {
        "torch": row("torch", "save", "f", "obj"),
        "torch.jit": row("torch.jit", "save", "f"),
        "safetensors.torch": row("safetensors.torch", "save_file", "filename", "tensors"),
        "safetensors.numpy": row("safetensors.numpy", "save_file", "filename", "tensor_dict"),
    }


def _saved(call: Call, guard: Guard | None, path_name: str, saved_name: str | None) -> Generator[None, Any, None]:
    path = _path(call, path_name)
    if path is not None:
        prefixed = saved_name is not None and _prefixed(call[saved_name])
        call.recorder.tell("save", path=call.recorder.original(path), prefixed=prefixed)
        if guard is not None:
            guard.about_to_write(Path(path), keep=False)
    with _whole() if guard is None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """SIGTERM, by which the doctor asks a rank to end, comes after this: what is saved in place is not cut in half."""
    before = signal.getsignal(signal.SIGTERM)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for number in came:
            signal.raise_signal(number)


def _loaded(call: Call) -> Generator[None, Any, None]:
    if (path := _path(call, "f")) is not None:  # else no file: so tensors come out of a pickle, as of gathered objects
        call.recorder.tell("load", path=call.recorder.original(path), mapped=call["map_location"] is not None)
    yield


def _path(call: Call, name: str) -> str | None:
    file = call[name]
    if not isinstance(file, str | os.PathLike):
        file = getattr(file, "name", None)  # an open file knows its path
    return _absolute(file) if isinstance(file, str | os.PathLike) else None


def _absolute(path: str | bytes | os.PathLike[Any]) -> str:
    return os.path.normpath(here() / os.fsdecode(path))


def _prefixed(value: Any, depth: int = 3) -> bool:
    """Whether it holds a state dict of a DDP: all keys begin with ``module.``."""
    if not isinstance(value, Mapping) or not value or depth == 0:
        return False
    if all(isinstance(key, str) and key.startswith("module.") for key in value):
        return True
    return any(_prefixed(item, depth - 1) for item in value.values())


_printed = Counter[tuple[Place, ...]]()


def _line_printed(call: Call) -> Generator[None, Any, None]:
    places = call.recorder.places() if _is_shown(call.kwargs.get("file") or sys.stdout) else ()
    if places:
        _printed[places] += 1
        if _printed[places] <= _LINES:
            text = " ".join(str(value) for value in call.args)
            call.recorder.tell("print", places=places, text=call.recorder.shown(text[:1000])[:120])
    yield


def _is_shown(stream: Any) -> bool:
    """Whether what is written there ends on the screen, and not in a file or nowhere."""
    try:
        return bool(stream.fileno() == _SCREEN) and not stat.S_ISREG(os.fstat(_SCREEN).st_mode)
    except (AttributeError, OSError, ValueError):  # no stream of the system, or closed
        return False


def _slept(call: Call) -> Generator[None, Any, None]:
    seconds = float(call.args[0])
    if seconds < 0.5:
        return
    number = call.recorder.tell("sleep", seconds=seconds)
    yield
    call.recorder.done(number)


_VARIABLES = (*torch_names.LAUNCHER_VARIABLES, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


def _variable_set(call: Call) -> Generator[None, Any, None]:
    environ, key, value = call.args
    if key in _VARIABLES:
        call.recorder.tell("env", key=key, before=environ.get(key), after=str(value))
    yield


def _cores_asked(call: Call) -> Generator[None, Any, None]:
    cores = yield
    if call.recorder.called_by_user():
        call.recorder.tell("asks", what="cores", value=cores if isinstance(cores, int) else len(cores))


def _gpus_asked(call: Call) -> Generator[None, Any, None]:
    there = yield
    if call.recorder.called_by_user():
        call.recorder.tell("asks", what="gpus", value=there)


def _tracker_started(call: Call) -> Generator[None, Any, None]:
    where = call["log_dir"] or call["logdir"] or call["dir"]
    told = call.kwargs.get("mode") == "disabled"
    if not told:
        call.recorder.tell("tracker", name=call.function.__qualname__, where=str(where) if where else None)
    yield


def _downloaded(call: Call) -> Generator[None, Any, None]:
    call.recorder.tell("download", url=str(call["url"])[:200])
    yield


STANDARD_TABLE = (
    Hooked("builtins", "print", _line_printed),
    Hooked("time", "sleep", _slept),
    Hooked("os", "_Environ.__setitem__", _variable_set),
    Hooked("os", "cpu_count", _cores_asked),
    Hooked("os", "sched_getaffinity", _cores_asked),
)
"""Of Python itself."""
TABLE = (
    Hooked("torch", "load", _loaded, scope="load"),
    Hooked("torch.hub", "download_url_to_file", _downloaded, scope="download"),
    Hooked("torch.cuda", "is_available", _gpus_asked),
)
TRACKERS: dict[str, tuple[Hooked, ...]] = {
    module: (
        Hooked(
            module, f"{name}.__init__" if name[0].isupper() and "." not in name else name, _tracker_started, "tracker"
        ),
    )
    for module, name in torch_names.TRACKERS
}
"""By module what starts a run of it."""
