"""What surrounds a script: its command line, its environment, and the processes that it starts."""

from __future__ import annotations

import ast

from paceline.doctor.reading.objects import Objects
from paceline.doctor.reading.values import NONE, Known, Value

__all__ = ["environment_call", "parser_call", "spawn"]


def environment_call(
    reader: Objects, name: str, arguments: list[Value], keywords: dict[str, Value], node: ast.AST
) -> Value:
    match name:
        case "os.environ.get" | "os.getenv" | "os.environ.pop" | "os.environ.setdefault" if arguments:
            return reader.variable(arguments[0], node, arguments[1] if len(arguments) > 1 else NONE)
        case "os.environ.update":
            for key, value in {**(arguments[0].fields if arguments else {}), **keywords}.items():
                reader.event("environment", node, name=key, arguments={"value": value})
    return Value("dict", frozenset({"open"}), name="os.environ")


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


def spawn(reader: Objects, role: str, given: dict[str, Value], node: ast.AST) -> None:
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
