"""What an exception of torch says, in its own words, and who failed first."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paceline.doctor.findings import Finding
from paceline.doctor.watching.evidence import found
from paceline.doctor.watching.records import Account, Record, Run

__all__ = ["CHECKS", "first_failure", "is_echo"]

_ECHO = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|socket|failed to connect|remote end|peer", re.I
)
"""Of a rank that has lost another one."""

_SAYS: tuple[tuple[str, str, str], ...] = (
    (r"mutually exclusive with shuffle", "shuffle-with-sampler", "DataLoader refuses `shuffle=True` beside a sampler"),
    (
        r"SyncBatchNorm (expected input tensor to be on|layers only work with)",
        "syncbn-on-cpu",
        "SyncBatchNorm refuses tensors on the CPU",
    ),
    (
        r"training graph has changed",
        "static-graph-changes",
        "static_graph=True, and the graph changes",
    ),
    (
        r"Expected to have finished reduction in the prior iteration",
        "unused-parameters",
        "DDP waits for gradients of parameters that took no part in the loss",
    ),
    (
        r"expects same model across all ranks|appears not to match",
        "model-differs-across-ranks",
        "the ranks wrap different models",
    ),
    (
        r"(Missing|Unexpected) key\(s\).*\"module\.",
        "module-prefix-checkpoint",
        "keys with DDP's `module.` in front do not fit a plain model",
    ),
)


def first_failure(run: Run) -> tuple[Account, Record | None] | None:
    """The rank that failed first, by an error of its own if there is one, and that error."""
    errors = sorted((r for account in run.accounts for r in account.of("error")), key=lambda record: record.at_s)
    own = [record for record in errors if not is_echo(record)]
    failed = sorted((a for a in run.accounts if a.code), key=lambda account: account.ended_s or 0.0)
    silent = [a for a in failed if a.first("error") is None]
    if silent and (not own or (silent[0].ended_s or 0.0) < own[0].at_s):
        return silent[0], None
    if own:
        return run.accounts[own[0].rank], own[0]
    if errors:
        return run.accounts[errors[0].rank], errors[0]
    return (failed[0], None) if failed else None


def is_echo(error: Record) -> bool:
    """Whether it says no more than that another rank is gone."""
    return _ECHO.search(error["text"] or "") is not None


def words_of_torch(run: Run) -> Iterator[Finding]:
    for record in run.all("error"):
        for pattern, rule, message in _SAYS:
            if re.search(pattern, record["text"] or "", re.DOTALL):
                text = next((line for line in record["text"].splitlines() if line.strip()), "")
                yield from found(rule, record.place, message, f"rank {record.rank}: {record['type']}: {text[:200]}")
                break


CHECKS = (words_of_torch,)
