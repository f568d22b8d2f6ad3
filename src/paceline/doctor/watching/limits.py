"""How much of a script is run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much of a script is run.

    Args:
        workers: ranks to start.
        steps: of the optimizer, on each rank; then the run is ended.
        timeout_s: seconds for all of it, though it be started twice.
        in_place: the script runs in the working directory as it is, not in a scratch copy of what it writes.
    """

    workers: int = 2
    steps: int = 20
    timeout_s: float = 120.0
    in_place: bool = False
