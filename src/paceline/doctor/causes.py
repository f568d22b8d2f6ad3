"""Which findings follow from which: a consequence is not told besides its cause.

[Note: what may hide what] A finding may take the place of another one only if that would go away with it. So nothing is
explained across the passes, with one exception below: what was read is a conclusion, and may be wrong about what a run
has seen. What was watched explains only what came later. Rules that are left out (`--select`, `--ignore`, comments in
the source) explain nothing: they are gone before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from paceline.doctor.findings import Finding

__all__ = ["BREAKS", "EXPLAINS", "MEETING", "Explanation", "unexplained"]

MEETING: Final = frozenset(
    {
        "rank-conditional-collective",
        "rank-conditional-ddp-forward",
        "rank-local-early-stop",
        "collective-order-differs",
        "data-dependent-collective",
        "uneven-inputs",
        "rank-local-skip",
    }
)
"""Ranks miss each other. Of a run that is so, too, whenever one of them is stopped by something else."""

BREAKS: Final = frozenset(
    {
        "rendezvous-overridden",
        "world-size-mismatch",
        "spawn-under-torchrun",
        "model-differs-across-ranks",
        "rank-dependent-graph",
    }
)
"""A run in which these are seen is broken by them: the ranks find no group, or DDP waits for gradients of other
parameters on each. The mistakes that torch answers with an exception break a run where it does (`Finding.broke_s`)."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A consequence, and what it may come from.

    Args:
        why: it would go away with any of these.
        seen: in which pass only; ``None``: in both.
    """

    of: str
    by: frozenset[str]
    why: str
    seen: Literal["source", "run"] | None = None


EXPLAINS: Final = (
    Explanation(
        of="replicas-start-different",
        by=frozenset(
            {"params-changed-after-wrap", "resume-on-one-rank", "optimizer-stale-params", "model-differs-across-ranks"}
        ),
        why="the weights that differ are those that came after DDP's broadcast, or that it never had",
    ),
    Explanation(
        of="replicas-start-different",
        by=frozenset({"not-distributed", "legacy-data-parallel"}),
        why="whoever makes the script distributed wraps the model in DDP, which makes the weights equal",
    ),
    Explanation(
        of="not-distributed",
        by=frozenset({"legacy-data-parallel"}),
        why="nn.DataParallel is what was taken instead",
    ),
    Explanation(
        of="unused-parameters",
        by=frozenset({"params-changed-after-wrap", "static-graph-changes", "rank-dependent-graph"}),
        why="what goes unused was replaced after the wrap, or is used in other forwards or on other ranks",
        seen="run",  # what was read are parts by name, each a mistake of its own
    ),
    Explanation(
        of="reentrant-checkpoint",
        by=frozenset({"static-graph-changes"}),
        why="with static_graph=True reentrant checkpointing is allowed, as long as the graph stays",
    ),
)

_DIVERGES: Final = frozenset(
    {
        "ddp-forward-bypassed",
        "unsynced-optimizer-step",
        "params-changed-after-wrap",
        "resume-on-one-rank",
        "replicas-start-different",
        "clip-before-sync",
        "gradscaler-diverges",
        "optimizer-stale-params",
        "model-differs-across-ranks",
        "not-distributed",
        "legacy-data-parallel",
        *MEETING,
        *BREAKS,
    }
)
"""What ``replicas-diverged`` may follow from, when its line only stands in for one that is not known. It is then told
only if none of these is; a cause that was only read gets its numbers as evidence: they confirm it, and are not lost.
Told at a scheduler or a learning rate (`stands_in` is false) it is a cause itself, and stays."""


def unexplained(findings: Sequence[Finding]) -> list[Finding]:
    """Each mistake by its most specific name; what merely follows from another one is left out."""
    told = [finding for finding in findings if not any(_explains(cause, finding) for cause in findings)]
    for symptom in [finding for finding in told if finding.id == "replicas-diverged" and finding.stands_in]:
        causes = [finding for finding in told if finding.id in _DIVERGES and finding.level != "advice"]
        causes.sort(key=lambda finding: finding.seen != "run")
        if causes:
            told.remove(symptom)
            if causes[0].seen == "source":
                told[told.index(causes[0])] = replace(causes[0], evidence=f"{causes[0].evidence}; {symptom.evidence}")
    return told


def _explains(cause: Finding, finding: Finding) -> bool:
    if cause.seen != finding.seen or cause.level == "advice" or cause.id == finding.id:
        return False
    if cause.broke_s is not None and finding.id in MEETING:
        return finding.span is None or cause.broke_s <= finding.span[1]
    rows = [row for row in EXPLAINS if row.of == finding.id and row.seen in (None, finding.seen)]
    return any(cause.id in row.by for row in rows)
