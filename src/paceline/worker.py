"""What a worker process runs, and how it tells why it ends.

    python -m paceline.worker script PATH ARGS...     a script of the user's, as `python PATH ARGS...` would
    python -m paceline.worker module NAME ARGS...     a module, as `python -m NAME ARGS...` would
    python -m paceline.worker function FILE           a function handed over by `paceline.launch`
    python -m paceline.worker call MODULE:NAME ARGS... a function of the package, with the words ARGS

A failure goes to the supervisor as a report, or to standard error under another launcher: a mistake in four beats with
the line of the user's code, anything else with its traceback. Then the process ends at once, since threads and
destructors might wait for workers that are long gone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from paceline import env
from paceline.callsite import raised_at
from paceline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, PacelineError, TeamError, UsageError, WorkerError
from paceline.link import tell
from paceline.run_dir import replace_text

__all__ = ["at_exit", "end", "finish", "main", "report", "tell_uncaught_errors", "work"]


_ECHO_S = 1.0


def work(body: Callable[[], int]) -> int:
    """Runs ``body`` as a worker and returns its exit code; if it fails, reports that and ends the process."""
    here = env.read()
    try:
        return body()
    except KeyboardInterrupt:
        end(EXIT_INTERRUPTED)
    except Exception as error:
        end(report(here.report_dir if here else None, here.rank if here else 0, error))


def end(exit_code: int) -> NoReturn:
    """Ends this process now, with what it has printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def finish(exit_code: int) -> NoReturn:
    """Ends this process as the interpreter would, but for taking down all modules, which takes torch a third of a
    second of every worker: threads are waited for, exit handlers called, and files that nobody has closed are written.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for thing in gc.get_objects():
        if type(thing) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom) and not thing.closed:
            with contextlib.suppress(OSError, ValueError):  # such as a closed pipe
                thing.flush()
    ctypes.CDLL(None).fflush(None)  # and what libraries have printed
    end(exit_code)


def report(report_dir: Path | None, rank: int, error: BaseException) -> int:
    """Tells the supervisor, or standard error where there is none, why this worker ends. Returns its exit code.

    A `TeamError` is an echo of another worker's failure; another `PacelineError` needs no traceback. Under another
    launcher an echo waits a moment, since torchrun takes for the cause whoever ends first.
    """
    exit_code = error.exit_code if isinstance(error, PacelineError) else EXIT_FAILED
    kind = "echo" if isinstance(error, TeamError) else "mistake" if isinstance(error, PacelineError) else "exception"
    told = {
        "rank": rank,
        "time": time.time(),
        "exit_code": exit_code,
        "kind": kind,
        "message": str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}",
        "place": raised_at(error),
        "traceback": _users_traceback(error),
    }
    if report_dir is None:
        place = f"\n  at {told['place']}" if told["place"] else ""
        text = told["traceback"] if kind == "exception" else f"error: {told['message']}{place}"
        who = f"worker {rank}: " if env.read() is not None else ""
        print(f"paceline: {who}{text}", file=sys.stderr, flush=True)
        time.sleep(_ECHO_S if kind == "echo" else 0)
    else:
        replace_text(report_dir / f"worker-{_member()}.json", json.dumps(told))
    return exit_code


def tell_uncaught_errors(*, alone: bool) -> None:
    """From now on an error that nobody catches is told as `report` does; with other workers the process ends with it.

    For scripts under another launcher or none: a worker that waited in its destructors would leave the others waiting
    too. Does nothing where somebody else than torch.distributed has an eye on uncaught errors already.
    """
    ours = ("paceline.", "torch.distributed")
    if not (sys.excepthook is sys.__excepthook__ or sys.excepthook.__module__.startswith(ours)):
        return

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        here = env.read()
        code = EXIT_INTERRUPTED
        if isinstance(error, WorkerError):
            print(error, file=sys.stderr, flush=True)  # as the supervisor tells it, with what it needs
        elif isinstance(error, PacelineError) or not (alone or isinstance(error, KeyboardInterrupt)):
            code = report(None, here.rank if here else 0, error)
        elif alone:
            sys.__excepthook__(kind, error, trace)
        if not alone:
            end(code)

    sys.excepthook = tell


def at_exit(close: Callable[[], None]) -> Callable[[], None]:
    """Calls ``close`` when the interpreter ends, unless what this returns was called before.

    An error in it ends the process with the error's code; from an atexit handler the code would be that of success.
    """

    process = os.getpid()

    def handler() -> None:
        if os.getpid() != process:  # a child that was forked has no part in the run
            return
        try:
            close()
        except Exception as error:
            here = env.read()
            end(report(here.report_dir if here else None, here.rank if here else 0, error))

    atexit.register(handler)
    return lambda: atexit.unregister(handler)


def _run_script(name: str, arguments: list[str], *, module: bool) -> int:
    """Runs a script or module as Python would. Its exit code if it ends by ``sys.exit``."""
    sys.argv = [name, *arguments]
    try:
        if module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(name).resolve().parent)
            runpy.run_path(name, run_name="__main__")
    except SystemExit as ending:
        return _exit_code(ending)
    return EXIT_DONE


def _call_function(file: Path) -> int:
    """Calls the function that `paceline.launch` has left in ``file``, and leaves what it returns beside it."""
    import cloudpickle

    with file.open("rb") as stream:
        sys.path[:] = json.loads(stream.readline())
        function, arguments = cloudpickle.load(stream)
    returned = function(*arguments)
    try:
        packed = cloudpickle.dumps(returned)
    except Exception as error:
        raise UsageError(
            f"cannot hand back what {getattr(function, '__name__', 'the function')} returns",
            found=f"{type(returned).__name__}: {error}",
            needed="something that can be pickled",
            fix="Return numbers, text, tensors, or lists and dicts of them",
        ) from error
    (file.parent / f"returned-{_member()}").write_bytes(packed)
    return EXIT_DONE


def _call(path: str, words: list[str]) -> int:
    module, _, name = path.partition(":")
    returned: int = getattr(importlib.import_module(module), name)(words)
    return returned


def _member() -> int:
    here = env.read()
    return here.member if here else 0


def _exit_code(ending: SystemExit) -> int:
    if ending.code is None or isinstance(ending.code, int):
        return ending.code or EXIT_DONE
    print(ending.code, file=sys.stderr)
    return EXIT_FAILED


def _users_traceback(error: BaseException) -> str:
    """The traceback without the frames of this module and of `runpy`, by which a script is started."""
    trace = error.__traceback__
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def main(words: list[str]) -> int:
    what, path, *rest = words
    body: dict[str, Callable[[], int]] = {
        "script": lambda: _run_script(path, rest, module=False),
        "module": lambda: _run_script(path, rest, module=True),
        "function": lambda: _call_function(Path(path)),
        "call": lambda: _call(path, rest),
    }
    code = work(body[what])
    sys.stdout.flush()
    here = env.read()
    if here is not None and here.link is not None:
        tell(here.link, "over", exit_code=code)  # what remains is the interpreter's end
    if what in ("call", "function"):
        finish(code)
    return code  # a script may count on destructors that run when its modules are taken down


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
