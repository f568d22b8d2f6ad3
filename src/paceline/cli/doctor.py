"""The subcommand doctor: what is wrong with a plain PyTorch script. Takes the words behind its name."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.options import Parser
from paceline.errors import EXIT_BAD_USAGE, EXIT_DONE, EXIT_FAILED, ConfigError, UsageError

if TYPE_CHECKING:
    from paceline.doctor.examine import Examination

__all__ = ["doctor", "doctor_parser"]

_LIMITS = {"workers": (2, 64), "steps": (1, 1_000_000), "timeout": (1, 86_400)}
"""Of each option the least and the most that makes sense on one machine."""

_ABOUT = """\
Finds the data-parallel mistakes in a plain PyTorch training script, made for torchrun: reads it, then runs it under a
few workers on this machine's CPU. What stands behind `--` goes to the script. Files that it writes go to a scratch
folder. `# paceline: ignore[ID]` in a statement silences a rule there. Exit code 0: clean, or advice only; 1: something
was found; 2: could not look, or the script could not be run, and reading found nothing."""


def doctor_parser() -> Parser:
    parser = Parser("doctor", _ABOUT, otherwise="What is meant for the script goes behind `--`")
    parser.add_argument("script", nargs="?", type=Path, metavar="SCRIPT", help="a Python file that trains with DDP")
    parser.add_argument("--static", action="store_true", help="only read it: nothing of it is imported or run")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="ranks to start (2)")
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="end the run after so many steps, and a few seconds (20)"
    )
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="or after so many seconds (120)")
    parser.add_argument(
        "--compare", action="store_true", help="also run it with one worker at the same global batch, and compare"
    )
    parser.add_argument("--in-place", action="store_true", help="what it writes really goes where it says")
    parser.add_argument("--verbose", action="store_true", help="show the last that each rank printed, too")
    parser.add_argument("--format", choices=["text", "json"], default="text", help="text (default) or json")
    parser.add_argument("--select", type=_ids, default=(), metavar="ID,ID", help="only these rules")
    parser.add_argument("--ignore", type=_ids, default=(), metavar="ID,ID", help="all rules but these")
    parser.add_argument("--explain", metavar="ID", help="tell about a rule, with examples, and end; `all` lists them")
    return parser


def doctor(words: list[str]) -> int:
    cut = words.index("--") if "--" in words else len(words)
    try:
        return _doctor(words[:cut], words[cut + 1 :])
    except (ConfigError, UsageError) as error:
        if _for_programs(words[:cut]):
            from paceline.doctor.findings import as_json

            print(as_json((), [str(error)]))
        if isinstance(error, ConfigError):
            raise
        # here it is the command line's
        raise ConfigError(error.problem, found=error.found, needed=error.needed, fix=error.fix) from None


def _doctor(words: list[str], arguments: list[str]) -> int:
    options = doctor_parser().read(words)
    if options.explain is None:
        return _look(options, arguments)
    if options.format == "json":
        print(json.dumps(_explained_to_programs(options.explain), indent=2))
    else:
        print(_explained(options.explain))
    return EXIT_DONE


def _for_programs(words: list[str]) -> bool:
    """Whether JSON is wanted, however little else of the command line can be read."""
    return "--format=json" in words or ("--format", "json") in itertools.pairwise(words)


def _explained(name: str) -> str:
    from paceline.doctor.rules import RULES, explain

    if name != "all":
        return explain(name).rstrip()
    lines: list[str] = []
    family: str | None = None
    for rule in RULES.values():
        if rule.family != family:
            lines += [""] * bool(lines) + [rule.family]
            family = rule.family
        lines.append(f"  {rule.id:<30} {rule.severity:<8} {rule.title}")
    return "\n".join(lines)


def _explained_to_programs(name: str) -> dict[str, Any]:
    from paceline.doctor.rules import RULES, explain, rule

    if name == "all":
        return {"rules": [dataclasses.asdict(known) for known in RULES.values()]}
    return {**dataclasses.asdict(rule(name)), "page": explain(name)}


def _look(options: argparse.Namespace, arguments: list[str]) -> int:
    script = _script(options.script)
    for name, (least, most) in _LIMITS.items():
        if not least <= (value := getattr(options, name)) <= most:  # NaN is not either
            raise ConfigError(
                "cannot run a script",
                found=f"--{name} {value:g}",
                needed=f"{least} to {most:,}",
                fix=f"Write --{name} {least}, or --static to read the script only",
            )

    from paceline.doctor.examine import Limits, examine
    from paceline.doctor.rules import RULES, rule

    for name in (*options.select, *options.ignore):
        rule(name)  # before anything is run
    if not set(options.select or RULES) - set(options.ignore):
        raise ConfigError(
            "cannot look for anything",
            found="--ignore of every rule that is selected",
            needed="at least one rule",
            fix="Leave one of the options out",
        )

    def look(limits: Limits | None = None, tell: Callable[[str], None] | None = None) -> Examination:
        rules = {"select": options.select, "ignore": options.ignore}
        return examine(script, arguments, limits=limits, **rules, with_one=options.compare, tell=tell)

    if options.static and options.compare:
        raise ConfigError(
            "cannot compare what is not run",
            found="--static together with --compare",
            fix="Leave one of them out",
        )
    if options.static:
        return _answer(script, look(), options)

    from paceline.progress import waiting

    limits = Limits(workers=options.workers, steps=options.steps, timeout_s=options.timeout, in_place=options.in_place)
    told = f"running {script} in {limits.workers} workers: {limits.steps} steps, {limits.timeout_s:g} s at most"
    print(f"paceline: {told}", file=sys.stderr, flush=True)
    with _interrupted_once(), waiting("paceline doctor") as tell:
        tell(f"reading {script}")
        seen = look(limits, tell)
    return _answer(script, seen, options)


@contextlib.contextmanager
def _interrupted_once() -> Iterator[None]:
    """Whoever is impatient may press Ctrl-C again: what the first one has begun to put in order is put in order."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # to the end of the command
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # who calls this has made other plans
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _answer(script: Path, seen: Examination, options: argparse.Namespace) -> int:
    """Shows what was found, and gives the exit code."""
    from paceline.doctor.findings import as_json, as_text

    if options.verbose:
        for rank, text in enumerate(seen.printed):
            print(f"paceline: rank {rank} printed, at last:\n{text.rstrip()}", file=sys.stderr, flush=True)
    if options.format == "json":
        print(as_json(seen.findings, seen.notes, seen.comparison))
    elif seen.looked or seen.findings:
        print(as_text(seen.findings, seen.notes, seen.comparison))
    else:
        for note in seen.notes:
            if note not in (seen.cannot or ""):
                print(f"paceline: note: {note}", file=sys.stderr, flush=True)
    if seen.sick:
        return EXIT_FAILED
    if seen.looked:
        return EXIT_DONE
    if options.format == "text":
        raise ConfigError(
            f"cannot look at {script}",
            found=seen.cannot,
            fix="Mend that, give what the script itself needs behind `--`, or only read it with --static"
            if seen.printed
            else "Mend that first",
        )
    return EXIT_BAD_USAGE


def _script(given: Path | None) -> Path:
    """The script, which is there, and is one."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError(
            "cannot look at a script",
            found="a working directory that was removed",
            fix="Change to one that is there",
        ) from None
    if given is None:
        found = "no script"
    elif given.suffix == ".ipynb":
        found = f"{given}, a notebook"
    elif given.is_file():
        return given
    else:
        found = f"{given}, which is no file" if given.exists() else f"no file {given}"
    raise ConfigError(
        "cannot look at a script",
        found=found,
        needed="the path of a Python file",
        fix="Write paceline doctor train.py -- ARGUMENTS OF train.py",
    )


def _ids(text: str) -> tuple[str, ...]:
    """Ids between commas.

    >>> _ids("uneven-inputs, rank-local-skip")
    ('uneven-inputs', 'rank-local-skip')
    """
    names = tuple(name for part in text.split(",") if (name := part.strip()))
    if not names:
        raise argparse.ArgumentTypeError("no id of a rule; `paceline doctor --explain all` lists them")
    return names
