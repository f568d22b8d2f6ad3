"""The ``paceline`` command. Nothing is imported before a subcommand needs it, so that help is immediate."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence

from paceline.cli import doctor, planning, running, tools
from paceline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, ConfigError, PacelineError, did_you_mean

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
  plan [CONFIG]            what a run will need, and what fits
  doctor SCRIPT            the data-parallel mistakes in a plain PyTorch script
  completion bash|zsh      completions for your shell

  --version                print the version
  --help                   this; `paceline COMMAND --help` for more

Exit codes: 0 done; 1 your code failed, bits differ, or the doctor found something; 2 usage or configuration;
75 preempted, go on with --resume; 130 Ctrl-C."""


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
        "train": running.train,
        "prepare": tools.prepare,
        "launch": running.launch,
        "sample": tools.sample,
        "verify": running.verify,
        "order": tools.order,
        "plan": planning.plan,
        "doctor": doctor.doctor,
        "completion": tools.completion,
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
