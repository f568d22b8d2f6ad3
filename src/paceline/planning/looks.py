"""Looks at a task's model and loss for a few micro-batches: on shapes alone, or where that cannot be, for real."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

import psutil
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils._pytree import tree_map_only

from paceline.config import Execution, Recipe
from paceline.determinism import autocast
from paceline.errors import ConfigError, DataError, UsageError
from paceline.memory.blocks import find_blocks, named_modules
from paceline.memory.plan import BlockCost, Level
from paceline.memory.profile import CPU, GPU, Profile, profile
from paceline.memory.recompute import levels_of, set_levels
from paceline.parsing import Settings
from paceline.planning.state import State, build, state_of, storage_bytes
from paceline.planning.told import loss_of, told
from paceline.progress import Tell
from paceline.sizes import show_size
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
        costs: of micro-batches of a few sizes, the run's among them.
        sample_bytes: of one sample.
        blocks: how many may recompute.
        remarks: what else to know of these figures.
    """

    model: str
    state: State
    modes: Mapping[str, Mapping[str, Level]]
    costs: Mapping[int, Profile]
    sample_bytes: int
    blocks: int
    remarks: tuple[str, ...]


Further = Callable[["Looked"], tuple[bool, bool]]
"""Says whether smaller and whether larger micro-batches are worth a look, once the run's own is known."""


def look(settings: Settings, *, own_mode: str, most: int, further: Further, tell: Tell) -> Looked:
    """Builds the model and runs a forward and backward for each level and size.

    Args:
        own_mode: what the run's way to recompute is called.
        most: the largest micro-batch to look at; less is where samples are huge.
        further: called once.
        tell: what is being done.

    Raises:
        ConfigError: a mistake in the task, of whatever kind.
        DataError: as the task says.
    """
    name, now = settings.task.class_path.rpartition(".")[2], settings.recipe.micro_batch
    with told(name):
        task = settings.task.make()
        task.chunk_loss(settings.recipe.loss_chunks, samples=now)
        sample_bytes = max(1, storage_bytes(_example(task, 1)))
        if sample_bytes * now > psutil.virtual_memory().available:
            raise ConfigError(
                f"cannot make a micro-batch of {name}",
                found=f"{now} samples of {show_size(sample_bytes)}",
                needed="what this machine has room for",
                fix="Use a smaller recipe.micro_batch, or shorter samples",
            )
        sizes = {1, now, max(now, min(most, _MOST_EXAMPLE // sample_bytes))}
        batches = {size: _example(task, size) for size in sizes}
    try:
        return _looked(task, settings, batches, own_mode, further, tell, real=False)
    except (ConfigError, DataError):
        raise
    except Exception as error:  # a user's own loss may do anything, such as look at its value
        first = error
    with told(name):
        if not _has_room(task):
            raise first
        few = {size: batch for size, batch in batches.items() if size <= now}
        looked = _looked(task, settings, few, own_mode, further, tell, real=True)
    why = first.found if isinstance(first, UsageError) else f"{type(first).__name__}: {first}"
    remark = f"Measured on real tensors, up to this micro_batch: the loss cannot run on shapes alone ({why})."
    return replace(looked, remarks=(*looked.remarks, remark))


def _example(task: Task, samples: int) -> Any:
    batch = task.example(samples)
    if batch is None:
        raise ConfigError(
            f"cannot make a micro-batch of {type(task).__name__}",
            found="None from collate",
            needed="what its loss takes",
            fix="Return the batch",
        )
    return batch


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
    task: Task,
    settings: Settings,
    batches: Mapping[int, Any],
    own_mode: str,
    further: Further,
    tell: Tell,
    *,
    real: bool,
) -> Looked:
    recipe, execution = settings.recipe, settings.execution
    now = recipe.micro_batch
    with ExitStack() as stack:
        with _modules_told(tell):
            model, why = stack.enter_context(build(task, real=real))
        tell("looking for blocks")
        blocks = blocks_of(model, execution)
        modes = _modes(model, execution, own_mode)
        levels, steps = len(get_args(Level)), 0

        def costs_of(size: int, ahead: int) -> Profile:
            def next_one() -> None:
                nonlocal steps
                steps += 1
                tell(f"step {steps} of {levels * (len(costs) + ahead)} on {'real tensors' if real else 'shapes'}")

            def done() -> None:
                if steps % levels:
                    next_one()

            next_one()
            return _costs(task, model, recipe, blocks, batches[size], done)

        costs: dict[int, Profile] = {}
        costs[now] = costs_of(now, 1)
        tell("the optimizer's state")
        state = state_of(model, recipe, execution)
        looked = Looked(
            model=type(model).__name__,
            state=state,
            modes=modes,
            costs=dict(costs),
            sample_bytes=max(1, storage_bytes(batches[now]) // now),
            blocks=len(blocks),
            remarks=tuple(_remarks(why, state, recipe)),
        )
        wanted = [size for size, worth in zip((1, max(batches)), further(looked), strict=True) if worth and size != now]
        for at, size in enumerate(wanted):
            try:
                costs[size] = costs_of(size, len(wanted) - at)
            except Exception:  # such as BatchNorm's, of a single sample: then nothing is known of smaller ones
                if size > now:
                    raise
    return replace(looked, costs=costs)


@contextmanager
def _modules_told(tell: Tell) -> Iterator[None]:
    """Inside it the modules that a model is built of are counted."""
    count = 0

    def one_more(module: nn.Module, name: str, part: nn.Module | None) -> None:
        nonlocal count
        count += 1
        tell(f"building the model, {count:,} modules so far")

    tell("building the model")
    hook = register_module_module_registration_hook(one_more)
    try:
        yield
    finally:
        hook.remove()


def _remarks(why: str | None, state: State, recipe: Recipe) -> Iterator[str]:
    if why is not None:
        yield f"The model was built for real: build_model cannot run on shapes alone ({why})."
    if state.unknown is not None:
        yield f"The optimizer's state may be more: {state.unknown}."
    if recipe.compile:
        yield "Figures are those without recipe.compile, which mostly needs less."


def _costs(
    task: Task,
    model: nn.Module,
    recipe: Recipe,
    blocks: Mapping[str, nn.Module],
    batch: Any,
    done: Callable[[], None],
) -> Profile:
    """Inside `shapes_only` the batch becomes one of shapes too. A GPU's step is counted with a CPU's kernels: without a
    GPU torch runs no backward of CUDA tensors, not of shapes either."""
    held = tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor).copy_(tensor), batch)

    def step() -> Tensor:
        with autocast(recipe.precision, torch.device("cpu")):
            return loss_of(task, model, held)

    found = profile(step, model, blocks, set_levels, rates=GPU if recipe.device == "cuda" else CPU, done=done)
    return replace(
        found,
        blocks=tuple(_available(block, recipe) for block in found.blocks),
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
