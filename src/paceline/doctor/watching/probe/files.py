"""Hooks on what leaves the process: files, downloads, trackers, lines that are printed."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from paceline.doctor.watching.probe.hooking import Call, Hooked
from paceline.doctor.watching.probe.recorder import Recorder

__all__ = ["STANDARD_TABLE", "TABLE", "TRACKERS", "watch_files"]

_LINES = 40
"""So many lines from one place are told."""
_FILES = 2000
_WRITING = os.O_WRONLY | os.O_RDWR


def watch_files(recorder: Recorder) -> None:
    """Tells of files that are written, and of those read that were written since this process began.

    A file of the scratch folder that is a link to an original is made a copy before it is written to.
    """
    began_s, told = time.time() - 1.0, Counter[str]()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, str | bytes | os.PathLike) or told["open"] > _FILES:
                return
            name = _absolute(path)
            if name.startswith(("/dev/", "/proc/", "/sys/")) or "__pycache__" in name:
                return
            if flags & _WRITING:
                _own(name, keep=not flags & os.O_TRUNC)
                told["open"] += 1
                mode = "append" if flags & os.O_APPEND else "write"
                own = recorder.called_by_user() or Path(name).is_relative_to(Path.cwd())
                recorder.tell("open", path=recorder.original(name), mode=mode, own=own)
            else:
                with contextlib.suppress(OSError):
                    if Path(name).stat().st_mtime >= began_s:
                        told["open"] += 1
                        recorder.tell("read", path=recorder.original(name))
        elif event == "urllib.Request":
            recorder.tell("download", url=str(arguments[0])[:200])

    def guarded(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "urllib.Request") and not busy:
            busy.append(True)
            with recorder.unnoticed():
                hook(event, arguments)
            busy.pop()

    busy: list[bool] = []
    sys.addaudithook(guarded)


def _own(path: str, *, keep: bool) -> None:
    """Puts a file in place of a link to an original; with its content, if that is to be kept."""
    link = Path(path)
    if path.startswith(_scratch) and link.is_symlink():
        original = link.resolve()
        link.unlink()
        if keep:
            shutil.copyfile(original, path)


_scratch = "\0"


def own_files_under(scratch: str) -> None:
    """Links under this folder are not to be written through."""
    global _scratch
    _scratch = scratch


def _saved(call: Call) -> Generator[None, Any, None]:
    path = _path(call, "f")
    if path is not None:
        _own(path, keep=False)
        call.recorder.tell("save", path=call.recorder.original(path), prefixed=_prefixed(call["obj"]))
    yield


def _loaded(call: Call) -> Generator[None, Any, None]:
    path = _path(call, "f")
    call.recorder.tell(
        "load", path=call.recorder.original(path) if path else None, mapped=call["map_location"] is not None
    )
    yield


def _path(call: Call, name: str) -> str | None:
    file = call[name]
    file = getattr(file, "name", file)  # an open file knows its path
    return _absolute(file) if isinstance(file, str | os.PathLike) else None


def _absolute(path: str | bytes | os.PathLike[Any]) -> str:
    return os.path.normpath(Path.cwd() / os.fsdecode(path))


def _prefixed(value: Any, depth: int = 3) -> bool:
    """Whether it holds a state dict of a DDP: all keys begin with ``module.``."""
    if not isinstance(value, Mapping) or not value or depth == 0:
        return False
    if all(isinstance(key, str) and key.startswith("module.") for key in value):
        return True
    return any(_prefixed(item, depth - 1) for item in value.values())


_printed = Counter[Any]()


def _line_printed(call: Call) -> Generator[None, Any, None]:
    stream = call.kwargs.get("file")
    places = call.recorder.places() if stream in (None, sys.stdout) else ()
    if places:
        _printed[places[0]] += 1
        if _printed[places[0]] <= _LINES:
            call.recorder.tell("print", places=places, text=" ".join(str(value) for value in call.args)[:120])
    yield


def _slept(call: Call) -> Generator[None, Any, None]:
    seconds = float(call.args[0])
    if seconds < 0.5:
        return
    number = call.recorder.tell("sleep", seconds=seconds)
    yield
    call.recorder.done(number)


_LAUNCHERS = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
)


def _variable_set(call: Call) -> Generator[None, Any, None]:
    environ, key, value = call.args
    if key in _LAUNCHERS:
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
    Hooked("torch", "save", _saved, scope="save"),
    Hooked("torch", "load", _loaded, scope="load"),
    Hooked("torch.hub", "download_url_to_file", _downloaded, scope="download"),
    Hooked("torch.cuda", "is_available", _gpus_asked),
)
TRACKERS: dict[str, tuple[Hooked, ...]] = {
    name: (Hooked(name, function, _tracker_started, scope="tracker"),)
    for name, function in (
        ("aim", "Run.__init__"),
        ("clearml", "Task.init"),
        ("comet_ml", "Experiment.__init__"),
        ("mlflow", "start_run"),
        ("neptune", "init_run"),
        ("swanlab", "init"),
        ("tensorboardX", "SummaryWriter.__init__"),
        ("torch.utils.tensorboard", "SummaryWriter.__init__"),
        ("wandb", "init"),
    )
}
"""By module what starts a run of it."""
