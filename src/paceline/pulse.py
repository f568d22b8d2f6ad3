"""What a worker is doing, in a small file that its supervisor reads at any time, also after the worker's death.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     pulse = Pulse(Path(folder) / "worker-1")
...     before = pulse.enter("compute", step=12, lane=3)
...     beat = read_pulse(Path(folder) / "worker-1")
...     pulse.close()
>>> before, beat.activity, beat.step, beat.phase, beat.lane
('start', 'compute', 12, None, 3)

The file is mapped into memory, so that a change costs no system call and needs nobody to be alive.

[Note: torn reads] Nobody locks, since a worker may be stopped or killed while it writes. Every number is eight aligned
bytes, stored and loaded at once, so that no number is ever torn. Of numbers that belong together a reader may see some
new ones and some old ones. Only one mixture could do harm: a new activity with the time of the old one, which would
look overdue. So ``since_s`` is stored before the activity and loaded after it: at worst an activity looks younger than
it is. The step, lane and call beside it are only told to people, and right again at the next look.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

__all__ = ["Activity", "Beat", "Pulse", "read_pulse"]

Activity = Literal["start", "load", "compute", "wait", "update", "body", "evaluate", "save", "join", "end"]
"""What a worker is doing.

start: all that comes before its first step.
load: waits for the next micro-batch.
compute: forward and backward of a micro-batch, in the user's code.
wait: waits for other workers in a call.
update: what follows the exchange in a step: clipping, optimizer.
body: the user's code between steps.
evaluate: one micro-batch of an evaluation.
save: writes a checkpoint.
join: a replacement catches up with the others.
end: closes.
"""

_ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
_NUMBERS = {activity: number for number, activity in enumerate(_ACTIVITIES, start=1)}  # 0: nothing written yet
_CALL_BYTES = 200

# In this order in the file. A number that may be unknown is stored as one more than it is, 0 when unknown.
_TIME = struct.Struct("@d")  # beat_s
_NOW = struct.Struct("@dqqqq")  # since_s, number of the activity, step + 1, phase + 1, lane + 1
_IDENT = struct.Struct("@Q")  # main_thread
_TAKEN = struct.Struct("@qd")  # for each activity, how often it has ended, and the longest it took
_CALL = struct.Struct(f"@{_CALL_BYTES}s")
_NOW_AT = _TIME.size
_IDENT_AT = _NOW_AT + _NOW.size
_TAKEN_AT = _IDENT_AT + _IDENT.size
_CALL_AT = _TAKEN_AT + _TAKEN.size * len(_ACTIVITIES)
_SIZE = _CALL_AT + _CALL.size


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a pulse says at one moment. Times are those of `time.monotonic`, the same for all processes of a machine.

    Args:
        beat_s: when a thread of the worker that does nothing else was last alive.
        since_s: when the activity began.
        activity: what the worker does, or did when it died.
        step: counted from 1; ``None`` before the first one.
        phase: of the step, from 0; ``None``: not told.
        lane: of the last micro-batch; ``None``: not told.
        call: the call in which the worker waits for others; ``None``: it does not wait, or not told.
        seen: how often each activity has ended; one that never has is left out.
        longest_s: the longest that each took, its first time left out, since that compiles, opens files, warms up.
        main_thread: the identifier of the main thread in a dump of the worker's stacks.
    """

    beat_s: float
    since_s: float
    activity: Activity
    step: int | None
    phase: int | None
    lane: int | None
    call: str | None
    seen: Mapping[Activity, int]
    longest_s: Mapping[Activity, float]
    main_thread: int


class Pulse:
    """Says what this worker is doing. It begins with ``start``.

    Only one thread, the main one, may call `enter` and `call`; `beat` is another's.

    Args:
        path: the file to say it in, replaced if it is there. ``None``: nobody looks, and every method does next to
            nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._activity: Activity = "start"
        self._since_s = time.monotonic()
        self._step = self._phase = self._lane = 0
        self._seen = [0] * (len(_ACTIVITIES) + 1)
        self._longest_s = [0.0] * (len(_ACTIVITIES) + 1)
        self._page: mmap.mmap | None = None
        if path is not None:
            part = path.with_name(f"{path.name}.part")
            with part.open("w+b") as file:
                file.write(bytes(_SIZE))  # really written: on a full disk an error here, not SIGBUS later
                file.flush()
                self._page = mmap.mmap(file.fileno(), _SIZE)
            _IDENT.pack_into(self._page, _IDENT_AT, threading.main_thread().ident or 0)
            self.beat()
            _NOW.pack_into(self._page, _NOW_AT, self._since_s, _NUMBERS["start"], 0, 0, 0)
            part.replace(path)  # a reader may hold the one before; cutting that to nothing would end it by SIGBUS

    def enter(
        self, activity: Activity, *, step: int | None = None, phase: int | None = None, lane: int | None = None
    ) -> Activity:
        """Goes on to another activity, or to the next of the same, and returns what the worker was doing before.

        Costs about a microsecond.

        Args:
            activity: what begins now.
            step: from 1. Like phase and lane it stays what it was when not given.
            phase: from 0.
            lane: from 0.
        """
        before = self._activity
        self._activity = activity
        page = self._page
        if page is None:
            return before
        if step is not None:
            self._step = step + 1
        if phase is not None:
            self._phase = phase + 1
        if lane is not None:
            self._lane = lane + 1
        ended = _NUMBERS[before]
        now_s = time.monotonic()
        took_s = now_s - self._since_s
        self._since_s = now_s
        seen = self._seen[ended]
        if seen and took_s > self._longest_s[ended]:
            self._longest_s[ended] = took_s
        self._seen[ended] = seen + 1
        _TAKEN.pack_into(page, _TAKEN_AT + _TAKEN.size * (ended - 1), seen + 1, self._longest_s[ended])
        _NOW.pack_into(page, _NOW_AT, now_s, _NUMBERS[activity], self._step, self._phase, self._lane)
        return before

    def call(self, name: str) -> None:
        """Names the call in which the worker is about to wait for others. Of a long name the beginning is kept."""
        if self._page is not None:
            _CALL.pack_into(self._page, _CALL_AT, name.encode()[:_CALL_BYTES])

    def beat(self) -> None:
        """The heartbeat: to be called some times a second, by a thread that runs as long as the process can run any."""
        page = self._page
        if page is not None:
            _TIME.pack_into(page, 0, time.monotonic())

    def close(self) -> None:
        """Leaves the file as it is; from now on nobody looks."""
        self._page = None  # unmapped with its last reference, which the thread that beats may hold right now


def read_pulse(path: Path) -> Beat | None:
    """What the worker that writes ``path`` is doing; ``None``: there is no such file, or nothing in it yet."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ) as page:
            _, number, step, phase, lane = _NOW.unpack_from(page, _NOW_AT)
            (since_s,) = _TIME.unpack_from(page, _NOW_AT)  # after the activity: see [Note: torn reads]
            (beat_s,) = _TIME.unpack_from(page, 0)
            (main_thread,) = _IDENT.unpack_from(page, _IDENT_AT)
            taken = list(_TAKEN.iter_unpack(page[_TAKEN_AT:_CALL_AT]))
            (call,) = _CALL.unpack_from(page, _CALL_AT)
    except (FileNotFoundError, ValueError):  # the latter: it has not its size yet
        return None
    if not number:
        return None
    activity = _ACTIVITIES[number - 1]
    told = call.rstrip(b"\0").decode(errors="ignore")  # cut within a character, perhaps
    return Beat(
        beat_s=beat_s,
        since_s=since_s,
        activity=activity,
        step=step - 1 if step else None,
        phase=phase - 1 if phase else None,
        lane=lane - 1 if lane else None,
        call=told if told and activity == "wait" else None,
        seen={name: seen for name, (seen, _) in zip(_ACTIVITIES, taken, strict=True) if seen},
        longest_s={name: longest_s for name, (seen, longest_s) in zip(_ACTIVITIES, taken, strict=True) if seen > 1},
        main_thread=main_thread,
    )
