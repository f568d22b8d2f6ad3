"""The subcommands that start workers: train, launch, verify. Each takes the words behind its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from paceline import env
from paceline.config import Resume
from paceline.errors import EXIT_DONE, ConfigError, did_you_mean

if TYPE_CHECKING:
    from paceline.parsing import Settings
    from paceline.verify.runs import Recompute

__all__ = ["launch", "train", "train_as_worker", "verify"]

_TRAIN_HELP = """\
usage: paceline train [CONFIG] [-n N] [--run-dir DIR] [--resume [auto|never|must]] [--SECTION.NAME VALUE ...]

Trains what CONFIG (YAML) describes; without CONFIG, a small demo on the source of Python's standard library.

  -n N               workers on this machine (execution.workers)
  --run-dir DIR      where the run lives (execution.run_dir); default runs/<name of CONFIG>
  --resume [HOW]     auto (when nothing follows): go on from the newest checkpoint, or start if there is none;
                     must: only go on; never (the default): only start. A restart by torchrun or Slurm implies auto.
  --config CONFIG    the same as CONFIG alone
  --print_config     print all settings as YAML and end
  --task.NAME VALUE  an argument of the task

Every setting may stand in CONFIG, or here:
"""

_LAUNCH_HELP = """\
usage: paceline launch [-n N] SCRIPT [ARGS ...]
       paceline launch SCRIPT [-n N] [-- ARGS ...]

Runs a Python script in N workers on this machine, each with its place in the team in its environment, as torchrun does.
When one fails, the others are ended and its error is shown once. No process is left behind.

  -n N, --workers N  workers; default: one per GPU, or one per two CPU cores
  -m                 SCRIPT is a module: paceline launch -m package.train
  ARGS               go to the script
"""

_VERIFY_HELP = """\
usage: paceline verify [CONFIG] --workers 1,2,3 [--steps N] [--interrupt] [--faults SENTENCE]
                       [--recompute LIST] [--out DIR] [--SECTION.NAME VALUE ...]

Runs CONFIG from scratch with each number of workers and compares all bits after every step. Exit code 0: equal; 1: not,
with the first step, lane loss or parameter that differs.

  --workers LIST     numbers of workers; the first is the reference
  --steps N          only the first N steps; the schedule stays the whole run's
  --interrupt        also stop each run twice, and go on with other numbers of workers
  --faults SENTENCE  also run each with these failures: "kill worker=1 step=3; stop worker=0 step=7". Worker N, from 0,
                     does to itself at step N, from 1: kill, stop, crash (signals), hang, spin (endless loops), term,
                     usr1, interrupt (save and stop, then resumed). More words: at=step (the default) or exchange,
                     update, body, evaluate, save, reform, copy, join; lane=N; times=N
  --recompute LIST   also run each with these ways to recompute: all, selective, every:2, auto, lists of blocks, and
                     mappings of blocks to levels: 'all,every:2,[blocks.0, blocks.1],{"blocks.*": selective}'
  --out DIR          where proof.json and the runs go; default <run directory>-verify
  Settings as for `paceline train`.
"""


def train(words: list[str]) -> int:
    if _wants_help(words):
        print(_TRAIN_HELP)
        _print_settings()
        return EXIT_DONE
    here = env.read()
    if here is None:
        return _supervise_training(words)
    from paceline.worker import work

    return work(lambda: train_as_worker(words))


def train_as_worker(words: list[str]) -> int:
    """`paceline train` in one of its workers. Collective."""
    from paceline.train import train_settings

    settings, resume, _ = _read_train(words)
    return train_settings(settings, resume=resume)


def _supervise_training(words: list[str]) -> int:
    from paceline.parsing import dump
    from paceline.run_dir import prepare_run_dir
    from paceline.supervisor import Template, resolve_workers, supervise

    with Template() as template:  # imports torch while this process does, for the task
        settings, resume, print_config = _read_train(words)
        if print_config:
            print(dump(settings), end="")
            return EXIT_DONE
        workers = resolve_workers(settings.recipe, settings.execution)
        prepare_run_dir(settings.run_dir, resume)
        program = ["call", "paceline.cli.running:train_as_worker", *words]
        record = settings.run_dir / "workers.json"
        return supervise(program, workers, record=record, is_run=True, template=template)


def _read_train(words: Sequence[str]) -> tuple[Settings, Resume, bool]:
    from paceline.parsing import parse

    resume: Resume = "auto" if env.restarts() > 0 else "never"
    print_config = False
    rest: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if name == "--resume":
            modes = get_args(Resume)
            if not equals and remaining and _could_be_mode(remaining[0]):
                value = remaining.pop(0)
            value = value or "auto"
            if value not in modes:
                raise ConfigError(
                    "cannot read --resume", found=value, needed=" or ".join(modes), fix=did_you_mean(value, modes)
                )
            resume = value if value != "never" or not env.begun_again() else "auto"  # type: ignore[assignment]
        elif word in ("--print_config", "--print-config"):
            print_config = True
        else:
            rest.append(word)
    return parse(rest), resume, print_config


def _could_be_mode(word: str) -> bool:
    """Whether the word behind --resume says how, and is not the next option or a configuration."""
    return word.isalpha() and not Path(word).is_file()


def launch(words: list[str]) -> int:
    """Options stand before SCRIPT or right behind it; all that follows, or stands behind ``--``, is the script's."""
    workers: int | None = None
    module, script = False, None
    remaining = list(words)
    while remaining:
        word = remaining[0]
        name, equals, value = word.partition("=")
        if name in ("-n", "--workers"):
            if not equals and len(remaining) < 2:
                raise ConfigError(f"cannot read {name}", found="nothing behind it", fix=f"Write {name} 2")
            workers = _whole(value if equals else remaining[1], name, "2")
            remaining = remaining[1 if equals else 2 :]
        elif script is not None:
            break
        elif word in ("-h", "--help"):
            print(_LAUNCH_HELP, end="")
            return EXIT_DONE
        elif word == "-m":
            module, remaining = True, remaining[1:]
        elif word.startswith("-"):
            fix = did_you_mean(name, ["--workers", "--help"]) if word.startswith("--") else "See `paceline launch -h`"
            raise ConfigError("cannot read `paceline launch`", found=f"an unknown {word}", needed="-n N", fix=fix)
        else:
            script, remaining = word, remaining[1:]
    arguments = remaining[1:] if remaining[:1] == ["--"] else remaining
    if script is None or not (module or Path(script).is_file()):
        raise ConfigError(
            "cannot launch workers",
            found="no script" if script is None else f"no file {script}",
            needed="the path of a Python script",
            fix="Write paceline launch -n 2 train.py, or -m for a module",
        )
    if env.read() is not None:
        raise ConfigError(
            "cannot launch workers",
            found="a process that is a worker already",
            needed="one launcher",
            fix="Start the script itself under torchrun or Slurm: python train.py",
        )
    from paceline.supervisor import default_workers, supervise

    kind = "module" if module else "script"
    return supervise([kind, script, *arguments], workers or default_workers())


def verify(words: list[str]) -> int:
    if _wants_help(words):
        print(_VERIFY_HELP)
        return EXIT_DONE
    options: dict[str, str] = {}
    interrupt = False
    rest: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if name in ("--workers", "--steps", "--faults", "--recompute", "--out"):
            if not equals and (not remaining or remaining[0].startswith("--")):
                raise ConfigError(f"cannot read {name}", found="nothing behind it", fix="See `paceline verify --help`")
            options[name] = value if equals else remaining.pop(0)
        elif word == "--interrupt":
            interrupt = True
        else:
            rest.append(word)
    if "--workers" not in options:
        raise ConfigError("cannot verify", found="no --workers", needed="a list", fix="Write --workers 1,2,3")
    workers = [_whole(count, "--workers", "1,2,3") for count in options["--workers"].split(",")]
    steps = _whole(options["--steps"], "--steps", "20") if "--steps" in options else None

    from paceline.faults import Faults
    from paceline.lanes import lanes_of
    from paceline.parsing import parse
    from paceline.supervisor import Template

    faults = Faults.parse(options["--faults"]) if "--faults" in options else None
    recompute = _ways(options["--recompute"]) if "--recompute" in options else ()
    out = Path(options["--out"]) if "--out" in options else None
    with Template() as template:
        settings = parse(rest)
        for count in workers:
            lanes_of(0, count, settings.recipe.lanes)

        from paceline import verify as command

        return command.verify(
            settings,
            template,
            workers=workers,
            steps=steps,
            interrupt=interrupt,
            faults=faults,
            recompute=recompute,
            out=out,
        )


def _ways(text: str) -> list[Recompute]:
    """Ways to recompute: what YAML would read inside brackets, all of it text (a block's name may be a number)."""
    import yaml

    try:
        read: list[Recompute] = yaml.load(f"[{text}]", Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        found, read = f"{text!r}, {error.problem}", []
    else:
        found = repr(text)
    if not read:
        raise ConfigError(
            "cannot read --recompute",
            found=found,
            needed="ways to recompute, with commas between; a name with * in quotes",
            fix="""Write --recompute 'all,every:2,[blocks.0, blocks.1],{"blocks.*": selective}'""",
        )
    return read


def _whole(text: str, option: str, example: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"cannot read {option}", found=repr(text), needed="whole numbers >= 1", fix=f"Write {option} {example}"
        )
    return int(text)


def _wants_help(words: Sequence[str]) -> bool:
    return "-h" in words or "--help" in words


def _print_settings() -> None:
    import textwrap

    from paceline.parsing import describe

    for name, default, note in describe():
        print(f"  --{name} (default {default})")
        print(textwrap.fill(note, 112, initial_indent=" " * 8, subsequent_indent=" " * 8))
