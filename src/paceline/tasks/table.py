"""Tables of numbers: columns chosen by name, a CSV file read with every mistake told by its line.

Legend of shapes: S rows, F features.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError, did_you_mean

__all__ = ["Columns", "Table", "read_csv"]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns of a table are the features, and which is the target.

    Args:
        features: names, in the order in which the model sees them.
        target: name.
        places: of the features, then of the target, in a row of the table.
    """

    features: tuple[str, ...]
    target: str
    places: tuple[int, ...]

    @classmethod
    def choose(cls, names: Sequence[str], target: str, features: Sequence[str] | None, origin: str) -> Columns:
        """By name from the ``names`` of all columns; ``features=None``: all but the target.

        >>> Columns.choose(["id", "age", "income"], "income", ["age"], "people.csv").places
        (1, 2)

        Raises:
            DataError: an unknown name (the nearest is given), or no feature.
        """
        chosen = tuple(name for name in names if name != target) if features is None else tuple(features)
        for name in (target, *chosen):
            if name not in names:
                fix = did_you_mean(name, names)
                if len(names) == 1 and any(mark in names[0] for mark in ";\t|"):
                    fix = "Separate the columns by commas"
                raise DataError(f"cannot find the column {name!r} in {origin}", found=_listed(names), fix=fix)
        if not chosen or target in chosen:
            raise DataError(
                f"cannot predict {target!r} in {origin}",
                found=f"the target among the features {_listed(chosen)}" if chosen else "no other column",
                needed="one or more columns to predict it from",
                fix="Leave it out of task.init_args.features" if chosen else "Name another target, or add features",
            )
        return cls(features=chosen, target=target, places=tuple(names.index(name) for name in (*chosen, target)))


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of finite numbers.

    Args:
        columns: what they are called.
        cells: (S, F + 1): the features, and the target last.
    """

    columns: Columns
    cells: NDArray[np.float64]


def read_csv(path: Path, target: str, features: Sequence[str] | None = None) -> Table:
    """The chosen columns of a CSV file: UTF-8, a header line, commas, a dot in decimals whatever the locale.

    Other columns may hold anything. Blank lines are passed over.

    Raises:
        DataError: no such file or column, a header that names a column twice, or, with its line: a row of another
            length, a cell that is no finite number.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, strict=True)
            rows = ((lines.line_num, row) for row in lines if row)
            columns, width = _header(rows, path, target, features)
            cells = np.array([_numbers(row, line, columns, width, path) for line, row in rows], dtype=np.float64)
    except OSError as error:
        raise DataError(
            f"cannot read the table {path}", found=error.strerror, needed="a CSV file", fix="Check task.init_args.data"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"cannot read the table {path}",
            found=f"byte {error.object[error.start]:#04x}, which is no UTF-8",
            needed="text in UTF-8",
            fix="Save it again as CSV in UTF-8",
        ) from error
    except csv.Error as error:
        raise DataError(
            f"cannot read the table {path}, line {lines.line_num}", found=str(error), needed="CSV", fix="Mend that line"
        ) from error
    return Table(columns=columns, cells=cells.reshape(-1, len(columns.places)))  # no rows have no columns either


def _header(
    rows: Iterator[tuple[int, list[str]]], path: Path, target: str, features: Sequence[str] | None
) -> tuple[Columns, int]:
    """The chosen columns, and how many there are in all."""
    _, header = next(rows, (0, []))
    names = [name.strip() for name in header]
    if not names:
        raise DataError(
            f"cannot read the table {path}",
            found="an empty file",
            needed="a header line",
            fix="Check task.init_args.data",
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(
            f"cannot read the table {path}",
            found=f"{len(twice)} names of more than one column: {_listed(twice)}",
            needed="another name for each column",
            fix="Mend its header line",
        )
    return Columns.choose(names, target, features, str(path)), len(names)


def _numbers(row: list[str], line: int, columns: Columns, width: int, path: Path) -> list[float]:
    """The chosen cells of one row."""
    if len(row) != width:
        raise DataError(
            f"cannot read the table {path}, line {line}",
            found=f"{len(row)} cells",
            needed=f"{width}, as in the header",
            fix="Mend that line; a cell with a comma in it needs quotes",
        )
    numbers = []
    for place, name in zip(columns.places, (*columns.features, columns.target), strict=True):
        cell = row[place].strip()
        try:
            number = float("" if "_" in cell else cell)  # Python would take 1_000
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise DataError(
                f"cannot use the column {name!r} of {path}, line {line}",
                found=f"{cell!r}" if cell else "an empty cell",
                needed="a finite number",
                fix="Mend or leave out that line, or leave out the column: task.init_args.features names those to use",
            )
        numbers.append(number)
    return numbers


def _listed(names: Iterable[str], most: int = 8) -> str:
    shown = list(names)
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")
