"""`paceline.launch`: a function in several worker processes, from Python."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline import env
from paceline.errors import EXIT_DONE, EXIT_INTERRUPTED, UsageError, WorkerError
from paceline.supervisor import default_workers, run_workers
from paceline.worker import tell_uncaught_errors

__all__ = ["launch"]

T = TypeVar("T")


def launch(fn: Callable[..., T], *args: Any, workers: int | None = None) -> list[T]:
    """Calls ``fn(*args)`` in each of ``workers`` new processes of one team, and returns when all have ended.

    Works in scripts, modules and notebooks, and needs no ``if __name__ == "__main__"``: functions that cannot be
    imported travel by value (cloudpickle), with the globals that they use. In ``fn``, `paceline.Run` joins the team.

        def train(lr):
            run = paceline.Run(paceline.Recipe(epochs=3))
            ...
            return run.digest()

        digests = paceline.launch(train, 1e-3, workers=4)

    Args:
        fn: called in every worker with the same ``args``, which must be picklable.
        workers: processes on this machine; ``None``: one per GPU, or one per two CPU cores.

    Returns:
        What ``fn`` returned in each worker, in the order of their ranks.

    Raises:
        WorkerError: a worker failed; the others were ended. Its text holds the failure, with the worker's traceback
            unless the mistake explains itself.
        KeyboardInterrupt: Ctrl-C, when all workers have ended.
        UsageError: called inside a worker, or with what cannot be pickled.
    """
    if env.read() is not None:
        raise UsageError(
            "cannot launch workers",
            found="a process that is a worker already",
            needed="one launcher",
            fix="Call paceline.launch in a plain script, or use paceline.Run here",
        )
    tell_uncaught_errors(alone=True)
    if not callable(fn):
        raise UsageError(
            "cannot launch workers", found=f"{fn!r}", needed="a function", fix="Write paceline.launch(train, workers=2)"
        )
    if workers is None:
        workers = default_workers()
    if not isinstance(workers, int) or workers < 1:
        raise UsageError(
            "cannot launch workers", found=f"workers={workers!r}", needed="a whole number >= 1", fix="Write workers=2"
        )
    with tempfile.TemporaryDirectory(prefix="paceline-launch-") as name:
        folder = Path(name)
        file = folder / "function"
        file.write_bytes(json.dumps(sys.path).encode() + b"\n" + _packed(fn, args))
        outcome = run_workers(["function", os.fspath(file)], workers)
        if outcome.exit_code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        if outcome.failure is not None or outcome.exit_code != EXIT_DONE:
            raise WorkerError(outcome.failure or f"the workers were stopped with code {outcome.exit_code}")
        return [_unpacked(folder / f"returned-{member}") for member in outcome.members]


def _packed(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps((fn, args))
    except Exception as error:
        raise UsageError(
            f"cannot hand {getattr(fn, '__name__', 'the function')} to the workers",
            found=f"{type(error).__name__}: {error}",
            needed="a function and arguments that can be pickled",
            fix="Make what cannot (open files, locks, generators) inside the function",
        ) from error
    return packed


def _unpacked(file: Path) -> Any:
    import cloudpickle

    if not file.exists():
        raise WorkerError(f"worker {file.name.rpartition('-')[2]} ended without returning: sys.exit in the function?")
    with file.open("rb") as stream:
        return cloudpickle.load(stream)
