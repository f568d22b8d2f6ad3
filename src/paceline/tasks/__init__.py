"""What can be trained: `Task`, the interface, and the tasks that come with Paceline.

Those that need more than Paceline itself (scikit-learn's data, models of transformers) import it when they are used.
"""

from __future__ import annotations

from paceline.tasks.causal_lm import CausalLM
from paceline.tasks.digits import Digits
from paceline.tasks.language import Language
from paceline.tasks.tabular import Tabular
from paceline.tasks.task import Task
from paceline.tasks.text import Prepare, TextTask

__all__ = ["CausalLM", "Digits", "Language", "Prepare", "Tabular", "Task", "TextTask"]
