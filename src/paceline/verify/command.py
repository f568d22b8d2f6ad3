"""The command itself."""

from __future__ import annotations

import dataclasses
import math
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torch import Tensor

from paceline import env
from paceline.config import Recipe
from paceline.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from paceline.faults import Faults
from paceline.parsing import Settings
from paceline.supervisor import Template
from paceline.verify import record
from paceline.verify.runs import Recompute, Variation, run, shown
from paceline.verify.table import Display, conclusion, same
from paceline.verify.trace import first_difference, weight_gap

__all__ = ["verify"]

_LEGS = 3
"""Of an interrupted run: stopped twice."""


def verify(
    settings: Settings,
    template: Template,
    *,
    workers: Sequence[int],
    steps: int | None = None,
    interrupt: bool = False,
    faults: Faults | None = None,
    recompute: Sequence[Recompute] = (),
    out: Path | None = None,
) -> int:
    """Runs ``settings`` once with each number of workers, prints how the bits compare, and writes the proof.

    Each run starts from scratch, in a directory of its own. Nothing of the recipe is touched, the schedule neither: a
    run of fewer steps is the beginning of the whole one.

    Args:
        template: an open one, from which all workers are forked.
        workers: worker counts; the first is the reference.
        steps: how many; ``None``: all, or up to ``execution.stop_at``.
        interrupt: beside each run, another one that is stopped twice on its way and resumed on the next worker counts
            of the list. The undisturbed ones are needed too: what every resume does wrong alike would show in no
            comparison of resumed runs.
        faults: beside each run that has the workers for them, another one that meets them, and that does not count
            unless it has met every one. ``None``: those of ``execution.faults``, if any.
        recompute: ways to recompute (``"all"``, ``["blocks.0"]``, ...): beside each run, another one with each of them.
        out: new or empty directory for the proof and the runs. ``None``: the proof goes to ``<run_dir>-verify``, and
            the runs stay there only when their bits differ.

    Returns:
        0 when all bits agree, 1 when not, the exit code of a variation that failed.

    Raises:
        ConfigError: a list of workers, or a number of steps, from which nothing can be learned; or this process is
            itself a worker.
        PacelineError: a variation's own log does not show that it ran as asked.
    """
    if (here := env.read()) is not None:
        raise ConfigError(
            "cannot verify as a worker",
            found=f"RANK={here.rank}, WORLD_SIZE={here.world_size}",
            needed="an environment without a team: the runs have their own workers",
            fix="Start it without torchrun or srun, or unset RANK and WORLD_SIZE",
        )
    faults = Faults.parse(settings.execution.faults) if faults is None else faults
    if "auto" in recompute and settings.execution.memory is None:
        raise ConfigError(
            "cannot verify --recompute auto",
            found="no execution.memory, and so nothing that must be recomputed",
            needed="a budget that is less than the run needs without",
            fix="Add --execution.memory 400MiB; `paceline plan` shows what is needed",
        )
    for place, way in enumerate(recompute):
        dataclasses.replace(settings.execution, recompute=way).check(settings.recipe)
        if way in recompute[:place]:
            raise ConfigError(
                "cannot verify the run",
                found=f"--recompute {shown(way)} twice",
                needed="each way once",
                fix="Leave out the second",
            )
    more = interrupt or bool(recompute) or bool(faults.statements)
    _check(settings.recipe, workers, steps, interrupt, more)
    steps = steps or settings.execution.stop_at
    _check_faults(faults, settings.recipe, workers, steps)
    home = out or settings.run_dir.with_name(f"{settings.run_dir.name}-verify")
    runs = _prepare(home, keep=out is not None)
    variations = list(_variations(runs, workers, interrupt, faults, recompute))
    reference = variations[0]
    length = f"{steps} steps" if steps else "the whole length"
    print(f"{settings.run_dir.name}: {len(variations)} runs of {length} on {settings.recipe.lanes} lanes", flush=True)
    if few := [count for count in workers if count < faults.workers]:
        print(f"not with the faults: workers {', '.join(map(str, few))}; they need {faults.workers}", flush=True)
    display = Display([variation.name for variation in variations], faults=bool(faults.statements))
    with _removed_when_interrupted(runs if out is None else None), display:
        for variation in variations:
            display.begin(variation)
            code = run(variation, settings, steps, template)
            if code != EXIT_DONE:
                display.end(variation, "failed")
                break
            steps = len(reference.trace)
            if variation is reference:
                # Known by now even when the recipe counts epochs.
                _check(settings.recipe, workers, steps, interrupt, more)
                _check_faults(faults, settings.recipe, workers, steps)
            variation.difference = first_difference(reference.trace, variation.trace)
            display.end(variation, "-" if variation is reference else same(variation.difference))
    if code != EXIT_DONE:
        said = variation.errors.read_text(errors="replace").rstrip()
        print(f"{said}\npaceline: that was the run with workers {variation.name}, kept in {runs}", file=sys.stderr)
        return code
    different = [variation for variation in variations if variation.difference is not None]
    for variation in different:
        variation.weights = weight_gap(_weights(reference), _weights(variation))
    record.write(home / "proof.json", variations)
    print("\n".join(conclusion(variations, settings.recipe)))
    if different or out is not None:
        print(f"runs: {runs}")
    else:
        shutil.rmtree(runs)
    print(f"proof: {home / 'proof.json'}", flush=True)
    return EXIT_FAILED if different else EXIT_DONE


def _variations(
    runs: Path, workers: Sequence[int], interrupt: bool, faults: Faults, recompute: Sequence[Recompute]
) -> Iterator[Variation]:
    paths: list[tuple[int, ...]] = [(count,) for count in workers]
    if interrupt:
        paths += [tuple(workers[(i + leg) % len(workers)] for leg in range(_LEGS)) for i in range(len(workers))]
    for path in paths:
        yield Variation(workers=path, run_dir=runs / "-".join(map(str, path)))
    for count in workers:
        for place, way in enumerate(recompute, start=1):
            name = way.replace(":", "-") if isinstance(way, str) else f"way-{place}"
            yield Variation(workers=(count,), run_dir=runs / f"{count}-recompute-{name}", recompute=way)
    for count in workers:
        if faults.statements and count >= faults.workers:
            yield Variation(workers=(count,), run_dir=runs / f"{count}-faults", faults=faults)


def _check(recipe: Recipe, workers: Sequence[int], steps: int | None, interrupt: bool, more: bool) -> None:
    """``more``: each run has others beside it, with the same workers."""
    listed = ",".join(map(str, workers))
    twice = [count for i, count in enumerate(workers) if count in workers[:i]]
    fewest = _LEGS if interrupt else 1
    longest = recipe.steps if recipe.steps is not None else math.inf
    mistakes = [
        (not workers, "no worker counts", "two or more", "Use --workers 1,2"),
        (bool(twice), f"--workers {listed}", "each number once", f"Leave out the second {twice[:1]}"),
        (
            not all(1 <= count <= recipe.lanes for count in workers),
            f"--workers {listed}, lanes={recipe.lanes}",
            "1 <= workers <= lanes",
            f"Use numbers from 1 to {recipe.lanes}",
        ),
        (
            len(workers) == 1 and not more,
            f"--workers {listed}, one run and nothing to compare it with",
            "at least two runs",
            "Use --workers 1,2, or add --interrupt, --faults or --recompute to compare a run with itself",
        ),
        (
            steps is not None and not fewest <= steps <= longest,
            f"--steps {steps}",
            f"{fewest} or more" + (f", up to the run's own {longest}" if longest < math.inf else ""),
            f"Use --steps {min(20, longest)}",
        ),
    ]
    for wrong, found, needed, fix in mistakes:
        if wrong:
            raise ConfigError("cannot verify the run", found=found, needed=needed, fix=fix)


def _check_faults(faults: Faults, recipe: Recipe, workers: Sequence[int], steps: int | None) -> None:
    last = min((known for known in (steps, recipe.steps) if known is not None), default=None)
    faults.check(workers=max(workers), lanes=recipe.lanes, steps=last)
    if fatal := [str(fault) for fault in faults.statements if fault.action == "raise"]:
        raise ConfigError(
            "cannot verify the run",
            found=f"{fatal[0]!r}, and an exception ends every run at once",
            needed="faults that a run survives",
            fix=f"Leave it out, or see what it does: paceline train --execution.faults {fatal[0]!r}",
        )


def _prepare(home: Path, *, keep: bool) -> Path:
    """Makes ``home``, without an old proof in it; returns where the runs go."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        there = sorted(entry.name for entry in home.iterdir())
        if not keep:
            (home / "proof.json").unlink(missing_ok=True)
            return Path(tempfile.mkdtemp(prefix="runs-", dir=home))
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot use {home}",
            found=error.strerror,
            needed="a directory that can be written",
            fix="Use another --out",
        ) from None
    if there:
        raise ConfigError(
            f"cannot use {home}",
            found=f"{', '.join(there[:3])}{', ...' if len(there) > 3 else ''} there",
            needed="a new or empty directory: nothing old may count as proof",
            fix="Use another --out",
        )
    return home


@contextmanager
def _removed_when_interrupted(runs: Path | None) -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, and both take ``runs`` away."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if runs is not None:
            shutil.rmtree(runs)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _weights(variation: Variation) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = variation.checkpoint("model").states["model"]
    return weights
