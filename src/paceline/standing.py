"""Where a run stands: what a checkpoint keeps of it, and what a worker takes over that is behind the others, or new."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint import Loaded, Snapshot
from paceline.determinism import content_digest
from paceline.loop import Loop
from paceline.tracked import Changes, Tracked

__all__ = ["Standing"]


@dataclass(kw_only=True)
class Standing:
    """Of one run, on one worker. Equal on all workers between two steps.

    Args:
        tracked: the objects that train.
        position: finished steps.
        metrics: held-out ones of this position.
        data: what the data trained on is known by, see `Loop.check_alike`; ``None``: there was none yet.
        data_of: whose that is, in words.
        saved: the newest checkpoint that was waited for.
        loop: the loop over the steps that is at work.
    """

    tracked: Tracked
    position: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    data: dict[str, Any] | None = None
    data_of: str = "that of the steps before"
    saved: Path | None = None
    loop: Loop | None = None

    def snapshot(self) -> Snapshot:
        """A copy of all that a checkpoint keeps."""
        return Snapshot.take(
            step=self.position, states=self.tracked.states(), position={"data": self.data}, metrics=self.metrics
        )

    def restore(self, loaded: Loaded) -> None:
        """From a checkpoint."""
        self.tracked.load(loaded.states)
        self.position, self.saved, self.metrics = loaded.step, loaded.path, dict(loaded.metrics)
        self.data, self.data_of = loaded.position["data"], "the checkpoint's"

    def pack(self) -> Any:
        """For another worker; the tensors in it are the run's own. Between two phases: before a step's update, or right
        behind it."""
        loop = self.loop and (self.loop.position, self.loop.phases, self.loop.finished)
        return self.tracked.states(), loop, (self.position, self.metrics, self.data, self.saved)

    def unpack(self, packed: Any) -> None:
        """Takes over what another worker has packed."""
        states, loop, (self.position, self.metrics, self.data, self.saved) = packed
        self.tracked.load(states)
        if self.loop is not None and loop is not None:
            self.loop.position, self.loop.phases, self.loop.finished = loop

    def changes(self) -> Changes:
        """See `Tracked.changes`."""
        return self.tracked.changes()

    def digest(self) -> str:
        """Of all that trains, as it is now."""
        return content_digest(self.tracked.states())
