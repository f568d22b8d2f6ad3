"""``workers.json``: who is in the team now, and every change of membership so far."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path

from paceline.link import Generation
from paceline.run_dir import replace_text
from paceline.supervisor.job import Job, Worker

__all__ = ["Record"]


class Record:
    """The file of one team; what happened is kept with the job, over all of its teams."""

    def __init__(self, job: Job) -> None:
        self._job, self._text = job, ""

    def died(self, worker: Worker, rank: int, why: str) -> None:
        """``worker`` was lost."""
        self._job.history.append({"rank": rank, "pid": worker.process.pid, "why": why, "time": time.time()})

    def met(self, generation: Generation, workers: Mapping[int, Worker]) -> None:
        """The members of ``generation`` are at one, or have just been started."""
        if generation.number:
            seconds = round(time.monotonic() - generation.began_s, 3)
            cause = {"generation": generation.number, "cause": generation.told, "workers": len(generation.members)}
            self._job.history.append({**cause, "time": time.time(), "seconds": seconds})
        pids = [{"rank": rank, "pid": workers[id_].process.pid} for rank, id_ in enumerate(generation.members)]
        now = {"generation": generation.number, "workers": pids, "restarts": self._job.restarts}
        self._text = json.dumps({**now, "changes": self._job.history}) + "\n"

    def write(self, run_dir: Path | None) -> None:
        """Writes what is new, once there is a place for it: ``job.record``, or the run's directory."""
        path = self._job.record or (run_dir / "workers.json" if run_dir is not None else None)
        if self._text and path is not None and path.parent.is_dir():
            with contextlib.suppress(OSError):  # a full disk must not end the run
                replace_text(path, self._text)
            self._text = ""
