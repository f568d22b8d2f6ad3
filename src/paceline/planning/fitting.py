"""Makes a run fit its memory before its first step: `execution.recompute: auto`, and the refusal of what cannot fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.config import Execution, Recipe
from paceline.data.loader import move
from paceline.determinism import autocast, forked_randomness
from paceline.errors import ConfigError
from paceline.memory.fit import find_fit, peak_with
from paceline.memory.gaps import Heap
from paceline.memory.live import shapes_only
from paceline.memory.meter import saved_bytes
from paceline.memory.plan import Level
from paceline.memory.plan import peak as peak_of
from paceline.memory.profile import CPU, Profile, profile
from paceline.memory.recompute import levels_of, set_levels
from paceline.memory.trial import Trial
from paceline.planning.budget import budget_of
from paceline.planning.looks import blocks_of
from paceline.planning.state import footprint, state_of, storage_bytes
from paceline.sizes import show_size
from paceline.tasks import Task

__all__ = ["Fitted", "fit_run"]


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What was chosen for a run.

    Args:
        levels: of each block.
        told: in one line.
        budget: bytes that a worker may use; ``peak``: the most that it will; ``activations``: of these, the most that a
            forward and backward allocates.
        slower: seconds of a forward and backward, relative to those without recompute; ``None``: not measured.
        packed, held: what autograd keeps of a forward in which nothing recomputes, as `paceline.memory.saved_bytes`
            counts; ``blocks``: of it, (packed, held) of each block.
        note: what else to know of these figures.
    """

    levels: Mapping[str, Level]
    told: str
    budget: int
    peak: int
    activations: int
    slower: float | None
    packed: int
    held: int
    blocks: Mapping[str, tuple[int, int]]
    note: str | None

    def event(self) -> dict[str, object]:
        """For the run log; blocks that keep all are left out."""
        levels = {path: level for path, level in self.levels.items() if level != "keep"}
        figures = {"budget": self.budget, "planned": self.peak, "activations": self.activations, "slower": self.slower}
        blocks = {path: {"packed": packed, "held": held} for path, (packed, held) in self.blocks.items()}
        saved = {"packed": self.packed, "held": self.held, "blocks": blocks}
        return {"told": self.told, "levels": levels, **figures, **saved}


def fit_run(
    task: Task,
    model: nn.Module,
    recipe: Recipe,
    execution: Execution,
    *,
    device: torch.device,
    workers: int,
    process: int,
) -> Fitted:
    """Chooses what to recompute if `execution.recompute` is ``auto``, and checks that a worker has the memory. Not
    collective, and nothing is left changed.

    Args:
        model: on ``device``, its blocks compiled if they are to be.
        workers: on this machine.
        process: bytes of a worker before it has a model.

    Raises:
        ConfigError: the run needs more than `execution.memory`, or than the machine has.
    """
    budget = budget_of(None, recipe, execution, workers)
    with forked_randomness(device):
        batch = move(task.example(recipe.micro_batch), device)
        with shapes_only(model):
            state = state_of(model, recipe, execution)

        def step() -> Tensor:
            with autocast(recipe.precision, device):
                return task.loss(model, batch)[0]

        trial = Trial(model, step)
        there = footprint(
            state,
            recipe,
            execution,
            lanes=recipe.lanes,
            workers=workers,
            process=process,
            batch=storage_bytes(batch),
        )
        on_cpu = device.type == "cpu"
        room = max(0, budget.size - there.during_backward)
        slower, note = None, None
        if execution.recompute == "auto":
            fitted, note = find_fit(model, step, room, gaps=on_cpu)
            levels, activations, slower = fitted.levels, fitted.peak, fitted.slower
            if on_cpu:
                with_gaps, left = _with_gaps(fitted.profile, levels)
            told, needed = str(fitted), fitted.least
        else:
            levels = levels_of(model, execution.recompute)
            activations = peak_with(trial, levels)
            if on_cpu:
                named = blocks_of(model, execution)
                try:
                    costs = trial.on_shapes(lambda step: profile(step, model, named, set_levels, rates=CPU))
                    with_gaps, left = _with_gaps(costs, levels)
                except Exception:  # as in `Trial.on_shapes_or_for_real`; but other levels may not fit, so none is tried
                    heap = Heap(small=1.0, loss=activations, beside=0, turnover=activations // 2)
                    with_gaps, left = heap.needed(activations), heap.left
            told = needed = f"activations {show_size(activations)}"
    if not on_cpu:
        with_gaps, left = activations, 0
    peak, moment = there.peak(with_gaps, left)
    if peak > budget.size:
        auto = execution.recompute == "auto" or not levels
        raise ConfigError(
            "cannot fit the run",
            found=f"{show_size(budget.size)} for each worker ({budget.source})",
            needed=f"{show_size(peak)}: {show_size(peak - activations)} besides activations, and for these {needed}"
            if moment == "backward"
            else f"{show_size(peak)} for the {moment}, whatever is recomputed",
            fix=("" if auto else "Set execution.recompute: auto, or see ")
            + ("See " if auto else "")
            + "`paceline plan` for the micro-batches that fit",
        )
    saved, _ = trial.on_shapes_or_for_real(lambda step: saved_bytes(step, model))
    return Fitted(
        levels=levels,
        told=f"{told}; {show_size(peak)} of {show_size(budget.size)} a worker",
        budget=budget.size,
        peak=peak,
        activations=activations,
        slower=slower,
        packed=saved.packed,
        held=saved.held,
        blocks={path: (saved.modules[path].packed, saved.modules[path].held) for path in levels},
        note=note,
    )


def _with_gaps(costs: Profile, levels: Mapping[str, Level]) -> tuple[int, int]:
    """Bytes of a forward and backward on a CPU, with the gaps of its heap, and what it keeps of them; as in `paceline
    plan`."""
    assert costs.heap is not None
    every = {block.name: levels.get(block.name, "keep") for block in costs.blocks}
    needed = costs.heap.needed(peak_of(costs.blocks, every, fixed=costs.fixed, loss=costs.heap.loss))
    return needed, costs.heap.left
