"""How much memory each worker may use: as told, or what this machine has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.config import Execution, Recipe
from paceline.errors import ConfigError
from paceline.sizes import parse_size, show_size

__all__ = ["Budget", "budget_of", "machine_memory"]

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes for a worker, and where that figure comes from."""

    size: int
    source: str


def budget_of(option: str | None, recipe: Recipe, execution: Execution, workers: int) -> Budget:
    """The option ``--memory``, else ``execution.memory``, else the machine's memory divided by the workers on it.

    Args:
        recipe: with its device resolved.

    Raises:
        ConfigError: nonsense, or neither an option nor a GPU for a run on ``cuda``.
    """
    if option is not None:
        return Budget(size=parse_size(option, "--memory"), source="--memory")
    if execution.memory is not None:
        return Budget(size=parse_size(execution.memory, "execution.memory"), source="execution.memory")
    if recipe.device == "cuda":
        return Budget(size=_gpu_memory(), source="the memory of this machine's GPU")
    whole = machine_memory()
    share = f"this machine's {show_size(whole)}" + (f" / {workers} workers" if workers > 1 else "")
    return Budget(size=whole // workers, source=share)


def machine_memory() -> int:
    """Bytes of this machine, or of the container that this process is in."""
    import psutil

    limits = [int(psutil.virtual_memory().total)]
    for path in map(Path, _CGROUP_LIMITS):
        text = path.read_text(encoding="ascii").strip() if path.is_file() else "max"
        if text.isdecimal():
            limits.append(int(text))
    return min(limits)


def _gpu_memory() -> int:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "cannot tell how much memory there is",
            found="recipe.device: cuda, and no GPU here",
            needed="the size of the GPU to plan for",
            fix="Pass --memory 24GiB",
        )
    return int(torch.cuda.get_device_properties(0).total_memory)
