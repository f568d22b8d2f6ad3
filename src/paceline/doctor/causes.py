"""Which mistakes follow from which: what one explains is not told besides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.doctor.findings import Finding

__all__ = ["BROKEN", "unexplained"]

_MEETING = frozenset(
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
BROKEN: Final = frozenset(
    {
        "rendezvous-overridden",
        "world-size-mismatch",
        "spawn-under-torchrun",
        "model-differs-across-ranks",
        "rank-dependent-graph",
        "unused-parameters",
        "static-graph-changes",
        "reentrant-checkpoint",
        "syncbn-on-cpu",
        "shuffle-with-sampler",
        "module-prefix-checkpoint",
    }
)
_UNSYNCED = frozenset(
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
        "rank-local-skip",
    }
)
_UNREDUCED = frozenset({"not-distributed", "legacy-data-parallel"})
_EXPLAINED: tuple[tuple[str, frozenset[str]], ...] = (
    ("replicas-diverged", _UNSYNCED | _UNREDUCED | _MEETING | BROKEN),
    (
        "replicas-start-different",
        _UNREDUCED
        | {"params-changed-after-wrap", "resume-on-one-rank", "optimizer-stale-params", "model-differs-across-ranks"},
    ),
    ("not-distributed", frozenset({"legacy-data-parallel"})),
    ("unused-parameters", frozenset({"params-changed-after-wrap", "static-graph-changes", "rank-dependent-graph"})),
    ("group-not-destroyed", BROKEN | _MEETING),
    ("reentrant-checkpoint", frozenset({"static-graph-changes"})),
    *((name, BROKEN) for name in sorted(_MEETING)),
    ("unequal-weight-average", frozenset({"uneven-inputs"})),
    ("collective-order-differs", _MEETING - {"collective-order-differs"}),
)
"""What is left out when something that explains it was found."""


def unexplained(findings: Sequence[Finding]) -> list[Finding]:
    """Each mistake by its most specific name, of whichever pass."""
    names = {finding.id for finding in findings if finding.level != "advice"}
    gone = {name for name, causes in _EXPLAINED if causes & names}
    return [finding for finding in findings if finding.id not in gone]
