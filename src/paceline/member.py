"""Who a worker is among the others, and what all of them say together: the part of a run that trains nothing."""

from __future__ import annotations

import math
import operator
from typing import SupportsFloat, TypeVar

from paceline.callsite import calling
from paceline.errors import UsageError
from paceline.team import Team

__all__ = ["Member"]

T = TypeVar("T")


class Member:
    """One worker of ``team``."""

    def __init__(self, team: Team) -> None:
        self.team = team

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self.team.rank

    @property
    def world_size(self) -> int:
        """Workers of the team."""
        return self.team.world_size

    @property
    def local_rank(self) -> int:
        """This worker's number on its machine."""
        return self.team.local_rank

    @property
    def is_main(self) -> bool:
        """Whether this is worker 0, the one that writes. Never decide about training with it."""
        return self.team.rank == 0

    def print(self, *values: object) -> None:
        """`print`, once for the team."""
        if self.is_main:
            print(*values, flush=True)

    def gather(self, value: T) -> list[T]:
        """``value`` of every worker, in the order of their ranks: anything that can be pickled. Collective."""
        return self.team.gather(value, calling("run.gather"))

    def barrier(self) -> None:
        """Returns when every worker has called it. Collective."""
        self.team.barrier(calling("run.barrier"))

    def sum(self, value: int) -> int:
        """The sum of an integer over all workers, exact. Collective.

        Raises:
            UsageError: a float. Its sum would depend on the workers; `evaluate` and the steps add up floats by lane.
        """
        number = _whole_number(value)
        return sum(self.team.gather(number, calling("run.sum")))

    def max(self, value: float) -> float:
        """The largest of all workers' numbers; NaN if one is NaN. Collective."""
        if isinstance(value, str) or not isinstance(value, SupportsFloat):
            raise UsageError(
                "cannot compare over workers",
                found=f"{value!r} ({type(value).__name__})",
                needed="a number",
                fix="Use run.gather for other values",
            )
        numbers = self.team.gather(value, calling("run.max"))
        return math.nan if any(number != number for number in numbers) else max(numbers)


def _whole_number(value: object) -> int:
    """What can be added over workers to the same sum whoever adds: an integer of whatever kind. Not collective.

    Raises:
        UsageError: it is none.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(
            "cannot add up over workers",
            found=f"{value!r} ({type(value).__name__})",
            needed="an integer: a sum of floats would depend on the number of workers",
            fix="Count in integers, or return (sum, weight) from the function of run.evaluate: it adds up by lane",
        ) from None
