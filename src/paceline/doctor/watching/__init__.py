"""The run pass: a script is run under a few ranks, with hooks on torch in each, and what they did is judged."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.doctor.circumstances import Circumstances
from paceline.doctor.findings import Finding, Obeyed
from paceline.doctor.lines import named, shown
from paceline.doctor.watching.following import follow
from paceline.doctor.watching.judging import judge, may_need_gpus, wants_gpus
from paceline.doctor.watching.launching import names_gpus, rank_option
from paceline.doctor.watching.limits import Limits
from paceline.doctor.watching.ranks import Gpus, started
from paceline.doctor.watching.records import Run
from paceline.doctor.watching.scratch import scratched

__all__ = ["Limits", "Watched", "watch"]


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What a run has shown.

    Args:
        findings: mistakes that were seen; those, too, that follow from others.
        obeyed: rules that the run has exercised and seen obeyed.
        notes: what could not be looked at, and why; plain sentences.
        cannot: why there was nothing to look at, the one of the notes that says so; ``None``: there was.
        printed: the last that each rank has printed.
    """

    findings: tuple[Finding, ...] = ()
    obeyed: tuple[Obeyed, ...] = ()
    notes: tuple[str, ...] = ()
    cannot: str | None = None
    printed: tuple[str, ...] = ()


def watch(
    script: Path,
    arguments: Sequence[str],
    limits: Limits,
    *,
    circumstances: Circumstances | None = None,
    tell: Callable[[str], None] | None = None,
) -> Watched:
    """Runs ``script`` under a few ranks and judges what they did. No process is left behind.

    Args:
        arguments: of the script.
        circumstances: what reading has understood of its lines; ``None``: it was not read.
        tell: is told how far the ranks are, whenever that changes.
    """
    deadline_s = time.monotonic() + limits.timeout_s
    gpus: Gpus = "mapped" if names_gpus(script) else "none"
    option = rank_option(script, arguments)

    def run_with(gpus: Gpus) -> Run:
        if tell is not None:
            tell(f"starting {limits.workers} workers")
        with (
            scratched(script, in_place=limits.in_place) as scratch,
            started(script, arguments, limits.workers, scratch, gpus, option=option) as ranks,
        ):
            return follow(ranks, steps=limits.steps, deadline_s=deadline_s, tell=tell)

    run = run_with(gpus)
    if gpus == "mapped" and may_need_gpus(run) and time.monotonic() < deadline_s:
        gpus = "pretended"
        run = run_with(gpus)
    verdict = judge(replace(run, circumstances=circumstances or Circumstances()))
    notes, cannot = verdict.notes, verdict.cannot
    if any(run.all("device")):
        told = ", and it was told that there are some" if gpus == "pretended" else ""
        notes = (f"the script asks for GPUs: what it asks of them was done on the CPU{told}", *notes)
        if cannot is not None and wants_gpus(run):
            excused = f"{cannot} (where the CPU stood in for a GPU, which cannot be done for all that a GPU does)"
            notes, cannot = tuple(excused if note == cannot else note for note in notes), excused
    if option is not None:
        notes = (
            f"each rank was given {option}, which the script declares, as by torch.distributed.launch; torchrun gives "
            "none: read LOCAL_RANK from the environment instead",
            *notes,
        )
    return Watched(
        findings=tuple(_named(finding, script) for finding in verdict.findings),
        obeyed=tuple(
            replace(obeyed, path=shown(obeyed.path, script)) if obeyed.path else obeyed for obeyed in verdict.obeyed
        ),
        notes=tuple(named(note, script) for note in notes),
        cannot=named(cannot, script) if cannot is not None else None,
        printed=tuple(account.tail for account in run.accounts),
    )


def _named(finding: Finding, script: Path) -> Finding:
    """With its files as the user would write them."""
    also = tuple((shown(path, script), line) for path, line in finding.also)
    return replace(finding, path=shown(finding.path, script), also=also)
