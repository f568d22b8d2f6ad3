"""What goes wrong in a user's own task while it is planned, told once and in four beats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from paceline.callsite import raised_at
from paceline.errors import ConfigError, DataError, PacelineError
from paceline.mistakes import check_loss, checked_weight, known_mistake
from paceline.tasks import Task

__all__ = ["loss_of", "told"]


@contextmanager
def told(what: str) -> Iterator[None]:
    """Inside it an error of any kind is a mistake in the configuration: in what it names, or in its sizes."""
    try:
        yield
    except (ConfigError, DataError):
        raise
    except Exception as error:
        known = error if isinstance(error, PacelineError) else known_mistake(error, f"the plan of {what}")
        place = raised_at(error)
        if known is not None:
            at = f" At {place}." if place else ""
            raise ConfigError(known.problem, found=known.found, needed=known.needed, fix=f"{known.fix}.{at}") from error
        text = " ".join(str(error).split())
        raise ConfigError(
            f"cannot plan {what}",
            found=f"{type(error).__name__}: {text[:300]}" + (f", at {place}" if place else ""),
            needed="a micro-batch that runs forward and backward",
            fix="Correct that; `paceline train` shows the whole traceback",
        ) from error


def loss_of(task: Task, model: nn.Module, batch: Any) -> Tensor:
    """The task's loss, checked as a run does."""
    returned: object = task.loss(model, batch)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ConfigError(
            f"cannot use the loss of {type(task).__name__}",
            found="a tensor alone" if isinstance(returned, Tensor) else f"a {type(returned).__name__}",
            needed="a pair: the sum over the micro-batch, and how many samples or tokens are in it",
            fix="Return loss, len(batch)",
        )
    loss, weight = returned
    check_loss(loss)
    checked_weight(weight)
    return cast(Tensor, loss)
