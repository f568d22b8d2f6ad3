"""Which worker drives which lanes, and how a batch divides over them. Pure arithmetic.

A *lane* is a virtual worker: a recipe fixes how many there are, and real workers only drive them.

>>> [list(lanes_of(rank, world_size=3, lanes=8)) for rank in range(3)]
[[0, 1], [2, 3, 4], [5, 6, 7]]
"""

from __future__ import annotations

from paceline.errors import ConfigError

__all__ = ["check_batch", "lanes_of", "most_lanes"]


def lanes_of(rank: int, world_size: int, lanes: int) -> range:
    """The consecutive lanes that worker ``rank`` of ``world_size`` drives.

    Raises:
        ConfigError: more workers than lanes, since a worker without a lane would idle for ever.
    """
    if not 1 <= world_size <= lanes:
        raise ConfigError(
            "cannot deal lanes",
            found=f"lanes={lanes}, workers={world_size}",
            needed="1 <= workers <= lanes",
            fix=f"Use -n {lanes} or fewer, or a recipe with more lanes (that is another recipe: other bits)",
        )
    if not 0 <= rank < world_size:
        raise ConfigError("cannot deal lanes", found=f"rank={rank}", needed=f"0 <= rank < {world_size}")
    return range(rank * lanes // world_size, (rank + 1) * lanes // world_size)


def most_lanes(world_size: int, lanes: int) -> int:
    """How many the worker with the most drives."""
    return -(-lanes // world_size)


def check_batch(batch: int, micro_batch: int, lanes: int) -> None:
    """Raises `ConfigError`, naming the nearest batches that work, unless ``batch`` divides evenly."""
    unit = micro_batch * lanes
    if batch % unit == 0 and batch > 0:
        return
    below, above = batch // unit * unit, (batch // unit + 1) * unit
    near = f"{below} or {above}" if below else f"{above}"
    raise ConfigError(
        "cannot divide the batch over lanes",
        found=f"batch={batch}, lanes={lanes}, micro_batch={micro_batch}",
        needed=f"batch to be a multiple of lanes x micro_batch = {unit}",
        fix=f"Use batch={near}",
    )
