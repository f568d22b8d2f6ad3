"""The ``paceline`` command. Nothing is imported before a subcommand needs it, so that help is immediate."""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, get_args

from paceline import env
from paceline.config import Resume
from paceline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, ConfigError, PacelineError, did_you_mean

if TYPE_CHECKING:
    from paceline.parsing import Settings

__all__ = ["main"]


_HELP = """\
usage: paceline COMMAND ...

Data-parallel training whose result does not depend on the workers.

  train [CONFIG]           train; without CONFIG, a small demo
  prepare SRC... --out DIR text or jsonl to token files
  launch SCRIPT            your own script in several workers
  sample RUN               text from a run's newest checkpoint
  verify [CONFIG]          the same bits for other numbers of workers?
  order                    which lane sees which sample
  completion bash|zsh      completions for your shell

  --version                print the version
  --help                   this; `paceline COMMAND --help` for more

Exit codes: 0 done; 1 your code failed, or bits differ; 2 usage or configuration; 75 preempted, go on with --resume;
130 Ctrl-C."""

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
usage: paceline verify [CONFIG] --workers 1,2,3 [--steps N] [--interrupt] [--out DIR] [--SECTION.NAME VALUE ...]

Runs CONFIG from scratch with each number of workers and compares all bits after every step. Exit code 0: equal; 1: not,
with the first step, lane loss or parameter that differs.

  --workers LIST     numbers of workers; the first is the reference
  --steps N          only the first N steps; the schedule stays the whole run's
  --interrupt        also stop each run twice, and go on with other numbers of workers
  --out DIR          where proof.json and the runs go; default <run directory>-verify
  Settings as for `paceline train`.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line, by default this process's; returns its exit code. Errors go to standard error."""
    words = list(sys.argv[1:] if argv is None else argv)
    _mend_streams()
    try:
        return _dispatch(words)
    except PacelineError as error:
        print(f"paceline: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = error.filename or "the output"
        message = f"cannot write {what}: found {error.strerror}, need room for it. Free some, or write elsewhere."
        print(f"paceline: error: {message}", file=sys.stderr)
        _discard_output()
        return EXIT_FAILED


def _discard_output() -> None:
    """Standard output goes nowhere from now on: the rest of it cannot be flushed at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _mend_streams() -> None:
    """Standard streams that take all text, whatever the locale, and none that is closed.

    The number of a closed one would go to the next file that is opened, which then takes what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, "w" if number else "r", encoding="utf-8"))
        elif number and isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _dispatch(words: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "prepare": _prepare,
        "launch": _launch,
        "sample": _sample,
        "verify": _verify,
        "order": _order,
        "completion": _completion,
    }
    if not words or words[0] in ("-h", "--help", "help"):
        print(_HELP, file=sys.stdout if words else sys.stderr)
        return EXIT_DONE if words else ConfigError.exit_code
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"paceline {version('paceline')}")
        return EXIT_DONE
    if words[0] not in commands:
        raise ConfigError(
            "cannot run that", found=f"`paceline {words[0]}`", needed="a command", fix=did_you_mean(words[0], commands)
        )
    code = commands[words[0]](words[1:])
    sys.stdout.flush()  # here, where a closed pipe is still understood
    return code


# train and verify: settings of a run


def _train(words: list[str]) -> int:
    if _wants_help(words):
        print(_TRAIN_HELP)
        _print_settings()
        return EXIT_DONE
    here = env.read()
    if here is None:
        return _supervise_training(words)
    from paceline.worker import work

    return work(lambda: _train_as_worker(words, here))


def _train_as_worker(words: list[str], here: env.WorkerEnv) -> int:
    from paceline.train import train_settings

    settings, resume, _ = _read_train(words)
    return train_settings(settings, resume=resume, is_main=here.rank == 0)


def _supervise_training(words: list[str]) -> int:
    from paceline.parsing import dump
    from paceline.run_dir import prepare_run_dir
    from paceline.supervisor import resolve_workers, supervise

    settings, resume, print_config = _read_train(words)
    if print_config:
        print(dump(settings), end="")
        return EXIT_DONE
    workers = resolve_workers(settings.recipe, settings.execution)
    prepare_run_dir(settings.run_dir, resume)
    command = [sys.executable, "-m", "paceline", "train", *words]
    return supervise(command, workers, record=settings.run_dir / "workers.json")


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
            resume = value  # type: ignore[assignment]
        elif word in ("--print_config", "--print-config"):
            print_config = True
        else:
            rest.append(word)
    return parse(rest), resume, print_config


def _could_be_mode(word: str) -> bool:
    """Whether the word behind --resume says how, and is not the next option or a configuration."""
    return word.isalpha() and not Path(word).is_file()


def _launch(words: list[str]) -> int:
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
    return supervise([sys.executable, "-m", "paceline.worker", kind, script, *arguments], workers or default_workers())


def _verify(words: list[str]) -> int:
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
        if name in ("--workers", "--steps", "--out"):
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

    from paceline.lanes import lanes_of
    from paceline.parsing import parse

    settings = parse(rest)
    for count in workers:
        lanes_of(0, count, settings.recipe.lanes)

    from paceline.verify import verify

    out = Path(options["--out"]) if "--out" in options else None
    return verify(settings, workers=workers, steps=steps, interrupt=interrupt, out=out)


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


# the commands that stand for themselves


class _Parser(argparse.ArgumentParser):
    """argparse whose errors have four beats, and no abbreviated options."""

    def __init__(self, command: str, about: str) -> None:
        super().__init__(prog=f"paceline {command}", description=about, allow_abbrev=False)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The options in ``words``; raises `ConfigError`."""
        options, unknown = self.parse_known_args(words)
        if unknown:
            fix = did_you_mean(unknown[0], self.names()) if unknown[0].startswith("-") else f"See `{self.prog} --help`"
            raise ConfigError(
                f"cannot read `{self.prog}`", found=f"an unknown {unknown[0]}", needed="known options", fix=fix
            )
        return options

    def names(self) -> list[str]:
        """All options."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"cannot read `{self.prog}`: {message}", fix=f"See `{self.prog} --help`")


def _prepare_parser() -> _Parser:
    parser = _Parser("prepare", "Text or jsonl to token files that `paceline train` reads.")
    parser.add_argument("sources", nargs="+", metavar="SRC", help="a file, a folder, or python-stdlib")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory to write; must not exist")
    parser.add_argument(
        "--tokenizer", default="bytes", help="bytes (default), bpe:N trained on the sources, or a tokenizer.json"
    )
    parser.add_argument("--glob", metavar="PATTERN", help="which files of a folder; default *.txt and *.jsonl")
    parser.add_argument("--field", default="text", metavar="NAME", help="of a jsonl line that holds its text (text)")
    parser.add_argument(
        "--errors", default="fail", choices=["fail", "replace", "skip"], help="for text that is not UTF-8 (fail)"
    )
    parser.add_argument("--valid", type=float, default=0.05, metavar="F", help="fraction of documents held out (0.05)")
    parser.add_argument("--limit", type=_size, metavar="SIZE", help="stop after so much text, such as 20MB or 4GiB")
    parser.add_argument("--processes", type=int, metavar="N", help="default: one per CPU core, up to 16")
    return parser


def _prepare(words: list[str]) -> int:
    options = _prepare_parser().read(words)

    from paceline.data.prepare import prepare
    from paceline.progress import bytes_progress

    with bytes_progress("preparing") as progress:
        index = prepare(
            options.sources,
            options.out,
            tokenizer=options.tokenizer,
            glob=options.glob,
            field=options.field,
            errors=options.errors,
            valid=options.valid,
            limit_bytes=options.limit,
            processes=options.processes,
            progress=progress,
        )
    print(f"{options.out}: vocabulary {index['vocabulary']:,}, {index['dtype']}")
    for name, split in index["splits"].items():
        facts = [f"{value:,} {unit}" for unit, value in split.items() if isinstance(value, int)]
        print(f"  {name}: {', '.join(facts)}")
    for what in ("skipped", "replaced"):
        if count := index.get(what, {}).get("documents"):
            print(f"  {what}: {count:,} documents")
    return EXIT_DONE


def _size(text: str) -> int:
    """Bytes.

    >>> _size("20MB"), _size("1.5 KiB"), _size("7")
    (20000000, 1536, 7)
    """
    number = text.rstrip("BKMGTikmgtb ")
    units = {"": 1, **{f"{p}{i}": (1024 if i else 1000) ** n for n, p in enumerate("KMGT", 1) for i in ("", "I")}}
    try:
        return int(float(number) * units[text[len(number) :].strip().upper().removesuffix("B")])
    except (KeyError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write one as 20MB or 4GiB") from None


def _sample_parser() -> _Parser:
    parser = _Parser("sample", "Text from the newest good checkpoint of a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--prompt", default="\n", metavar="TEXT", help="text to go on from")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="at most so many (256)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: always the likeliest (0.8)")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the likeliest K only")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws (0)")
    return parser


def _sample(words: list[str]) -> int:
    options = _sample_parser().read(words)

    from paceline.generate import sample

    pieces = sample(
        options.run,
        options.prompt,
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    print(options.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return EXIT_DONE


def _order_parser() -> _Parser:
    parser = _Parser("order", "Which samples each lane sees in an epoch, in order. Workers do not come into it.")
    parser.add_argument("--samples", type=int, required=True, metavar="N", help="size of the data")
    parser.add_argument("--lanes", type=int, default=8, metavar="L", help="(8)")
    parser.add_argument("--order", default="sequential", choices=["sequential", "cipher", "permutation"])
    parser.add_argument("--tail", default="short", choices=["short", "pad", "drop"])
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="(0)")
    parser.add_argument("--epoch", type=int, default=0, metavar="E", help="(0)")
    return parser


def _order(words: list[str]) -> int:
    options = _order_parser().read(words)
    for name, least in (("samples", 1), ("lanes", 1), ("seed", 0), ("epoch", 0)):
        if (value := getattr(options, name)) < least:
            raise ConfigError(
                "cannot show the order", found=f"--{name} {value}", needed=f"at least {least}", fix=f"Write --{name} 8"
            )

    from paceline.data.order import describe

    for line in describe(options.samples, options.lanes, options.order, options.tail, options.seed, options.epoch):
        print(line)
    return EXIT_DONE


_COMPLETION = """\
_paceline() {
    local word=${COMP_WORDS[COMP_CWORD]} words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="@COMMANDS@"
    elif [ "${word#-}" != "$word" ]; then
        case ${COMP_WORDS[1]} in
@CASES@
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _paceline paceline
"""


def _completion(words: list[str]) -> int:
    parser = _Parser("completion", "Prints completions; add `source <(paceline completion bash)` to ~/.bashrc.")
    parser.add_argument("shell", choices=["bash", "zsh"])
    shell = parser.read(words).shell

    from paceline.parsing import describe

    settings = [f"--{name}" for name, _, _ in describe()] + ["--run-dir", "--config", "--help"]
    options = {
        "train": [*settings, "--resume", "--print_config"],
        "verify": [*settings, "--workers", "--steps", "--interrupt", "--out"],
        "prepare": _prepare_parser().names(),
        "launch": ["-n", "-m", "--workers", "--help"],
        "sample": _sample_parser().names(),
        "order": _order_parser().names(),
    }
    cases = "\n".join(f'            {command}) words="{" ".join(names)}" ;;' for command, names in options.items())
    if shell == "zsh":
        print("autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit")
    print(_COMPLETION.replace("@COMMANDS@", " ".join([*options, "completion"])).replace("@CASES@", cases), end="")
    return EXIT_DONE
