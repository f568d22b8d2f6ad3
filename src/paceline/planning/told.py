"""What goes wrong in a user's own task while it is planned, told once and in four beats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from paceline.callsite import raised_at
from paceline.errors import ConfigError, DataError, OutOfMemoryError, PacelineError
from paceline.mistakes import check_loss, checked_weight, known_mistake
from paceline.tasks import Task

__all__ = ["is_too_large", "loss_of", "told"]

_TOO_LARGE = ("Storage size calculation overflowed", "Overflow when unpacking", "too large to convert to C")


@contextmanager
def told(what: str) -> Iterator[None]:
    """Inside it an error of any kind is a mistake in the configuration: in what it names, or in its sizes."""
    try:
        yield
    except (ConfigError, DataError):
        raise
    except Exception as error:
        known = error if isinstance(error, PacelineError) else known_mistake(error, f"the plan of {what}")
        place, text = raised_at(error), " ".join(str(error).split())
        if is_too_large(error) or isinstance(known, OutOfMemoryError):
            asked = known.needed if known is not None else None
            raise ConfigError(
                f"cannot plan {what}",
                found=(f"a tensor of {asked}" if asked else text[:200]) + (f", at {place}" if place else ""),
                needed="sizes that a machine can hold: a plan runs on shapes alone, but for an example of the data and "
                "what shapes cannot run",
                fix="Check the sizes in task.init_args, such as width, vocabulary and context, and recipe.micro_batch",
            ) from error
        if known is not None:
            at = f" At {place}." if place else ""
            raise ConfigError(known.problem, found=known.found, needed=known.needed, fix=f"{known.fix}.{at}") from error
        raise ConfigError(
            f"cannot plan {what}",
            found=f"{type(error).__name__}: {text[:300]}" + (f", at {place}" if place else ""),
            needed="a micro-batch that runs forward and backward",
            fix="Correct that; `paceline train` shows the whole traceback",
        ) from error


def is_too_large(error: Exception) -> bool:
    """Whether it says that a tensor has more bytes, or a size is larger, than torch can count."""
    return any(sign in str(error) for sign in _TOO_LARGE)


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
