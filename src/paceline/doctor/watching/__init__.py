"""The run pass: a script is run under a few ranks, with hooks on torch in each, and what they did is judged."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.doctor.findings import Finding
from paceline.doctor.watching.following import Tell, follow
from paceline.doctor.watching.judging import cleared, judge, notes, wants_gpus
from paceline.doctor.watching.ranks import Gpus, started
from paceline.doctor.watching.records import Run
from paceline.doctor.watching.scratch import Scratch
from paceline.doctor.watching.sources import names_gpus

__all__ = ["Tell", "Watched", "watch"]


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What a run has shown.

    Args:
        findings: mistakes that were seen.
        cleared: ids of rules that the run has exercised and seen obeyed.
        notes: what could not be looked at, and why; plain sentences.
        printed: the last that each rank has printed.
    """

    findings: tuple[Finding, ...]
    cleared: frozenset[str]
    notes: tuple[str, ...]
    printed: tuple[str, ...] = ()


def watch(
    script: Path,
    arguments: Sequence[str],
    *,
    workers: int,
    steps: int,
    timeout_s: float,
    in_place: bool,
    tell: Tell | None = None,
) -> Watched:
    """Runs ``script`` under ``workers`` ranks and judges what they did. No process is left behind.

    Args:
        arguments: of the script.
        workers: how many ranks, on this machine.
        steps: of the optimizer, on each rank; then the run is ended.
        timeout_s: seconds for all of it.
        in_place: the script runs in the working directory as it is, and what it writes stays.
        tell: is told how far the ranks are, whenever that changes.
    """
    gpus: Gpus = "mapped" if names_gpus(script) else "none"
    told: list[str] = []
    run = _run(script, arguments, workers, steps, timeout_s, in_place, gpus, tell)
    if gpus == "mapped" and wants_gpus(run):
        gpus = "pretended"
        run = _run(script, arguments, workers, steps, timeout_s, in_place, gpus, tell)
    if any(True for _ in run.all("device")):
        told.append("the script asks for GPUs: the run pass did on the CPU what it asks of them")
    shown = [replace(finding, path=_shown(finding.path, script)) for finding in judge(run)]
    return Watched(
        findings=tuple(shown),
        cleared=cleared(run),
        notes=(*told, *notes(run)),
        printed=tuple(account.tail for account in run.accounts),
    )


def _run(
    script: Path,
    arguments: Sequence[str],
    workers: int,
    steps: int,
    timeout_s: float,
    in_place: bool,
    gpus: Gpus,
    tell: Tell | None,
) -> Run:
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as home:
        scratch = Scratch(Path(home), in_place)
        scratch.place(Path.cwd(), script.parent)
        with started(script, arguments, workers, scratch, gpus) as ranks:
            return follow(ranks, steps=steps, timeout_s=timeout_s, tell=tell)


def _shown(path: str, script: Path) -> str:
    """A file as the user would write it: like the script itself."""
    if Path(path) == script.resolve():
        return str(script)
    if not script.is_absolute() and Path(path).is_relative_to(Path.cwd()):
        return str(Path(path).relative_to(Path.cwd()))
    return path
