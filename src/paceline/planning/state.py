"""What a model, its gradients and its optimizer hold, counted on shapes alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.config import Execution, Recipe
from paceline.determinism import configure_process, flatten_state
from paceline.memory.gaps import SMALL, state_gaps
from paceline.memory.live import LiveBytes, gradients_in_place, shapes_only
from paceline.optim import build_optimizer
from paceline.planning.footprint import Footprint, gradient_sets, inbox_elements
from paceline.planning.told import is_too_large
from paceline.reduction.buckets import assign
from paceline.reduction.exchange import GRAIN
from paceline.tasks import Task

__all__ = ["State", "build", "footprint", "process_bytes", "state_of", "storage_bytes"]

LIBRARIES = 88 * 2**20
"""Resident pages of torch's files in a process that trains on a CPU."""
PLANNING = 12 * 2**20
"""What is left of planning in a worker that plans for itself."""
CUDA_CONTEXT = 600 * 2**20
"""An estimate: driver, kernels and the libraries' workspaces, of which torch's allocator does not know."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Bytes that do not depend on lanes, workers or the micro-batch.

    Args:
        count: parameters, a tied one once; ``trained``: those that require a gradient.
        buckets: elements of each bucket of gradients, by bytes of an element.
        saved: what a checkpoint holds.
        small: the part of the parameters' bytes, 0 to 1, in tensors that share a CPU's heap; about that of the
            optimizer's state.
        unknown: why the optimizer's state is not all in here, if so.
    """

    count: int
    trained: int
    parameters: int
    buffers: int
    buckets: dict[int, list[int]]
    optimizer: int
    optimizer_work: int
    saved: int
    small: float
    unknown: str | None


@contextmanager
def build(task: Task, *, real: bool = False) -> Iterator[tuple[nn.Module, str | None]]:
    """The task's model on shapes alone, which also holds for all that happens inside; and why it had to be built for
    real first, if so.

    Args:
        real: do without shapes.

    Raises:
        PacelineError: what the task or `shapes_only` raises.
    """
    with ExitStack() as stack:
        why: str | None = None
        if real:
            yield task.build_model().train(), why
            return
        try:
            stack.enter_context(shapes_only())
            model = task.build_model()
        except Exception as error:  # a user's own model may do anything, such as look at its weights
            stack.close()
            if is_too_large(error):
                raise  # for real it would be no smaller
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
            model = task.build_model()
            stack.enter_context(shapes_only(model))
        yield model.train(), why


def state_of(model: nn.Module, recipe: Recipe, execution: Execution) -> State:
    """Counts inside `shapes_only`. The optimizer is made and steps once, whichever it is."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    buckets: defaultdict[int, list[int]] = defaultdict(list)
    for bucket in assign(trained, int(execution.bucket_mib * 2**20)):
        buckets[bucket.dtype.itemsize].append(bucket.size)
    optimizer, work, unknown = _optimizer_bytes(model, recipe)
    buffers = storage_bytes(model.buffers())
    small = storage_bytes([parameter for parameter in parameters if parameter.nbytes < SMALL])
    return State(
        count=sum(parameter.numel() for parameter in parameters),
        trained=sum(parameter.numel() for parameter in trained),
        parameters=storage_bytes(parameters),
        buffers=2 * buffers,  # a step keeps what its lanes start from
        buckets=dict(buckets),
        optimizer=optimizer,
        optimizer_work=work,
        saved=storage_bytes(model.state_dict().values()) + optimizer,
        small=small / max(1, storage_bytes(parameters)),
        unknown=unknown,
    )


def footprint(
    state: State, recipe: Recipe, execution: Execution, *, lanes: int, workers: int, process: int, batch: int
) -> Footprint:
    """What the worker with the most holds, with ``lanes`` in place of the recipe's.

    Args:
        process: bytes before there is a model.
        batch: bytes of a micro-batch.
    """
    sets = gradient_sets(lanes=lanes, workers=workers)
    one_set = sum(size * sum(sizes) for size, sizes in state.buckets.items())
    in_host_memory = recipe.device == "cpu"  # a GPU's copy for a checkpoint lies there
    plans = execution.memory is not None or execution.recompute == "auto"
    last = min(recipe.steps or math.inf, execution.stop_at or math.inf)
    saves_midway = execution.checkpoint_every is not None and execution.checkpoint_every < last
    return Footprint(
        process=process + (PLANNING if plans and in_host_memory else 0),
        parameters=state.parameters,
        buffers=state.buffers,
        gradients=one_set,
        lane_sums=one_set * (sets - 1),
        optimizer=state.optimizer,
        optimizer_work=state.optimizer_work,
        exchange=_exchange_bytes(state, recipe, lanes, workers),
        inputs=batch * (1 + 2 * execution.loader_workers),
        copy=state.saved if in_host_memory else 0,
        copy_stays=execution.async_checkpoint and saves_midway,
        gaps=state_gaps(state.small * state.optimizer, recipe.precision) if in_host_memory else 0,
    )


def process_bytes(recipe: Recipe) -> int:
    """What a worker needs before it has a model: measured on this very process, which has imported what a worker does,
    after a first tiny step; on CUDA an estimate.

    A worker that was forked has touched little of the libraries' code as yet. `LIBRARIES` is counted for that, wherever
    it was measured: so `paceline plan` and a run say the same.
    """
    if recipe.device == "cuda":
        return CUDA_CONTEXT
    configure_process(threads=recipe.threads, device=torch.device("cpu"))
    layer = nn.Linear(64, 64)
    layer(torch.zeros(8, 64)).sum().backward()
    torch.optim.AdamW(layer.parameters(), fused=True).step()
    memory = psutil.Process().memory_info()
    return int(memory.rss) - int(getattr(memory, "shared", LIBRARIES)) + LIBRARIES


def storage_bytes(tree: Any) -> int:
    """Bytes of the storages of all tensors in ``tree``, each once."""
    leaves: Iterable[Any] = tree_leaves(tree if isinstance(tree, list | tuple | dict | Tensor) else list(tree))
    storages = {leaf.untyped_storage()._cdata: leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)}
    return sum(storage.nbytes() for storage in storages.values())


def _optimizer_bytes(model: nn.Module, recipe: Recipe) -> tuple[int, int, str | None]:
    """Of its state; of what a step needs on top; and why the state may be more, where a step reads numbers."""
    optimizer = build_optimizer(model, recipe.optimizer, batch=recipe.batch)
    unknown = None
    with gradients_in_place(model), LiveBytes() as live:
        try:
            optimizer.step()
        except Exception as error:  # such as Adafactor, after it has made its state
            unknown = f"its first step needs numbers ({type(error).__name__})"
    state = storage_bytes([tensor for _, tensor in flatten_state(optimizer.state_dict())])
    return state, max(0, live.peak - live.current), unknown


def _exchange_bytes(state: State, recipe: Recipe, lanes: int, workers: int) -> int:
    if recipe.gradients == "allreduce":
        return 2 * max(state.buckets.get(4, [0])) if recipe.compress == "bf16" else 0
    inboxes = (
        size * inbox_elements(sizes, lanes=lanes, workers=workers, grain=GRAIN) for size, sizes in state.buckets.items()
    )
    return sum(inboxes)
