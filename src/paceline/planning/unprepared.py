"""Plans of runs whose data is not there yet, and stays unmade."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from paceline.data.tokenizer import ByteTokenizer, bpe_size, read_tokenizer
from paceline.parsing import Settings
from paceline.tasks.text import TextTask

__all__ = ["with_vocabulary"]


def with_vocabulary(settings: Settings) -> Settings:
    """The settings; of a text task that would prepare its data for the vocabulary alone, with that of its tokenizer.

    Raises:
        DataError: no such tokenizer.
    """
    arguments = settings.task.init_args
    prepare = arguments.get("prepare")
    if not isinstance(prepare, Mapping) or not isinstance(settings.task.make(), TextTask):
        return settings
    if arguments.get("vocabulary") is not None or Path(arguments["data"]).exists():
        return settings
    name = prepare["tokenizer"]
    if name == "bytes":
        vocabulary = ByteTokenizer.vocabulary
    else:  # one that is to be trained may end with fewer: the plan is not too low
        vocabulary = bpe_size(name) or read_tokenizer(Path(name)).vocabulary
    task = dataclasses.replace(settings.task, init_args={**arguments, "vocabulary": vocabulary})
    return dataclasses.replace(settings, task=task)
