"""One micro-batch for real, on this machine: what each block keeps, how long it takes, and the process's peak."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paceline.data.loader import move
from paceline.determinism import autocast, compile_blocks, resolve_device, seed_by
from paceline.memory.live import gradients_in_place
from paceline.memory.meter import saved_bytes
from paceline.memory.peak import Peak, resident_bytes
from paceline.memory.plan import Level
from paceline.memory.recompute import set_levels
from paceline.parsing import Settings
from paceline.planning.table import show_table
from paceline.sizes import show_size

__all__ = ["measure"]


def measure(settings: Settings, levels: Mapping[str, Level], planned: int) -> None:
    """Prints what a warm forward and backward of one micro-batch keeps and needs.

    Args:
        levels: of each block.
        planned: bytes that the plan says of activations, to be read beside.

    Raises:
        PacelineError: what the task raises, or no such device.
    """
    recipe = settings.recipe
    device = resolve_device(recipe.device, 0)
    task = settings.task.make()
    task.chunk_loss(recipe.loss_chunks, samples=recipe.micro_batch)
    seed_by(recipe.seed)
    model = task.build_model().to(device).train()
    if recipe.compile:
        compile_blocks(model)
    set_levels(model, levels)
    batch = move(task.example(recipe.micro_batch), device)

    def forward() -> Tensor:
        with autocast(recipe.precision, device):
            return task.loss(model, batch)[0]

    with gradients_in_place(model):
        before = resident_bytes(device)
        with Peak(device) as peak:
            _timed(forward, device)  # the first one is slow
            seconds = _timed(forward, device)
        saved = saved_bytes(forward, model)
    rows: list[tuple[str, ...]] = [
        (path, level, show_size(saved.modules[path].packed), show_size(saved.modules[path].held), "")
        for path, level in levels.items()
        if path in saved.modules
    ]
    rows.append(("the whole model", "", show_size(saved.packed), show_size(saved.held), ""))
    print("\nmeasured on one micro-batch")
    show_table(("block", "level", "packed", "held", ""), rows, left=2)
    print(f"forward and backward: {seconds:.3g} s, {show_size(max(0, peak.bytes - before))} on top (planned: ", end="")
    print(f"{show_size(planned)}); {peak.source}: {show_size(peak.bytes)}")


def _timed(forward: Callable[[], Tensor], device: torch.device) -> float:
    begun = time.perf_counter()
    forward().backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun
