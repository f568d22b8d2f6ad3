"""Where in the user's own code something was called: the innermost frame outside of Paceline and what it runs on."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

__all__ = ["calling", "raised_at"]

_OWN = str(Path(__file__).parent)
_LIBRARIES = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})


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
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if not frames:
        return None
    frame = frames[-1]
    code = f": {frame.line}" if frame.line else ""
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}{code}"


def _is_users(filename: str) -> bool:
    return not filename.startswith((_OWN, "<frozen", *_LIBRARIES))
