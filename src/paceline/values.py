"""Values from YAML or the command line against the typed arguments of a class, each mistake in four beats.

YAML is read by the rules of version 1.2: ``1e-3`` is a number, ``no`` and ``2024-01-01`` are text, ``010`` is ten, and
a name written twice is a mistake.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import inspect
import os
import pathlib
import re
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, Union

import jsonargparse
import yaml

from paceline.errors import ConfigError, did_you_mean

__all__ = [
    "MISSING",
    "Field",
    "Given",
    "Tree",
    "YamlDumper",
    "YamlLoader",
    "build",
    "check",
    "check_names",
    "fields_of",
    "origin_of",
    "section_of",
]

MISSING: Any = inspect.Parameter.empty


@dataclass(frozen=True)
class Given:
    """A value as somebody wrote it.

    Args:
        value: as YAML reads it.
        raw: the characters themselves, for messages and where text is wanted.
        origin: where it stands, e.g. ``run.yaml, line 7``.
        typed: YAML's reading is meant; ``False`` for words of a command line, where ``123`` may be text.
    """

    value: Any
    raw: str
    origin: str
    typed: bool = True


Tree: TypeAlias = "Given | dict[str, Tree]"


class YamlLoader(yaml.SafeLoader):
    """Reads one document, remembering lines."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own attribute, filled below; not that of YAML 1.1

    def tree(self, origin: str) -> Tree | None:
        """The document as nested dicts of `Given`; ``None`` when empty. Raises `yaml.YAMLError`."""
        node = self.get_single_node()
        if node is None:
            return None
        try:
            return self._tree(node, origin)
        except RecursionError:
            raise yaml.constructor.ConstructorError(
                None, None, "a value that contains itself", node.start_mark
            ) from None

    def _tree(self, node: yaml.Node, origin: str) -> Tree:
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.value in seen:
                    what = f"a second {key.value!r}" if isinstance(key, yaml.ScalarNode) else "a name that is no text"
                    raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
                seen.add(key.value)
            self.flatten_mapping(node)
            return {str(key.value): self._tree(value, origin) for key, value in node.value}
        raw = self.text[node.start_mark.index : node.end_mark.index].strip()
        value = self.construct_object(node, deep=True)
        return Given(value, raw or "nothing", f"{origin}, line {node.start_mark.line + 1}")

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def _int(self, node: yaml.ScalarNode) -> int:
        text = str(node.value).replace("_", "")
        return int(text, 0) if re.match("[-+]?0[xo]", text) else int(text)


class YamlDumper(yaml.SafeDumper):
    """Writes what `YamlLoader` reads back."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own attribute, filled below; not that of YAML 1.1

    def ignore_aliases(self, data: Any) -> bool:
        """Equal values are written out each time."""
        return True


YamlLoader.add_constructor("tag:yaml.org,2002:int", YamlLoader._int)
for _tag, _pattern, _first in [
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*|[-+]?0o[0-7]+|[-+]?0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
]:
    for _cls in (YamlLoader, YamlDumper):
        _cls.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


@dataclass(frozen=True)
class Field:
    """One argument of a constructor: its type hint and its default (`MISSING` when it needs a value)."""

    hint: Any
    default: Any

    @property
    def default_text(self) -> str:
        """The default as YAML on one line, without the mapping or list brackets' line breaks."""
        text = yaml.dump(_plain(self.default), Dumper=YamlDumper, default_flow_style=True, width=10_000)
        return text.removesuffix("\n").removesuffix("\n...")


def fields_of(cls: type) -> dict[str, Field]:
    """The named arguments of a class's constructor; ``**kwargs`` means those of the next class it derives from."""
    known: dict[str, Field] = {}
    for owner in cls.__mro__:
        init = owner.__dict__.get("__init__")
        if init is None or owner is object:
            continue
        try:
            hints = typing.get_type_hints(init)
        except NameError as error:
            raise ConfigError(
                f"cannot read the argument types of {cls.__module__}.{cls.__qualname__}",
                found=str(error),
                needed="type hints that exist at run time",
                fix="Import that name outside of `if TYPE_CHECKING`",
            ) from None
        parameters = list(inspect.signature(init).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                default = _default(cls, parameter)
                known.setdefault(parameter.name, Field(hints.get(parameter.name, Any), default))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return known


def section_of(hint: Any) -> type | None:
    """The dataclass that ``hint`` (or its optional) stands for: a group of named values. Else ``None``."""
    members = [member for member in _members(hint) if member is not type(None)]
    is_section = len(members) == 1 and isinstance(members[0], type) and dataclasses.is_dataclass(members[0])
    return members[0] if is_section else None


def check_names(tree: Mapping[str, Tree], known: Collection[str], prefix: str) -> None:
    """Raises `ConfigError` for the first name in ``tree`` that is not ``known``, with the nearest that is."""
    for name, below in tree.items():
        if name not in known:
            raise ConfigError(
                f"cannot use {prefix}{name} ({origin_of(below)})",
                found="an unknown name",
                needed="a known one",
                fix=did_you_mean(name, known),
            )


def origin_of(tree: Tree) -> str:
    """Where the first value below stands."""
    if isinstance(tree, Given):
        return tree.origin
    return next((origin_of(below) for below in tree.values()), "an empty mapping")


def check(cls: type, tree: Mapping[str, Tree], path: str) -> dict[str, Any]:
    """Every argument of ``cls`` as a plain value that YAML can hold: those in ``tree``, checked, else the default.

    Raises:
        ConfigError: an unknown name at any depth, a value of another type, or a missing one.
    """
    known = fields_of(cls)
    check_names(tree, known, f"{path}.")
    missing = [name for name, argument in known.items() if argument.default is MISSING and name not in tree]
    if missing:
        raise ConfigError(
            f"cannot make {cls.__name__}",
            found=f"no {', '.join(f'{path}.{name}' for name in missing)}",
            needed=_words(known[missing[0]].hint),
            fix=f"Add {missing[0]} to {path}",
        )
    plain = {}
    for name, argument in known.items():
        if name in tree:
            plain[name] = _check_value(argument, tree[name], f"{path}.{name}")
        else:
            plain[name] = _plain(argument.default)
    return plain


def build(cls: type, values: Mapping[str, Any]) -> Any:
    """An object of ``cls`` from what `check` returned. Raises what its constructor raises."""
    arguments = {}
    for name, argument in fields_of(cls).items():
        if name not in values:
            continue
        section, value = section_of(argument.hint), values[name]
        if section is not None and isinstance(value, Mapping):
            arguments[name] = build(section, value)
        elif value is None or _holds(argument.hint, value):
            arguments[name] = value
        else:
            arguments[name] = _typed(argument.hint, value)
    return cls(**arguments)


def _check_value(argument: Field, given: Tree, path: str) -> Any:
    hint, section = argument.hint, section_of(argument.hint)
    if isinstance(given, dict):
        if section is not None:
            return check(section, given, path)
        given = Given(_untree(given), f"{{{', '.join(given)}}}", origin_of(given))
    readings = [given.value]
    if not given.typed:
        readings = [_reading(given.raw), given.raw]
    for value in readings:
        if value is None and (hint is Any or type(None) in _members(hint)):
            return None
        if section is not None or value is None:
            continue
        if _holds(hint, value):
            return value
        try:
            return _plain(_typed(hint, value))
        except (argparse.ArgumentError, jsonargparse.ArgumentError, TypeError, ValueError):
            continue
    value = readings[0]
    default = None if argument.default is MISSING else argument.default_text
    raise ConfigError(
        f"cannot use {path} ({given.origin})",
        found=f"{given.raw} ({_kind(value)})",
        needed=_words(hint),
        fix=_fix(hint, value, given.raw)
        or (
            f"Leave it out for the default, {default}"
            if default
            else f"Write {path.rpartition('.')[2]}: {_words(hint)}"
        ),
    )


def _fix(hint: Any, value: Any, raw: str) -> str | None:
    choices = [
        str(choice) for member in _members(hint) if _origin(member) is Literal for choice in typing.get_args(member)
    ]
    if int in _members(hint) and isinstance(value, float) and value.is_integer():
        return f"Write {int(value)}"
    if len(choices) > 1:
        return did_you_mean(raw, choices)
    if section := section_of(hint):
        return f"Write a mapping of {', '.join(fields_of(section))}"
    return None


def _reading(raw: str) -> Any:
    try:
        tree = YamlLoader(raw).tree("")
    except yaml.YAMLError:
        return raw
    return None if tree is None else _untree(tree)


def _untree(tree: Tree) -> Any:
    if isinstance(tree, Given):
        return tree.value if tree.typed else _reading(tree.raw)
    return {name: _untree(below) for name, below in tree.items()}


def _typed(hint: Any, value: Any) -> Any:
    """``value`` as the type that ``hint`` asks for, by jsonargparse."""
    if hint is pathlib.Path and isinstance(value, str):
        return pathlib.Path(value)  # jsonargparse takes a name such as "?" for YAML
    parser = jsonargparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--value", type=hint)
    return parser.instantiate(parser.parse_object({"value": value})).value


def _holds(hint: Any, value: Any) -> bool:
    """Whether a value of YAML's is what ``hint`` asks for, as it is. jsonargparse would read ``"0"`` as a number where
    text and numbers are both welcome."""
    origin, arguments = _origin(hint), typing.get_args(hint)
    if hint is Any or len(_members(hint)) > 1:
        return hint is Any or any(_holds(member, value) for member in _members(hint))
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin is list:
        return isinstance(value, list) and all(_holds(arguments[0], item) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_holds(arguments[1], item) for item in value.values())
    return hint in (bool, int, float, str, type(None)) and type(value) is hint


def _origin(hint: Any) -> Any:
    return typing.get_origin(hint)


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if _origin(hint) in (Union, types.UnionType) else (hint,)


def _default(cls: type, parameter: inspect.Parameter) -> Any:
    """The default; for a dataclass field with a factory, what the factory makes."""
    if dataclasses.is_dataclass(cls):
        for argument in dataclasses.fields(cls):
            if argument.name == parameter.name and argument.default_factory is not dataclasses.MISSING:
                return argument.default_factory()
    return parameter.default


def _plain(value: Any) -> Any:
    """The value in scalars, lists and dicts."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(below) for name, below in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(below) for below in value]
    return str(value)


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a float", str: "text", type(None): "no value"}
    return names.get(type(value), "a list" if isinstance(value, list) else "a mapping")


def _words(hint: Any) -> str:
    """A type hint in words.

    >>> _words(int | Literal["auto"])
    'a whole number or auto'
    >>> _words(tuple[float, float] | None)
    'a list [a number, a number] or null'
    """
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
        Any: "a value",
    }
    if len(members := _members(hint)) > 1:
        return " or ".join(dict.fromkeys(_words(member) for member in members))
    if hint in names:
        return names[hint]
    origin, arguments = _origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(str(choice) for choice in arguments)
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return f"a list [{', '.join(_words(argument) for argument in arguments)}]"
    if section_of(hint) or (isinstance(origin or hint, type) and issubclass(origin or hint, Mapping)):
        return "a mapping"
    if isinstance(origin or hint, type) and issubclass(origin or hint, os.PathLike):
        return "a path"
    if arguments:
        return f"a list, each {_words(arguments[0])}"
    return getattr(hint, "__name__", str(hint))
