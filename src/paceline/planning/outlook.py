"""A plan as figures: what any micro-batch needs under any way to recompute, and the largest that fits. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from paceline.memory.profile import Profile
from paceline.planning.candidates import Candidate, candidates, shown
from paceline.planning.footprint import Footprint
from paceline.planning.grid import Cell, Mode, between, cell

__all__ = ["Outlook"]


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Answers for one run.

    Args:
        now: the recipe's sizes.
        modes: ways to recompute, by name; ``own_mode``: the run's own.
        workers: of the run; ``budget``: bytes for each.
        looked_at: costs of a few micro-batches.
        there: the footprint of a worker for other sizes.
    """

    now: Candidate
    modes: Mapping[str, Mode]
    own_mode: str
    workers: int
    budget: int
    looked_at: Mapping[int, Profile]
    there: Callable[[Candidate], Footprint]

    @cached_property
    def choices(self) -> list[Candidate]:
        """Every micro-batch that was thought of, ascending."""
        least, most = min(self.looked_at), max(self.looked_at)
        return [each for each in candidates(self.now, workers=self.workers, most=most) if each.micro_batch >= least]

    def costs(self, choice: Candidate) -> Profile:
        """Of a forward and backward."""
        return between(self.looked_at, choice.micro_batch)

    def cell(self, choice: Candidate, mode: str) -> Cell | None:
        """What that micro-batch needs, recomputing in that way; ``None``: the model cannot."""
        return cell(self.costs(choice), self.there(choice), self.modes[mode], self.budget)

    def fits(self, choice: Candidate, mode: str) -> bool:
        """Whether it keeps the budget."""
        found = self.cell(choice, mode)
        return found is not None and found.peak <= self.budget

    def largest(self, mode: str) -> Candidate | None:
        """The largest micro-batch that fits, recomputing in that way."""
        return max(
            (choice for choice in self.choices if self.fits(choice, mode)),
            key=lambda choice: choice.micro_batch,
            default=None,
        )

    def grid(self) -> list[tuple[Candidate, dict[str, Cell | None]]]:
        """The rows of the table: around what the recipe says and what fits."""
        fitting = [found.micro_batch for mode in self.modes if (found := self.largest(mode)) is not None]
        few = shown(self.choices, self.now, max(fitting, default=0))
        return [(choice, {mode: self.cell(choice, mode) for mode in self.modes}) for choice in few]

    def least(self) -> tuple[Candidate, Cell]:
        """What needs the least of all, recomputing where it helps."""
        # Within nothing, auto is what needs the least.
        choices = [*self.choices, *filter(None, map(self.with_fewest_lanes, self.choices))]
        found = [(choice, cell(self.costs(choice), self.there(choice), "auto", 0)) for choice in choices]
        pairs = [(choice, least) for choice, least in found if least is not None]
        return min(pairs, key=lambda pair: pair[1].peak)

    def worth_a_look(self) -> tuple[bool, bool]:
        """Whether smaller micro-batches than that of now are, since it does not fit, and whether larger ones are."""
        return not self.fits(self.now, "none"), any(self.fits(self.now, mode) for mode in self.modes)

    def with_fewest_lanes(self, choice: Candidate) -> Candidate | None:
        """The same with one lane per worker, which leaves no partial sums; ``None``: its batch does not divide so."""
        fits = choice.batch % (self.workers * choice.micro_batch) == 0
        return replace(choice, lanes=self.workers) if fits else None

    def sharded(self, choice: Candidate, activations: int) -> tuple[int, int]:
        """The peak if workers shared out the optimizer's state, and if parameters and gradients too. About: parameters
        in use have to be gathered."""

        def share(size: int) -> int:
            return -(-size // self.workers)

        there = self.there(choice)
        copied = min(there.copy, there.optimizer)
        fewer = replace(there, optimizer=share(there.optimizer), copy=there.copy - copied + share(copied))
        fewest = replace(
            fewer,
            parameters=share(there.parameters),
            gradients=share(there.gradients),
            lane_sums=share(there.lane_sums),
            copy=share(there.copy),
        )
        return fewer.peak(activations)[0], fewest.peak(activations)[0]
