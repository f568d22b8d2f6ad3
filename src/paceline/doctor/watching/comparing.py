"""N ranks against one: a script is run twice more for a few steps, the second time with one worker that is given, batch
for batch, the samples that the ranks have drawn. What both come to is judged in `compared`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from paceline.doctor.lines import named, shown
from paceline.doctor.watching.compared import compared, without_norms
from paceline.doctor.watching.comparison import Comparison, Shown
from paceline.doctor.watching.evidence import count
from paceline.doctor.watching.following import follow
from paceline.doctor.watching.judging import judge, may_need_gpus
from paceline.doctor.watching.launching import names_gpus, rank_option
from paceline.doctor.watching.limits import Limits
from paceline.doctor.watching.ranks import Gpus, started
from paceline.doctor.watching.records import Account, Run
from paceline.doctor.watching.scratch import scratched

__all__ = ["compare"]

_STEPS: Final = 3
"""All that goes wrong in a step shows in the first one, but for what takes a turn of its own now and then."""


def compare(
    script: Path, arguments: Sequence[str], limits: Limits, *, tell: Callable[[str], None] | None = None
) -> Comparison:
    """Runs ``script`` with some ranks and with one worker, at the same global batch, and compares what they compute.

    Where they differ and a batch norm is in it, both are run again with the norms' running statistics: if they are the
    same then, the norms are all that differs. No process is left behind.

    Args:
        arguments: of the script.
        limits: ``steps`` is not asked: few are enough. ``timeout_s`` is for all of these runs together.
        tell: is told how far they are, whenever that changes.
    """
    runs = _Runs(script, arguments, limits, tell)
    with_ranks, alone = runs.both(still=False)
    seen = _concluded(with_ranks, alone)
    if seen.equal is False and any(record["normed"] for record in with_ranks.all("measured")):
        seen = without_norms(seen, _concluded(*runs.both(still=True)), with_ranks)
    return replace(seen, why=named(seen.why, script), shown=tuple(_as_written(one, script) for one in seen.shown))


def _as_written(one: Shown, script: Path) -> Shown:
    """With the file as the user would write it."""
    place = one.place
    return one if place is None else replace(one, place=replace(place, path=shown(place.path, script)))


class _Runs:
    """The runs that are compared, which share their time."""

    def __init__(
        self, script: Path, arguments: Sequence[str], limits: Limits, tell: Callable[[str], None] | None
    ) -> None:
        self._script, self._arguments, self._limits, self._tell = script, arguments, limits, tell
        self._deadline_s = time.monotonic() + limits.timeout_s
        self._gpus: Gpus = "mapped" if names_gpus(script) else "none"
        self._option = rank_option(script, arguments)

    def both(self, *, still: bool) -> tuple[Run, Run]:
        """With the ranks, and with one worker that is given their samples."""
        several = self._run(self._limits.workers, still, [])
        if self._gpus == "mapped" and may_need_gpus(several):
            self._gpus = "pretended"
            several = self._run(self._limits.workers, still, [])
        if not any(several.all("measured")):
            return several, Run(accounts=[])
        return several, self._run(1, still, _given(several))

    def _run(self, workers: int, still: bool, loaders: list[dict[str, Any]]) -> Run:
        limits = self._limits
        with scratched(self._script, in_place=limits.in_place) as scratch:
            told = scratch.home / "comparing.json"
            told.write_text(json.dumps({"steps": _STEPS, "still": still, "loaders": loaders}))
            given = (self._script, self._arguments, workers, scratch, self._gpus)
            with started(*given, option=self._option, comparing=told) as ranks:
                return follow(ranks, steps=_STEPS, deadline_s=self._deadline_s, tell=self._said(workers))

    def _said(self, workers: int) -> Callable[[str], None] | None:
        tell = self._tell
        return None if tell is None else lambda told: tell(f"comparing {count(workers, 'worker')}: {told}")


def _given(several: Run) -> list[dict[str, Any]]:
    """What the one worker's loaders are to give: as many samples at a time as all ranks together, and these."""
    return [
        {
            "size": record["size"],
            "batch": record["batch"] * several.world if record["batch"] is not None else None,
            "passes": _passes(several, record["loader"]),
        }
        for record in several.accounts[0].of("loader")
    ]


def _passes(several: Run, loader: int) -> list[list[list[int]]]:
    """By pass over a loader the batches of all ranks, put together; as far as all have told of all."""
    each = [_batches(account, loader) for account in several.accounts]
    passes: list[list[list[int]]] = []
    for number in range(min(len(own) for own in each)):
        batches = list(zip(*(own[number] for own in each), strict=False))
        if not batches or any(indices is None for batch in batches for indices in batch):
            break
        passes.append([[index for indices in batch for index in indices or ()] for batch in batches])
    return passes


def _batches(account: Account, loader: int) -> list[list[list[int] | None]]:
    """By pass over a loader the indices of each batch."""
    found: list[list[list[int] | None]] = []
    for record in account.of("pass", "batch"):
        if record["loader"] == loader:
            if record.kind == "pass":
                found.append([])
            elif found:
                found[-1].append(record["indices"])
    return found


def _concluded(several: Run, alone: Run) -> Comparison:
    """What both come to, or why one of them came to nothing."""
    for run, who in ((several, f"with {several.world} ranks"), (alone, "with one worker")):
        if not any(run.all("measured")):
            return Comparison(equal=None, why=f"{who} no step was taken{_failed(run)}")
    return compared(several, alone)


def _failed(run: Run) -> str:
    fault, cannot = next(run.all("fault"), None), judge(run).cannot
    if fault is not None and cannot is None:
        cannot = f"a part of the doctor itself failed in rank {fault.rank}: {fault['text']}"
    return f": {cannot}" if cannot is not None else ""
