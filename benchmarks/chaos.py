"""Real signals to real processes of real runs: that losing workers loses nothing, and what it costs.

    python benchmarks/chaos.py                                    everything; hours on a small machine
    python benchmarks/chaos.py --rows kill,stop --count 5         some rows, so many cases each
    python benchmarks/chaos.py --list                             the rows

Every case is a run of its own, struck at a moment that the seed decides, and must end in the digest of the undisturbed
run. Of a case that fails the run directory, its output, and for a hang the stacks are kept. Exit code 1 if one did.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from chaos_cases import CASES, Case, Place
from chaos_figures import BARS, FIGURES
from chaos_run import BrokenPromiseError

ROWS = CASES | FIGURES


@dataclass
class Row:
    """What came of one row."""

    name: str
    what: str
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)

    def told(self) -> str:
        """Its figures, each as one text."""
        return "; ".join(f"{name}: {_summary(values)}" for name, values in self.figures.items())


def run_row(name: str, case: Case, what: str, *, count: int, seed: int, folder: Path) -> Row:
    """All cases of a row, one after the other."""
    row = Row(name, what)
    for number in range(count):
        place = Place(run_dir=folder / f"{name}-{number:02d}", moments=Random(f"{seed} {name} {number}"), number=number)
        begun = time.monotonic()
        try:
            figures = case(place)
        except BrokenPromiseError as broken:
            row.failures.append(f"{name}-{number:02d}: {broken}")
            verdict = f"FAILED: {broken}. Kept: {place.run_dir}"
        else:
            row.passed += 1
            verdict = "; ".join(f"{key}: {_number(value)}" for key, value in figures.items())
            for key, value in figures.items():
                row.figures.setdefault(key, []).append(value)
            for path in folder.glob(f"{place.run_dir.name}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        print(f"{name} {number + 1}/{count}  {time.monotonic() - begun:.1f} s  {verdict}", flush=True)
    if name in BARS and (missed := BARS[name](row.figures)):
        row.failures.append(missed)
        print(f"{name}: {missed}", flush=True)
    return row


def _summary(values: Sequence[float]) -> str:
    if len(values) == 1 or len(set(values)) == 1:
        return _number(values[0])
    return f"median {_number(statistics.median(values))} ({_number(min(values))} to {_number(max(values))})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def table(rows: Sequence[Row], *, seed: int, elapsed_s: float) -> str:
    """As Markdown."""
    lines = [
        f"`make chaos`: seed {seed}, {len(os.sched_getaffinity(0))} cores, {elapsed_s / 60:.0f} minutes.",
        "",
        "| Fault | Cases | Passed | Figures |",
        "|---|---|---|---|",
    ]
    lines += [f"| {row.what} | {row.passed + len(row.failures)} | {row.passed} | {row.told()} |" for row in rows]
    failures = [failure for row in rows for failure in row.failures]
    lines += ["", *(f"* failed: {failure}" for failure in failures)] if failures else []
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="names, with commas between")
    parser.add_argument("--count", type=int, help="cases of each row; default: as many as the row is due")
    parser.add_argument("--seed", type=int, help="of the moments; default: another one each time, printed")
    parser.add_argument("--out", type=Path, help="file for the table, as Markdown")
    parser.add_argument("--folder", type=Path, help="for the runs, kept; default: a temporary one")
    parser.add_argument("--list", action="store_true", help="name the rows and end")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{name:12} {count:3}  {what}" for name, (_, count, what) in ROWS.items()))
        return 0
    names = arguments.rows.split(",")
    if unknown := sorted(set(names) - set(ROWS)):
        parser.error(f"no rows {', '.join(unknown)}; there are {', '.join(ROWS)}")
    seed = arguments.seed if arguments.seed is not None else Random().randrange(10**6)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, runs in {folder}", flush=True)
    begun = time.monotonic()
    rows = []
    for name in names:
        case, count, what = ROWS[name]
        print(f"\n{name}: {what}", flush=True)
        rows.append(run_row(name, case, what, count=arguments.count or count, seed=seed, folder=folder))
        text = table(rows, seed=seed, elapsed_s=time.monotonic() - begun)
        if arguments.out is not None:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(text)
    print(f"\n{text}", flush=True)
    failed = any(row.failures for row in rows)
    if not failed and arguments.folder is None:
        shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
