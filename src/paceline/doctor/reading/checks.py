"""All rules that can be told from the source."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.doctor.findings import Finding
from paceline.doctor.reading import (
    checks_buffers,
    checks_collectives,
    checks_data,
    checks_files,
    checks_graph,
    checks_launch,
    checks_models,
    checks_steps,
)
from paceline.doctor.reading.trace import Trace

__all__ = ["CHECKS"]

CHECKS: tuple[Callable[[Trace], Iterator[Finding]], ...] = (
    *checks_data.CHECKS,
    *checks_steps.CHECKS,
    *checks_models.CHECKS,
    *checks_graph.CHECKS,
    *checks_buffers.CHECKS,
    *checks_collectives.CHECKS,
    *checks_files.CHECKS,
    *checks_launch.CHECKS,
)
