"""Data-parallel training for PyTorch whose result does not depend on the workers.

The names below load what they need when first used: ``import paceline`` alone imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import memory, metrics, tasks
    from paceline.config import Execution, Optimizer, Recipe, Schedule
    from paceline.errors import PacelineError
    from paceline.launcher import launch
    from paceline.run import Run
    from paceline.step import Done, Step
    from paceline.tasks import Task

__all__ = [
    "Done",
    "Execution",
    "Optimizer",
    "PacelineError",
    "Recipe",
    "Run",
    "Schedule",
    "Step",
    "Task",
    "launch",
    "memory",
    "metrics",
    "tasks",
]
__version__ = "0.1.0"

_HOMES = {
    "Done": "step",
    "Execution": "config",
    "Optimizer": "config",
    "PacelineError": "errors",
    "Recipe": "config",
    "Run": "run",
    "Schedule": "config",
    "Step": "step",
    "Task": "tasks",
    "launch": "launcher",
}
_FOLDERS = ("memory", "metrics", "tasks")
"""Modules of the API, there without an import of their own."""


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"paceline.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(f"paceline.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
