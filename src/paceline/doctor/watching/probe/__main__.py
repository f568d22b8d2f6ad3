"""Runs a script as a rank, with hooks in place.

python -m paceline.doctor.watching.probe SETTINGS SCRIPT ARGUMENTS...      started by `watching.ranks` alone
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import json
import os
import signal
import socket
import sys
import threading
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from paceline import stacks
from paceline.doctor.watching.probe import files, serving
from paceline.doctor.watching.probe.guarding import Guard
from paceline.doctor.watching.probe.hooking import install, on_audit
from paceline.doctor.watching.probe.importing import after_import
from paceline.doctor.watching.probe.recorder import Recorder
from paceline.doctor.watching.records import Place, legible

__all__ = ["main"]

_HIGH = 900
"""Below 1,024, the most descriptors that a process may commonly have."""


def main(settings: dict[str, Any], script: str, arguments: list[str]) -> int:
    """The life of a rank. Returns its exit code.

    Args:
        settings: ``rank``, ``parent`` (process id), ``link`` (descriptor), ``listener`` (that of the store's socket),
            ``home`` (folder of the run), ``moved`` (folders in it, and what they stand for), ``guarded`` (whether the
            script may write there only), ``stacks`` (file), ``gpus`` (of `gpus.put_on_cpu`; ``None``: none are named)
            and ``comparing`` (file for `comparing.compare_steps`; ``None``: nothing is compared).
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != settings["parent"]:
        return 1
    _be_first_to_go()
    link, settings["listener"] = (_out_of_the_way(settings[name]) for name in ("link", "listener"))
    recorder = Recorder(socket.socket(fileno=link), settings["moved"])
    stacks.dump_on_signal(Path(settings["stacks"]))
    guard = Guard(recorder, Path(settings["home"])) if settings["guarded"] else None
    _watch(recorder, guard, settings)
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).absolute().parent))  # started with -P, which leaves this out
    return _run(recorder, script)


def _be_first_to_go() -> None:
    """Where memory runs out the kernel ends this process and its children, not the doctor or anybody else's."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _out_of_the_way(descriptor: int) -> int:
    """The same under a number that scripts do not close which close all that a daemon has inherited."""
    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError:  # so many may not be open here
        os.set_inheritable(descriptor, False)
        return descriptor
    os.close(descriptor)
    return high


def _watch(recorder: Recorder, guard: Guard | None, settings: dict[str, Any]) -> None:
    if guard is not None:
        guard.hold()
    on_audit(recorder, *([guard.events] if guard is not None else []), files.events(recorder))
    install(recorder, files.STANDARD_TABLE)
    saving, gpus = files.saving(guard), settings["gpus"]

    def torch_imported() -> None:
        with recorder.unnoticed():
            from paceline.doctor.watching.probe import communication, data, optimizers, training
            from paceline.doctor.watching.probe import gpus as standing_in

            if gpus is not None:
                install(recorder, standing_in.TABLE)  # before the others, so that these see what the script says
                standing_in.put_on_cpu(recorder, **gpus)
            for module in (data, training, optimizers, communication, files):
                install(recorder, module.TABLE)
            training.watch_modules(recorder)
            for name in ("torch", "torch.jit"):
                install(recorder, saving.pop(name))
            optimizers.watch_steps(recorder)
            if settings["comparing"] is not None:
                from paceline.doctor.watching.probe import comparing

                told = json.loads(Path(settings["comparing"]).read_text())
                comparing.compare_steps(recorder, settings["rank"], told)
            serving.serve_once(settings["listener"], Path(settings["home"]))

    others = {**files.TRACKERS, **{name: table for name, table in saving.items() if not name.startswith("torch")}}
    installed = {name: functools.partial(install, recorder, table) for name, table in others.items()}
    after_import({"torch": torch_imported, **installed})


def _run(recorder: Recorder, script: str) -> int:
    """Runs the script as Python would: as ``__main__``."""
    recorder.tell("begin", pid=os.getpid(), thread=threading.get_ident(), places=())
    code = 0

    def tell_end() -> None:
        dist = sys.modules.get("torch.distributed")
        there = dist is not None and dist.is_available() and dist.is_initialized()
        recorder.tell("end", code=code, initialized=bool(there), buffers=_buffers(), places=())

    atexit.register(tell_end)  # the first to be registered is the last to be called
    module = ModuleType("__main__")
    module.__dict__.update(__file__=script, __builtins__=__builtins__, __cached__=None)
    module.__loader__ = loader = SourceFileLoader("__main__", script)
    sys.modules["__main__"] = module
    try:
        exec(compile(loader.get_data(script), script, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code:
            recorder.tell(
                "error",
                type="SystemExit",
                text=legible(recorder.shown(_said(stop.code)))[:2000],
                places=_users(recorder, stop.__traceback__),
            )
        raise
    except BaseException as error:
        code, trace = 1, error.__traceback__
        recorder.tell(
            "error",
            type=type(error).__name__,
            text=legible(recorder.shown(_said(error)))[:4000],
            places=_users(recorder, trace),
        )
        raise
    return code


def _said(value: object) -> str:
    """Its text, though its own code may fail to make one."""
    try:
        return str(value)
    except Exception:
        return ""


def _buffers() -> dict[str, str]:
    """Digests of the buffers of DDP models, if torch was imported."""
    optimizers = sys.modules.get("paceline.doctor.watching.probe.optimizers")
    return optimizers.buffers() if optimizers is not None else {}


def _users(recorder: Recorder, trace: TracebackType | None) -> tuple[Place, ...]:
    """The user's lines of a traceback, innermost first."""
    found = [
        Place(path, line or 0, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(trace)
        if (path := recorder.users_path(frame.f_code.co_filename)) is not None
    ]
    return tuple(reversed(found))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]))
