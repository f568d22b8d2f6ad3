"""How verify tells what it finds: the table, live on a terminal, and the sentences under it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from paceline.config import Recipe
from paceline.verify.runs import Variation, stops
from paceline.verify.trace import Cost, Difference

__all__ = ["Display", "conclusion", "same", "told"]


class Display:
    """The table: live on a terminal, else a line as each run ends. A context.

    The last column is there with ``faults`` only.
    """

    _HEAD = ("workers", "digest", "seconds", "same?", "cost")

    def __init__(self, names: Sequence[str], *, faults: bool = False) -> None:
        self._head = self._HEAD if faults else self._HEAD[:-1]
        self._rows = {name: ("",) * len(self._head[1:]) for name in names}
        self._width = max(len(name) for name in [*names, self._HEAD[0]])
        self._running: Variation | None = None
        self._begun_s = 0.0
        console = Console()
        self._live = Live(console=console, get_renderable=self._table) if console.is_terminal else None

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        else:
            self._print(self._head)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def begin(self, variation: Variation) -> None:
        """From now on it is told how far this run has come; nothing without a terminal."""
        self._begun_s, self._running = time.monotonic(), variation

    def end(self, variation: Variation, same: str) -> None:
        """The run's own line."""
        self._running = None
        digest = variation.trace[-1].digest[:16] if variation.trace else "none"
        cost = told(variation.cost) if variation.cost is not None else ""
        row = self._row(digest, variation.seconds, same, cost)
        if self._live:
            self._rows[variation.name] = row
        else:
            self._print((variation.name, *row))

    def _row(self, digest: str, seconds: float, same: str, cost: str) -> tuple[str, ...]:
        return (digest, f"{seconds:.1f}", same, cost)[: len(self._head) - 1]

    def _table(self) -> Table:
        """As it is now; asked for by the live display's own thread."""
        if (running := self._running) is not None:
            done = running.events.read_bytes().count(b'"event": "digest"') if running.events.exists() else 0
            said = f"step {done}" if done else "starting"
            self._rows[running.name] = self._row(said, time.monotonic() - self._begun_s, "", "")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in self._head:
            table.add_column(name, justify="right" if name == "seconds" else "left")
        for name, row in self._rows.items():
            table.add_row(name, *row)
        return table

    def _print(self, row: Sequence[str]) -> None:
        name, digest, seconds, same, *cost = row
        print(f"{name:<{self._width}}  {digest:<16}  {seconds:>7}  {same:<5}  {''.join(cost)}".rstrip(), flush=True)


def told(cost: Cost) -> str:
    """The last column.

    >>> told(Cost(lost=2, seconds=0.31, restarts=0)), told(Cost(lost=0, seconds=0.0, restarts=1))
    ('2 lost, 0.31 s', '1 restart')
    """
    parts = [f"{cost.lost} lost, {cost.seconds:.2f} s"] if cost.lost or not cost.restarts else []
    parts += [f"{cost.restarts} restart{'s' if cost.restarts > 1 else ''}"] if cost.restarts else []
    return ", ".join(parts)


def same(difference: Difference | None) -> str:
    """Whether its bits are the reference's."""
    return "yes" if difference is None else f"no, from step {difference.step}"


def conclusion(variations: Sequence[Variation], recipe: Recipe) -> Iterator[str]:
    """The sentences under the table: equal, or where each run parts from the reference, how far, and why."""
    reference, steps = variations[0], len(variations[0].trace)
    different = [variation for variation in variations if variation.difference is not None]
    if not different:
        met = "; every fault was met" if any(variation.faults.statements for variation in variations) else ""
        yield f"equal: {len(variations)} runs, the same bits after each of {steps} steps{met}"
        return
    yield f"different: {len(different)} of {len(variations) - 1} runs from that with workers {reference.name}"
    for variation in different:
        there, weights = variation.difference, variation.weights
        assert there is not None and weights is not None
        where = f"{there.name} ({there.kind}; {there.count} of {there.of} differ)"
        resumed = ", the first after a resume" if there.step - 1 in stops(steps, len(variation.workers)) else ""
        yield f"workers {variation.name}, step {there.step}{resumed}: {where}"
        yield f"  {there.reference} with workers {reference.name}, {there.found} here"
        yield f"  final weights: up to {weights.max_abs:.2g} apart ({weights.at}), {weights.relative:.2g} relative"
    if recipe.gradients == "allreduce":
        yield "recipe.gradients=allreduce: the backend's own sum moves with the workers; exact gives the same bits"
        return
    first = min((v.difference for v in different if v.difference), key=lambda difference: difference.step)
    if first.kind == "tensor":
        why = "the losses agree, so the forward passes did; the sum of gradients or the update did not"
    elif first.step > 1:
        why = "the weights before it agree; its data, dropout or another part of the forward pass did not"
    else:
        why = "the initial weights, the data or the forward pass did not agree"
    yield f"step {first.step}: {why}"
