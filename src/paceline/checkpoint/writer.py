"""Saving in the background: training waits for the copy in memory, not for the disk."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from paceline.checkpoint.pack import Snapshot
from paceline.checkpoint.store import Store
from paceline.config import Identity
from paceline.errors import CheckpointError

__all__ = ["Saved", "Writer"]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that was committed: its step, its directory, and the seconds that writing took."""

    step: int
    path: Path
    seconds: float


class Writer:
    """One background thread around `Store.save`, at most one save at a time. Used by the one worker that saves.

    Args:
        store: where checkpoints go.
        timeout_s: a save that takes longer is an error of whoever waits for it.

    >>> import tempfile
    >>> with Writer(Store(Path(tempfile.mkdtemp()))) as writer:
    ...     writer.start(Snapshot(step=1, states={}, position={}), Identity.of({}))
    ...     writer.wait()
    ...     writer.outcome().path.name
    'step-00000001'
    """

    def __init__(self, store: Store, *, timeout_s: float = 1800.0) -> None:
        self.store = store
        self.timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._outcomes: deque[Saved | CheckpointError] = deque()

    def start(self, snapshot: Snapshot, identity: Identity) -> None:
        """Begins to write ``snapshot``; waits first if the one before is still being written.

        Raises:
            CheckpointError: the one before has not ended within ``timeout_s``.
        """
        self.wait()
        # Not a daemon: an interpreter that ends lets the save end first.
        name = f"checkpoint of step {snapshot.step}"
        self._thread = threading.Thread(target=self._save, args=(snapshot, identity), name=name, daemon=False)
        self._thread.start()

    def outcome(self) -> Saved | CheckpointError | None:
        """How the oldest save that ended since the last call went; None if there is none. Never waits.

        An error is returned, not raised: all workers must learn of it before anyone stops.
        """
        return self._outcomes.popleft() if self._outcomes else None

    def wait(self) -> None:
        """Returns when nothing is being written. How it went is still `outcome`'s to say.

        Raises:
            CheckpointError: it has not ended within ``timeout_s``.
        """
        if self._thread is None:
            return
        self._thread.join(self.timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(
                f"cannot finish the {self._thread.name}",
                found=f"it is still being written after {self.timeout_s:.0f} s more",
                needed="a disk that takes it",
                fix=f"Check the disk that holds {self.store.directory}; the checkpoints before this one are untouched",
            )
        self._thread = None

    def close(self) -> None:
        """Lets the save in progress end, as `wait`."""
        self.wait()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _save(self, snapshot: Snapshot, identity: Identity) -> None:
        begun = time.monotonic()
        try:
            path = self.store.save(snapshot, identity)
            outcome: Saved | CheckpointError = Saved(step=snapshot.step, path=path, seconds=time.monotonic() - begun)
        except CheckpointError as error:
            outcome = error
        except Exception as error:
            # Whatever it is, the other workers must hear of it, and a thread has nobody to raise it to.
            outcome = CheckpointError(
                f"cannot save the checkpoint of step {snapshot.step}",
                found=f"{type(error).__name__}: {error}",
                needed="a state that can be written",
                fix="The traceback is this error's __cause__; the checkpoints before this one are untouched",
            )
            outcome.__cause__ = error
        self._outcomes.append(outcome)
