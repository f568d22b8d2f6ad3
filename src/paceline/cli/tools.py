"""The subcommands that stand alone: prepare, sample, order, completion. Each takes the words behind its name."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.options import Parser
from paceline.errors import EXIT_DONE, ConfigError

__all__ = ["completion", "order", "prepare", "sample"]


def _prepare_parser() -> Parser:
    parser = Parser("prepare", "Text or jsonl to token files that `paceline train` reads.")
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


def prepare(words: list[str]) -> int:
    options = _prepare_parser().read(words)

    from paceline.data import prepare as preparing
    from paceline.progress import bytes_progress

    with bytes_progress("preparing") as progress:
        index = preparing.prepare(
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


def _sample_parser() -> Parser:
    parser = Parser("sample", "Text from the newest good checkpoint of a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--prompt", default="\n", metavar="TEXT", help="text to go on from")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="at most so many (256)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: always the likeliest (0.8)")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the likeliest K only")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws (0)")
    return parser


def sample(words: list[str]) -> int:
    options = _sample_parser().read(words)

    from paceline import generate

    pieces = generate.sample(
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


def _order_parser() -> Parser:
    parser = Parser("order", "Which samples each lane sees in an epoch, in order. Workers do not come into it.")
    parser.add_argument("--samples", type=int, required=True, metavar="N", help="size of the data")
    parser.add_argument("--lanes", type=int, default=8, metavar="L", help="(8)")
    parser.add_argument("--order", default="sequential", choices=["sequential", "cipher", "permutation"])
    parser.add_argument("--tail", default="short", choices=["short", "pad", "drop"])
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="(0)")
    parser.add_argument("--epoch", type=int, default=0, metavar="E", help="(0)")
    return parser


def order(words: list[str]) -> int:
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


def completion(words: list[str]) -> int:
    parser = Parser("completion", "Prints completions; add `source <(paceline completion bash)` to ~/.bashrc.")
    parser.add_argument("shell", choices=["bash", "zsh"])
    shell = parser.read(words).shell

    from paceline.cli.doctor import doctor_parser
    from paceline.parsing import describe

    settings = [f"--{name}" for name, _, _ in describe()] + ["--run-dir", "--config", "--help"]
    options = {
        "train": [*settings, "--resume", "--print_config"],
        "verify": [*settings, "--workers", "--steps", "--interrupt", "--faults", "--recompute", "--out"],
        "plan": [*settings, "--memory", "--measure"],
        "prepare": _prepare_parser().names(),
        "launch": ["-n", "-m", "--workers", "--help"],
        "sample": _sample_parser().names(),
        "order": _order_parser().names(),
        "doctor": doctor_parser().names(),
    }
    cases = "\n".join(f'            {command}) words="{" ".join(names)}" ;;' for command, names in options.items())
    if shell == "zsh":
        print("autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit")
    print(_COMPLETION.replace("@COMMANDS@", " ".join([*options, "completion"])).replace("@CASES@", cases), end="")
    return EXIT_DONE
