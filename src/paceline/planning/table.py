"""How a plan is told: tables, by rich on a terminal and as plain lines elsewhere, and the sentences around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.memory.plan import Level
from paceline.planning.candidates import Candidate
from paceline.planning.grid import Cell
from paceline.planning.sheet import Line
from paceline.sizes import show_size

__all__ = ["show_grid", "show_lines", "show_table", "told_levels"]


def show_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> None:
    """Prints rows under their heads; the first ``left`` columns and the last one flush left, the others right.

    What begins with ``over`` is red on a terminal, and a row in brackets dim.
    """
    console = Console(highlight=False)
    all_rows = [list(row) for row in rows]
    flush_left = {*range(left), len(head) - 1}
    widths = [max(len(row[at]) for row in [list(head), *all_rows]) for at in range(len(head))]
    if not console.is_terminal:
        for row in [list(head), *all_rows]:
            cells = [
                f"{cell:<{w}}" if at in flush_left else f"{cell:>{w}}"
                for at, (cell, w) in enumerate(zip(row, widths, strict=True))
            ]
            print("  ".join(cells).rstrip())
        return
    console.width = max(console.width, sum(widths) + 2 * len(widths))  # a figure that is cut is none
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for at, name in enumerate(head):
        table.add_column(name, justify="left" if at in flush_left else "right", no_wrap=at < len(head) - 1)
    for row in all_rows:
        dim = row[0].startswith("(")
        table.add_row(*(Text(cell, style="red" if cell.startswith("over") else "dim" if dim else "") for cell in row))
    console.print(table)


def show_lines(lines: Sequence[Line], peak: int, moment: str) -> None:
    """What a worker holds, and the sum at its worst moment; in brackets what is not there then."""
    rows = []
    for line in lines:
        what = line.what if line.counted else f"({line.what})"
        note = line.note if line.counted else f"{line.note}; at another moment".removeprefix("; ")
        rows.append((what, show_size(line.size), note))
    show_table(("a worker holds", "", ""), [*rows, ("most at once", show_size(peak), moment)])


def show_grid(rows: Sequence[tuple[Candidate, Mapping[str, Cell | None]]], budget: int) -> None:
    """The most that a worker holds, for each micro-batch and way to recompute; ``over``: more than the budget."""

    def told(cell: Cell | None) -> str:
        if cell is None:
            return "-"
        return f"{'over ' if cell.peak > budget else ''}{show_size(cell.peak)}"

    names = list(rows[0][1])
    show_table(
        ("micro_batch", "lanes", "batch", *names),
        [
            (str(recipe.micro_batch), str(recipe.lanes), str(recipe.batch), *(told(cells[name]) for name in names))
            for recipe, cells in rows
        ],
        left=0,
    )


def told_levels(levels: Mapping[str, Level]) -> str:
    """How many blocks do what.

    >>> told_levels({"a": "full", "b": "keep", "c": "selective", "d": "full"})
    '2 of 4 blocks recomputed, 1 selectively'
    """
    counts = Counter(levels.values())
    parts = [f"{counts['full']} of {len(levels)} blocks recomputed"] if counts["full"] else []
    if counts["selective"]:
        parts.append(f"{counts['selective']}{'' if parts else f' of {len(levels)} blocks'} selectively")
    return ", ".join(parts) or "nothing recomputed"
