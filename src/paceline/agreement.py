"""What all workers must have in common, compared before a difference can do harm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, TypeVar

from paceline.config import Identity, Recipe, as_dict
from paceline.determinism import combined, content_digest, flatten_state, tensor_digest
from paceline.errors import CheckpointError, ConfigError, UsageError
from paceline.team import Team

__all__ = ["agreed_digest", "check_data", "check_exchange", "check_recipe", "check_samples", "one_content"]

T = TypeVar("T")


def check_recipe(team: Team, recipe: Recipe) -> None:
    """Workers with other recipes would wait for each other in the wrong places. Collective.

    Raises:
        ConfigError: names the first field that differs.
    """
    mine = as_dict(recipe)
    first, *others = [Identity.of(theirs) for theirs in _with_mine(team.gather(mine, "paceline.Run"), mine)]
    for rank, theirs in enumerate(others, start=1):
        for name in sorted({*first.fields, *theirs.fields}):
            if first.fields.get(name) != theirs.fields.get(name):
                raise ConfigError(
                    "cannot start the run",
                    found=f"{name}={first.fields.get(name)} on worker 0, {theirs.fields.get(name)} on worker {rank}",
                    needed="one recipe on all workers",
                    fix="Make the recipe without looking at the rank, the clock or the machine",
                )


def check_samples(samples: Sequence[int]) -> None:
    """Raises `UsageError` when the workers' datasets to evaluate have unlike lengths, which are given in rank order."""
    others = [rank for rank, theirs in enumerate(samples) if theirs != samples[0]]
    if others:
        raise UsageError(
            "the workers' datasets differ",
            found=f"{samples[0]} samples on worker 0, {samples[others[0]]} on worker {others[0]}",
            needed="the same dataset on every worker: Paceline deals the samples",
            fix="Give run.evaluate the whole dataset on every worker, not a part by rank",
        )


def check_data(team: Team, data: Mapping[str, Any], before: Mapping[str, Any] | None, whose: str, call: str) -> None:
    """The same samples on every worker, and as before, as far as their number and a few of them tell. Collective.

    Args:
        data: ``samples`` and ``content``, a digest of a few of them.
        before: the same of what the run has trained on so far.
        whose: that is, in words: the checkpoint's, or that of the steps before.

    Raises:
        UsageError: another dataset on another worker.
        CheckpointError: not the data of the checkpoint.
    """
    everyone = _with_mine(team.gather(data, call), data)
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
        if before is not None and before[name] != data[name]:
            raise CheckpointError(
                "cannot go on with the run",
                found=f"another dataset, {what}: {data[name]}",
                needed=f"{before[name]}, {whose}",
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
    mine = tuple(map(tuple, layout))
    everyone = _with_mine(team.gather(mine, call), mine)
    others = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    if others:
        raise UsageError(
            "the workers would exchange other gradients",
            found=f"{_in_words(everyone[0])} on worker 0, {_in_words(everyone[others[0]])} on worker {others[0]}",
            needed="the same on every worker",
            fix="Freeze and unfreeze parameters, and set execution.bucket_mib, without looking at the rank",
        )


def _with_mine(everyone: Sequence[T], mine: T) -> list[T]:
    """For comparisons: a worker that comes later is told what the others said without it."""
    return [*everyone, mine]


def _in_words(layout: Sequence[Sequence[int]]) -> str:
    sizes = [size for bucket in layout for size in bucket]
    return f"{len(sizes)} trainable parameters of {sum(sizes):,} numbers in {len(layout)} buckets"


def one_content(digests: Set[str]) -> str:
    """The digest of the same samples, read several times.

    Raises:
        UsageError: they were not the same each time.
    """
    if len(digests) > 1:
        raise UsageError(
            "cannot deal the samples",
            found="samples that differ when they are read again",
            needed="a sample to be a function of its number and epoch: who reads it, and when, depends on the workers",
            fix="Draw random numbers in the dataset from torch, numpy.random or random themselves, which are seeded "
            "for each sample, not from a generator that it keeps; and keep no counters in it",
        )
    (digest,) = digests
    return digest


def agreed_digest(team: Team, states: Mapping[str, Any], call: str) -> tuple[str, dict[str, str]]:
    """The digest of all tensors in ``states``, the same on all workers, and each one's. Collective.

    Raises:
        UsageError: they differ, or numbers and text in the states do.
    """
    digests = {name: tensor_digest(name, tensor) for name, tensor in flatten_state(states)}
    whole = combined(digests)
    everyone = team.gather((whole, content_digest(states, tensors=False)), call)
    if len(set(everyone)) > 1:
        raise UsageError(
            "the workers' states differ",
            found=", ".join(f"worker {rank}: {a[:8]} {b[:8]}" for rank, (a, b) in enumerate(everyone)),
            needed="one digest of tensors, and one of all else",
            fix="State that a step changes must be tracked, and changed alike on every worker",
        )
    return whole, digests
