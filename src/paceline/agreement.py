"""What all workers must have in common, compared before a difference can do harm. Collective unless said."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.config import Identity, Recipe, as_dict
from paceline.determinism import combined, tensor_digest
from paceline.errors import CheckpointError, ConfigError, UsageError
from paceline.team import Team

__all__ = ["agreed_digest", "check_data", "check_exchange", "check_recipe", "whole_number"]


def whole_number(value: object) -> int:
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


def check_recipe(team: Team, recipe: Recipe) -> None:
    """Workers with other recipes would wait for each other in the wrong places.

    Raises:
        ConfigError: names the first field that differs.
    """
    everyone = [Identity.of(theirs) for theirs in team.gather(as_dict(recipe), "paceline.Run")]
    for rank, theirs in enumerate(everyone):
        for name in sorted(theirs.fields):
            if theirs.fields[name] != everyone[0].fields.get(name):
                raise ConfigError(
                    "cannot start the run",
                    found=f"{name}={everyone[0].fields.get(name)} on worker 0, {theirs.fields[name]} on worker {rank}",
                    needed="one recipe on all workers",
                    fix="Make the recipe without looking at the rank, the clock or the machine",
                )


def check_data(team: Team, data: Mapping[str, Any], saved: Mapping[str, Any] | None, call: str) -> None:
    """The same samples on every worker, and after a resume, as far as their number and a few of them tell.

    Args:
        data: ``samples`` and ``content``, a digest of a few of them.
        saved: the same of the checkpoint that the run goes on from.

    Raises:
        UsageError: another dataset on another worker.
        CheckpointError: not the data of the checkpoint.
    """
    everyone = team.gather(data, call)
    for name, what in (("samples", "samples"), ("content", "content of the first sample and some others")):
        others = [rank for rank, theirs in enumerate(everyone) if theirs[name] != everyone[0][name]]
        if others:
            raise UsageError(
                "the workers' datasets differ",
                found=f"{what}: {everyone[0][name]} on worker 0, {everyone[others[0]][name]} on worker {others[0]}",
                needed="the same dataset on every worker: Paceline deals the samples",
                fix="Give run.steps the whole dataset, not a part by rank; if it is made of random numbers, seed them "
                "first; and draw those of a sample from torch, numpy.random or random, which are seeded for each",
            )
        if saved is not None and saved[name] != data[name]:
            raise CheckpointError(
                "cannot resume",
                found=f"another dataset, {what}: {data[name]}",
                needed=f"{saved[name]}, as the checkpoint's",
                fix="Train on the same data, or start another run from these weights with recipe.init_from",
                cause="usage",
            )


def check_exchange(team: Team, layout: Sequence[Sequence[int]], call: str) -> None:
    """The same gradients in the same buckets on every worker.

    Args:
        layout: for each bucket the sizes of its parameters.

    Raises:
        UsageError: other parameters that require a gradient, or another ``execution.bucket_mib``, on another worker.
    """
    everyone = team.gather(tuple(map(tuple, layout)), call)
    others = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    if others:
        raise UsageError(
            "the workers would exchange other gradients",
            found=f"{_in_words(everyone[0])} on worker 0, {_in_words(everyone[others[0]])} on worker {others[0]}",
            needed="the same on every worker",
            fix="Freeze and unfreeze parameters, and set execution.bucket_mib, without looking at the rank",
        )


def _in_words(layout: Sequence[Sequence[int]]) -> str:
    sizes = [size for bucket in layout for size in bucket]
    return f"{len(sizes)} trainable parameters of {sum(sizes):,} numbers in {len(layout)} buckets"


def agreed_digest(team: Team, tensors: Mapping[str, Tensor], call: str) -> tuple[str, dict[str, str]]:
    """The digest of ``tensors``, the same on all workers, and each one's.

    Raises:
        UsageError: they differ.
    """
    digests = {name: tensor_digest(name, tensor) for name, tensor in tensors.items()}
    whole = combined(digests)
    everyone = team.gather(whole, call)
    if len(set(everyone)) > 1:
        raise UsageError(
            "the workers' states differ",
            found=", ".join(f"worker {rank}: {value[:12]}" for rank, value in enumerate(everyone)),
            needed="one digest",
            fix="State that a step changes must be tracked, and changed alike on every worker",
        )
    return whole, digests
