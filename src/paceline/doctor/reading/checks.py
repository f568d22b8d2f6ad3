"""Judges a trace by all rules that can be told from the source.

Each rule has one function that bears its name, marked `@rule_check("its-id")`, in ``checks_*`` by what it is about.
"""

from __future__ import annotations

from paceline.doctor.findings import Finding
from paceline.doctor.reading import (  # noqa: F401 - importing them registers their checks
    checks_buffers,
    checks_collectives,
    checks_counts,
    checks_data,
    checks_files,
    checks_graph,
    checks_launch,
    checks_models,
    checks_output,
    checks_replicas,
    checks_steps,
)
from paceline.doctor.reading.evidence import RULE_CHECKS
from paceline.doctor.reading.trace import Trace

__all__ = ["judged"]


def judged(trace: Trace) -> tuple[list[Finding], list[str]]:
    """What all rules find, and a note for each that could not be judged."""
    findings: list[Finding] = []
    notes: list[str] = []
    for rule, check in RULE_CHECKS.items():
        try:
            findings += check(trace)
        except Exception as error:  # a mistake of ours in one rule is no reason to be silent on the others
            notes.append(f"{rule} could not be judged ({type(error).__name__}: {error})")
    return findings, notes
