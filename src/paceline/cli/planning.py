"""The subcommand plan: what a run will need. Takes the words behind its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.errors import EXIT_DONE, ConfigError

__all__ = ["plan"]

_HELP = """\
usage: paceline plan [CONFIG] [--memory SIZE] [-n N] [--measure] [--SECTION.NAME VALUE ...]

Tells what each worker of a run will hold, at which moment that is the most, which micro-batches fit with which
recompute, and what that costs in time. Runs on shapes alone: nothing is allocated, no data and no GPU are needed.

  --memory SIZE      what each worker has, such as 24GiB; default execution.memory, or this machine's memory
  -n N               workers (execution.workers)
  --measure          also run one micro-batch for real, here, and print what each block really keeps
  Settings as for `paceline train`; --recipe.device cuda plans for a GPU.

Exit code 0: it fits as it is configured; 1: it does not; 2: usage or configuration, a mistake in the task too.
"""


def plan(words: list[str]) -> int:
    if "-h" in words or "--help" in words:
        print(_HELP)
        return EXIT_DONE
    memory, measured, rest = _read(words)
    from paceline.parsing import parse
    from paceline.supervisor import resolve_workers

    settings = parse(rest)
    workers = resolve_workers(settings.recipe, settings.execution)

    import paceline.train  # noqa: F401 - as a worker does: this process's memory is taken for a worker's
    from paceline.determinism import resolve_device
    from paceline.planning.budget import budget_of
    from paceline.planning.command import plan as command

    if settings.recipe.device == "auto":
        device = resolve_device("auto", 0).type
        recipe = dataclasses.replace(settings.recipe, device=device)  # type: ignore[arg-type]
        settings = dataclasses.replace(settings, recipe=recipe)
    budget = budget_of(memory, settings.recipe, settings.execution, workers)
    return command(settings, workers=workers, budget=budget, measured=measured)


def _read(words: Sequence[str]) -> tuple[str | None, bool, list[str]]:
    """``--memory``, whether to ``--measure``, and the other words."""
    memory: str | None = None
    measured = False
    rest: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if name == "--memory":
            if not equals and (not remaining or remaining[0].startswith("--")):
                raise ConfigError("cannot read --memory", found="nothing behind it", fix="Write --memory 24GiB")
            memory = value if equals else remaining.pop(0)
        elif word == "--measure":
            measured = True
        else:
            rest.append(word)
    return memory, measured, rest
