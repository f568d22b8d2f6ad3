"""The checkpoints of a run: written by worker 0 alone, and how that went is known to all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

from paceline.checkpoint import Loaded, Saved, Snapshot, Store, Writer
from paceline.config import Execution, Identity, Resume
from paceline.errors import CheckpointError, ConfigError, TeamError, did_you_mean
from paceline.events import EventLog
from paceline.run_dir import prepare_run_dir
from paceline.team import Team

__all__ = ["Saves", "checked_resume", "claim"]


def checked_resume(resume: Resume | None, execution: Execution) -> Resume | None:
    """``resume`` as it is.

    Raises:
        ConfigError: no such way, or nowhere to resume from.
    """
    choices = get_args(Resume)
    if resume is not None and resume not in choices:
        raise ConfigError(
            "cannot start the run",
            found=f"resume={resume!r}",
            needed=" or ".join(choices),
            fix=did_you_mean(str(resume), choices),
        )
    if resume == "must" and execution.run_dir is None:
        raise ConfigError(
            "cannot resume",
            found="no run directory",
            needed="the one of the run to go on with",
            fix="Pass paceline.Execution(run_dir=...)",
        )
    return resume


def claim(run_dir: Path, resume: Resume, team: Team) -> None:
    """Worker 0 looks at the run directory; all go on, or none. Collective.

    Raises:
        ConfigError: as `prepare_run_dir`; on the other workers a `TeamError`, its echo.
    """
    refusal: ConfigError | None = None

    def look() -> bool:
        nonlocal refusal
        if team.rank == 0:
            try:
                prepare_run_dir(run_dir, resume)
            except ConfigError as error:
                refusal = error
        return refusal is not None

    if any(team.agree(look, "paceline.Run")):
        raise refusal or TeamError("worker 0 refused the run directory", fix="See its error")


class Saves:
    """Saving in the background on the one worker that writes, and restoring on all of them."""

    def __init__(self, run_dir: Path, execution: Execution, team: Team, events: EventLog) -> None:
        self._run_dir, self._team, self._events = run_dir, team, events
        self._store = Store(run_dir / "checkpoints", keep=execution.keep, keep_best=execution.keep_best)
        self._timeout_s = execution.timeout_s
        self._writer: Writer | None = None
        self._step = 0
        self.take_over()
        self._newest: Path | None = None
        self._failure: CheckpointError | None = None

    def take_over(self) -> bool:
        """Whether this worker has become worker 0, and writes from now on. Not collective."""
        if self._writer is not None or self._team.rank != 0:
            return False
        # A disk that hangs is this worker's error before the others' wait for it is theirs.
        self._writer = Writer(self._store, timeout_s=self._timeout_s / 2)
        return True

    def save_again(self, step: int, take: Callable[[], Snapshot], identity: Identity) -> None:
        """Begins anew what a lost worker 0 may have left unfinished, if the state is still that of ``step``."""
        if self._step == step and step and not self._store.has(step):
            self._begin(step, take, identity)

    def load(self, identity: Identity, resume: Resume, call: str) -> Loaded | None:
        """The newest good checkpoint if there is one and ``resume`` allows it, the same on all workers. Collective.

        Raises:
            CheckpointError: the workers see other checkpoints, or there is none and ``resume`` is ``must``.
        """
        # What a worker loads that takes a lost one's place is the others' state.
        loaded = None if resume == "never" or self._team.replaying else self._store.load(identity)
        found = self._team.gather((loaded.step, loaded.path.name) if loaded else None, call)
        if len(set(found)) > 1:
            raise CheckpointError(
                "cannot resume",
                found=f"other checkpoints on other workers: {found}",
                needed="one run directory that all workers share",
                fix="Put the run directory on a shared file system",
            )
        if found[0] is None and resume == "must":
            raise CheckpointError(
                "cannot resume",
                found=f"no checkpoint in {self._run_dir}",
                needed="one, for --resume must",
                fix="Use --resume auto to start afresh where there is none",
                cause="usage",
            )
        for line in loaded.passed_over if loaded else ():
            name, _, why = line.partition(": ")
            self._events.emit("passed_over", what=name, why=why)
        return loaded

    def save(
        self, step: int, take: Callable[[], Snapshot], identity: Identity, *, wait: bool, call: str
    ) -> Path | None:
        """Writes what ``take`` copies after ``step`` finished steps, on worker 0. Collective if ``wait``.

        Returns:
            The checkpoint's directory if ``wait``, on every worker.

        Raises:
            CheckpointError: it could not be written; on the other workers a `TeamError`, its echo.
        """
        self._step = step
        if not wait:
            self._begin(step, take, identity)
            return None

        def write() -> tuple[bool, Path | None]:
            before = self._team.pulse.enter("save")
            self._begin(step, take, identity)
            failed = self.finished()
            self._team.pulse.enter(before)
            return failed, self._newest

        failed, path = self._team.agree(write, call)[0]
        if failed:
            self.raise_failure()
        return path

    def _begin(self, step: int, take: Callable[[], Snapshot], identity: Identity) -> None:
        if self._writer is not None:
            try:
                self._writer.start(take(), identity)
            except CheckpointError as error:  # raised when the others know of it too
                self._note_failure(error)
            self._team.fire("save", step=step)

    def failed(self) -> bool:
        """On the worker that writes: whether a save has failed. Notes those that went well in the log."""
        while self._writer is not None and (outcome := self._writer.outcome()) is not None:
            if isinstance(outcome, Saved):
                self._newest = outcome.path
                self._events.emit("checkpoint", step=outcome.step, seconds=outcome.seconds, path=str(outcome.path))
            else:
                self._note_failure(outcome)
        return self._failure is not None

    def finished(self) -> bool:
        """`failed`, once the save in progress has ended."""
        if self._writer is not None:
            try:
                self._writer.wait()
            except CheckpointError as error:
                self._note_failure(error)
        return self.failed()

    def raise_failure(self) -> None:
        """The writer's own error on the worker that writes; the others only know that there was one."""
        failure, self._failure = self._failure, None
        raise failure or TeamError("worker 0 could not save a checkpoint", fix="See its error")

    def close(self) -> None:
        """Lets the save in progress end."""
        if self._writer is not None:
            self._writer.close()

    def _note_failure(self, error: CheckpointError) -> None:
        self._events.emit("checkpoint", step=self._step, error=str(error))
        self._failure = error
