"""What can be trained: `Task`, the interface, and the tasks that come with Paceline."""

from __future__ import annotations

from paceline.tasks.language import Language, Prepare
from paceline.tasks.task import Task

__all__ = ["Language", "Prepare", "Task"]
