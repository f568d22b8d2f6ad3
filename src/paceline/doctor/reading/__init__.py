"""Reads a script without importing or running it, and finds what can be told from its source.

`program` has the script's own files, parsed. `statements.Reader` walks the syntax tree from the script's top into
functions, classes and local imports, with a `values.Value` in place of whatever the script would compute. It leaves a
`trace.Trace`: what the script does, in order, with the loops and conditions around it. The rules are small functions
over that trace, in ``checks_*``, which `checks` asks one by one; `evidence` has the questions that several of them
ask, `parts` that of which parts of a model its forward uses. `circumstances` keeps of the trace, for the run pass,
under which conditions the script comes to a line.

What becomes of what is known is said by functions: by pure ones in `flows` for whatever is made of a value and in
`arithmetic` for a calculation, whoever writes it; by those that may ask the reader for more, each told by its name:

* `builtin`: Python's own functions; `containers`: methods of lists, dicts, texts and paths;
* `torch_calls`: torch's functions and methods; `forwards`: calls of modules, losses; `samples`: loaders, samplers, data
  sets; `seeds`: random numbers. What torch's names mean at all stands in the tables of `knowledge`;
* `instances`: objects of the script's own classes, `lookup`: what these have; `surroundings`: command line,
  environment, processes.

The reader itself is one class, since each part of a syntax tree may hold each other one. `machine` is what it
remembers, under which conditions, and the trace that it leaves; `walker` what its parts, and the functions above, may
ask of each other. The parts are layers, each of which knows those below: `operators`, `expressions`, `objects`
(attributes, elements, iteration), `calls`, `assignments`, `definitions`, `statements`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from paceline.doctor.circumstances import Circumstances
from paceline.doctor.findings import Finding
from paceline.doctor.reading.checks import judged
from paceline.doctor.reading.circumstances import circumstances
from paceline.doctor.reading.program import Program
from paceline.doctor.reading.statements import Reader
from paceline.errors import UsageError

__all__ = ["Read", "read"]

RECURSION: Final = 12_000
ASKING_S: Final = 20.0
"""For all rules together; the largest public scripts take a tenth of a second."""
CANNOT: Final = "holds something that the reader cannot follow"


@dataclass(frozen=True, kw_only=True)
class Read:
    """What was read.

    Args:
        notes: what could not be read, and why.
        looked: whether the script itself could be read.
        circumstances: under which conditions the script comes to its lines.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    looked: bool
    circumstances: Circumstances = field(default_factory=Circumstances)


def read(script: Path) -> Read:
    """Reads ``script`` and the local files that it imports.

    Raises:
        UsageError: there is no such file.
    """
    if not script.is_file():
        found = f"{script}, {'a folder' if script.is_dir() else 'which is not there'}"
        raise UsageError("cannot read a script", found=found, needed="a Python file", fix="Check the path")
    with _deep_recursion():
        try:
            program = Program(script)
        except ValueError as error:
            return Read(findings=(), notes=(str(error),), looked=False)
        reader = Reader(program)
        notes = program.notes
        try:
            reader.walk()
        except RecursionError:
            reader.trace.whole = False
            notes.append(f"{script}: nested too deeply; read in part")
        except Exception as error:  # whatever a script may hold: what was read until then still counts
            reader.trace.whole = False
            notes.append(f"{script}: {CANNOT} ({type(error).__name__}: {error}); read in part")
        if not reader.trace.whole and not any("read in part" in note for note in notes):
            notes.append(f"{script}: too long to follow everywhere; read in part")
        reader.trace.until_s = time.thread_time() + ASKING_S
        findings, unjudged = judged(reader.trace)
        notes += unjudged
        around = circumstances(reader.trace)
    once = {(finding.id, finding.path, finding.line): finding for finding in reversed(findings)}
    return Read(findings=tuple(reversed(once.values())), notes=tuple(notes), looked=True, circumstances=around)


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Expressions and calls nest deeper in the reader than in the script."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, RECURSION))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
