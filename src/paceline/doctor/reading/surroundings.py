"""What surrounds a script: its command line, its environment, and the processes that it starts."""

from __future__ import annotations

import ast
from typing import Final

from paceline.doctor.reading.knowledge import LAUNCHED
from paceline.doctor.reading.machine import Machine
from paceline.doctor.reading.values import NONE, RANKS, Known, Value
from paceline.doctor.reading.walker import Walker

__all__ = ["environment_call", "parser_call", "spawn", "variable"]


_RANKS_ELSEWHERE: Final = {
    "SLURM_PROCID": "global_rank",
    "SLURM_LOCALID": "local_rank",
    "OMPI_COMM_WORLD_RANK": "global_rank",
    "OMPI_COMM_WORLD_LOCAL_RANK": "local_rank",
    "PMI_RANK": "global_rank",
}
"""Variables in which other launchers tell a rank."""


def environment_call(
    reader: Walker, name: str, arguments: list[Value], keywords: dict[str, Value], node: ast.AST
) -> Value:
    match name:
        case "os.environ.get" | "os.getenv" | "os.environ.pop" | "os.environ.setdefault" if arguments:
            return variable(reader, arguments[0], arguments[1] if len(arguments) > 1 else NONE)
        case "os.environ.update":
            for key, value in {**(arguments[0].fields if arguments else {}), **keywords}.items():
                reader.event("environment", node, name=key, arguments={"value": value})
    return Value("dict", frozenset({"open"}), name="os.environ")


def variable(machine: Machine, key: Value, default: Value | None = None) -> Value:
    """An environment variable."""
    name = key.only
    if isinstance(name, str):
        machine.trace.variables.add(name)
    match name:
        case "RANK":
            labels = frozenset({"rank", "global_rank", "environment"})
            return Value("scalar", labels, known=Known(("0", "1")))
        case "LOCAL_RANK":
            labels = frozenset({"rank", "local_rank", "environment"})
            return Value("scalar", labels, known=Known(("0", "1")))
        case "WORLD_SIZE" | "LOCAL_WORLD_SIZE":
            return Value(
                "scalar", frozenset({"world", "world-multiple", "environment"}), "world size", Known((str(RANKS),))
            )
    if (which := _RANKS_ELSEWHERE.get(name)) is not None:
        return Value(labels=frozenset({"rank", which})) if default is None or default.is_none else default
    if isinstance(name, str) and name in LAUNCHED:
        return Value("unknown", name=f"os.environ[{name}]")
    labels = default.labels if default is not None else frozenset()
    if isinstance(name, str) and name.startswith(("SLURM_", "OMPI_", "PMI_")):
        labels |= {"other-launcher"}
    elif isinstance(name, str) and any(part in name.upper() for part in ("TMP", "TEMP", "SCRATCH")):
        labels |= {"own-disk"}
    return Value(labels=labels)


def parser_call(parser: Value, name: str, arguments: list[Value], keywords: dict[str, Value]) -> Value:
    if name == "add_argument" and arguments:
        flags = [flag.only for flag in arguments if isinstance(flag.only, str)]
        long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
        named = keywords.get("dest", NONE).only
        field = named if isinstance(named, str) else long.lstrip("-").replace("-", "_")
        parser.fields[field] = _option(field, keywords)
        return NONE
    if name in ("parse_args", "parse_known_args", "parse_args_into_dataclasses"):
        made = Value("namespace", fields=parser.fields)
        return made if name == "parse_args" else Value("tuple", items=[made, Value()])
    if name == "set_defaults":
        for field, value in keywords.items():
            parser.fields[field] = Value("unknown", value.labels)
        return NONE
    return parser if name.startswith("add_") else Value()


def spawn(reader: Walker, role: str, given: dict[str, Value], node: ast.AST) -> None:
    """Reads what started processes run, as a rank of them."""
    target = given.get("fn") or given.get("target")
    if target is None or target.kind not in ("function", "partial"):
        return
    rank = Value("scalar", frozenset({"rank", "local_rank"}), known=Known((0, 1)))
    handed = list((given.get("args") or Value()).items or [])
    by_counting = [rank if part.name == "counter" else part for part in handed]
    handed = [rank, *handed] if role == "spawn" else by_counting
    outer = reader.loops, reader.levels, reader.within, reader.spawned
    reader.loops, reader.levels, reader.within, reader.spawned = [], [[]], [], True
    try:
        reader.call(target, handed, dict((given.get("kwargs") or Value()).fields), node)
    finally:
        reader.loops, reader.levels, reader.within, reader.spawned = outer


def _option(field: str, keywords: dict[str, Value]) -> Value:
    """A command line's option: its default is a hint, not a fact."""
    if field in ("local_rank", "rank"):
        own = "local_rank" if field == "local_rank" else "global_rank"
        return Value("scalar", frozenset({"rank", own}), known=Known((0, 1)))
    default = keywords.get("default", NONE)
    action = keywords.get("action", NONE).only
    if action in ("store_true", "store_false"):
        return Value("unknown", frozenset({"config"}), "flag")
    if default.known is not None and not default.is_none:
        hint = Known(default.known.points, None, assumed=True)
        return Value("scalar", default.labels | {"config"}, f"--{field}", hint)
    return Value("unknown", frozenset({"config"}) | default.labels, f"--{field}")
