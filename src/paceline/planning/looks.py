"""Looks at a task's model and loss for a few micro-batches: on shapes alone, or where that cannot be, for real."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from paceline.config import Execution, Recipe
from paceline.determinism import autocast
from paceline.errors import ConfigError, DataError, UsageError
from paceline.memory.blocks import find_blocks, named_modules
from paceline.memory.plan import BlockCost, Level
from paceline.memory.profile import CPU, GPU, profile
from paceline.memory.recompute import levels_of, set_levels
from paceline.parsing import Settings
from paceline.planning.grid import Costs
from paceline.planning.state import State, build, state_of, storage_bytes
from paceline.tasks import Task

__all__ = ["Further", "Looked", "blocks_of", "look"]

_MOST_EXAMPLE = 2**28
"""Bytes that an example may take: it is made for real."""
_UNIFORM = ("none", "all", "every:2", "selective")


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What was seen.

    Args:
        model: its class.
        modes: the levels of each way to recompute that is named, the run's own among them unless it is ``auto``.
        costs: of micro-batches of a few sizes, ascending, the run's among them.
        sample_bytes: of one sample.
        remarks: what else to know of these figures.
    """

    model: str
    state: State
    modes: Mapping[str, Mapping[str, Level]]
    costs: tuple[Costs, ...]
    sample_bytes: int
    remarks: tuple[str, ...]


Further = Callable[["Looked"], tuple[bool, bool]]
"""Says whether smaller and whether larger micro-batches are worth a look, once the run's own is known."""


def look(settings: Settings, *, own_mode: str, most: int, further: Further) -> Looked:
    """Builds the model and runs a forward and backward for each level and size.

    Args:
        own_mode: what the run's way to recompute is called.
        most: the largest micro-batch to look at; less is where samples are huge.
        further: called once.

    Raises:
        PacelineError: what the task raises.
    """
    task, now = settings.task.make(), settings.recipe.micro_batch
    task.chunk_loss(settings.recipe.loss_chunks)
    sample_bytes = max(1, storage_bytes(task.example(1)))
    sizes = {1, now, max(now, min(most, _MOST_EXAMPLE // sample_bytes))}
    batches = {size: task.example(size) for size in sizes}
    try:
        return _looked(task, settings, batches, own_mode, further, real=False)
    except (ConfigError, DataError):
        raise
    except Exception as error:  # a user's own loss may do anything, such as look at its value
        if not _has_room(task):
            raise
        why = error.found if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
    few = {size: batch for size, batch in batches.items() if size <= now}
    looked = _looked(task, settings, few, own_mode, further, real=True)
    remark = f"Measured on real tensors, up to this micro_batch: the loss cannot run on shapes alone ({why})."
    return replace(looked, remarks=(*looked.remarks, remark))


def _has_room(task: Task) -> bool:
    """Whether the model, its gradients and AdamW's state would fit this machine right now."""
    with build(task) as (model, _):
        return 4 * storage_bytes(model.parameters()) < psutil.virtual_memory().available


def blocks_of(model: nn.Module, execution: Execution) -> dict[str, nn.Module]:
    """The modules that may recompute: those that the settings name, and the found ones that are apart from these."""
    named: dict[str, nn.Module] = {}
    if not isinstance(execution.recompute, str):
        named = named_modules(model, list(execution.recompute))
    apart = {
        path: block
        for path, block in find_blocks(model).items()
        if not any(f"{path}.".startswith(f"{name}.") or f"{name}.".startswith(f"{path}.") for name in named)
    }
    return {path: module for path, module in model.named_modules() if path in named or path in apart}


def _looked(
    task: Task, settings: Settings, batches: Mapping[int, Any], own_mode: str, further: Further, *, real: bool
) -> Looked:
    recipe, execution = settings.recipe, settings.execution
    now = recipe.micro_batch
    with build(task, real=real) as (model, why):
        blocks = blocks_of(model, execution)
        modes = _modes(model, execution, own_mode)
        costs = {now: _costs(task, model, recipe, blocks, now, batches[now])}
        state = state_of(model, recipe, execution)
        looked = Looked(
            model=type(model).__name__,
            state=state,
            modes=modes,
            costs=(costs[now],),
            sample_bytes=max(1, storage_bytes(batches[now]) // now),
            remarks=tuple(_remarks(why, state, recipe)),
        )
        wanted = [size for size, worth in zip((1, max(batches)), further(looked), strict=True) if worth and size != now]
        for size in wanted:
            try:
                costs[size] = _costs(task, model, recipe, blocks, size, batches[size])
            except Exception:  # such as BatchNorm's, of a single sample: then nothing is known of smaller ones
                if size > now:
                    raise
    return replace(looked, costs=tuple(costs[size] for size in sorted(costs)))


def _remarks(why: str | None, state: State, recipe: Recipe) -> Iterator[str]:
    if why is not None:
        yield f"The model was built for real: build_model cannot run on shapes alone ({why})."
    if state.unknown is not None:
        yield f"The optimizer's state may be more: {state.unknown}."
    if recipe.compile:
        yield "Figures are those without recipe.compile, which mostly needs less."


def _costs(
    task: Task, model: nn.Module, recipe: Recipe, blocks: Mapping[str, nn.Module], size: int, batch: Any
) -> Costs:
    """Inside `shapes_only` the batch becomes one of shapes too."""
    held = tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor).copy_(tensor), batch)

    def step() -> Tensor:
        with autocast(recipe.precision, torch.device("cpu")):
            return task.loss(model, held)[0]

    found = profile(step, model, blocks, set_levels, rates=GPU if recipe.device == "cuda" else CPU)
    return Costs(
        micro_batch=size,
        fixed=found.fixed,
        blocks=tuple(_available(block, recipe) for block in found.blocks),
        loss=found.loss,
        seconds=found.seconds,
        heap=found.heap if recipe.device == "cpu" else None,
    )


def _available(block: BlockCost, recipe: Recipe) -> BlockCost:
    """A compiled block shows none of its operators, so that none can be kept by name."""
    if not recipe.compile:
        return block
    return BlockCost(name=block.name, options=tuple(one for one in block.options if one.level != "selective"))


def _modes(model: nn.Module, execution: Execution, own_mode: str) -> dict[str, Mapping[str, Level]]:
    keep: dict[str, Level] = dict.fromkeys(blocks_of(model, execution), "keep")
    wanted: dict[str, str | Sequence[str] | Mapping[str, str]] = {mode: mode for mode in _UNIFORM}
    if own_mode != "auto":
        wanted[own_mode] = execution.recompute
    elif not keep:
        levels_of(model, "all")  # as a run does, this refuses a model without blocks
    modes: dict[str, Mapping[str, Level]] = {}
    for name, mode in wanted.items():
        try:
            modes[name] = {path: level for path, level in (keep | levels_of(model, mode)).items() if path in keep}
        except ConfigError:  # no blocks, which is an error only of who asks for it
            if name == own_mode:
                raise
    return modes
