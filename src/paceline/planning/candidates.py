"""Other micro-batches for a recipe, and what else of the recipe each of them would change. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Candidate", "candidates", "shown"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A recipe's three sizes: ``batch = lanes x micro_steps x micro_batch``. All of them move bits."""

    micro_batch: int
    batch: int
    lanes: int


def candidates(now: Candidate, *, workers: int, most: int) -> list[Candidate]:
    """The micro-batches up to ``most`` samples that are worth a look, from the smallest on, ``now`` among them.

    Those that divide the batch come with as many lanes as the batch then has room for, at least one per worker. For
    doubled and halved ones that do not, the batch is the next larger one that works.

    >>> now = Candidate(micro_batch=3, batch=24, lanes=8)
    >>> [(other.micro_batch, other.batch, other.lanes) for other in candidates(now, workers=2, most=24)]
    [(1, 24, 8), (2, 24, 6), (3, 24, 8), (4, 24, 6), (6, 24, 4), (8, 24, 3), (12, 24, 2), (24, 192, 8)]
    """
    sizes = {size for size in range(1, min(now.batch // workers, most) + 1) if now.batch % size == 0}
    sizes |= {now.micro_batch >> power for power in range(now.micro_batch.bit_length())}
    doubled = now.micro_batch
    while doubled <= most:
        sizes.add(doubled)
        doubled *= 2
    return [_with(now, size, workers) for size in sorted(sizes | {now.micro_batch})]


def shown(choices: list[Candidate], now: Candidate, largest: int) -> list[Candidate]:
    """The few of ``choices`` for a table: doublings from ``now`` up to the first above ``largest``, and two below.

    Args:
        largest: the largest micro-batch that fits.

    >>> choices = candidates(Candidate(micro_batch=8, batch=64, lanes=8), workers=1, most=256)
    >>> [choice.micro_batch for choice in shown(choices, choices[3], largest=16)]
    [2, 4, 8, 16, 32]
    """
    sizes = {now.micro_batch, now.micro_batch // 2, now.micro_batch // 4, largest}
    doubled = now.micro_batch
    while doubled <= largest:
        doubled *= 2
        sizes.add(doubled)
    return [choice for choice in choices if choice.micro_batch in sizes]


def _with(now: Candidate, micro_batch: int, workers: int) -> Candidate:
    for lanes in range(now.lanes, workers - 1, -1):
        if now.batch % (lanes * micro_batch) == 0:
            return Candidate(micro_batch=micro_batch, batch=now.batch, lanes=lanes)
    unit = now.lanes * micro_batch
    return Candidate(micro_batch=micro_batch, batch=-(-now.batch // unit) * unit, lanes=now.lanes)
