"""Where in the user's own code something was called: the innermost frame outside of Paceline and what it runs on."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

__all__ = ["calling", "in_libraries", "raised_at"]

_OWN = str(Path(__file__).parent) + os.sep
_LIBRARIES = tuple({sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")})


def calling(what: str) -> str:
    """``what``, and the file and line of the user's code that called it: ``run.gather (train.py:31)``.

    The same on every worker that runs the same script.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    if frame is None:
        return what
    return f"{what} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def raised_at(error: BaseException) -> str | None:
    """The line of the user's own code in which an error came up, to be shown under it; ``None`` when there is none.

    For example ``train.py, line 12, in train_step: step.update(optimizer)``.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = traceback.extract_tb(error.__traceback__)
    users = [place for frame, place in zip(frames, places, strict=True) if _is_users(frame)]
    if not users:
        return None
    last = users[-1]
    code = f": {last.line}" if last.line else ""
    return f"{last.filename}, line {last.lineno}, in {last.name}{code}"


def in_libraries(file: str) -> bool:
    """Whether ``file`` belongs to Paceline, to Python itself, or to what is installed."""
    return file.startswith(("<", _OWN, *_LIBRARIES))


def _is_users(frame: FrameType) -> bool:
    """Of generated code, such as a dataclass's ``__init__``, only the module tells whose it is."""
    module = str(frame.f_globals.get("__name__"))
    files = (_OWN, "<frozen", *_LIBRARIES)
    return module.split(".")[0] != "paceline" and not frame.f_code.co_filename.startswith(files)
