"""A configuration file and command-line overrides, read into `Settings`; and `Settings` written back as YAML.

jsonargparse judges each single value against its type hint. What stands around the values is ours, so that every
mistake names its line, the nearest known name and what to write instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.resources
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from paceline.config import Execution, Recipe, as_dict
from paceline.errors import ConfigError, did_you_mean
from paceline.values import (
    MISSING,
    Given,
    Tree,
    YamlDumper,
    YamlLoader,
    build,
    check,
    check_names,
    fields_of,
    section_of,
)

if TYPE_CHECKING:
    from paceline.tasks import Task

__all__ = ["Settings", "TaskSpec", "demo_text", "describe", "dump", "parse"]

_SECTIONS = ("task", "recipe", "execution")
_SHORT = {"-n": "execution.workers", "--run-dir": "execution.run_dir", "--run_dir": "execution.run_dir"}
_COMMAND_LINE = "the command line"
_MOST_CHARACTERS = 2**20


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task by import path, its arguments checked but not yet made.

    Args:
        class_path: ``module.Class`` of a `paceline.tasks.Task`.
        init_args: every argument of the constructor, defaults included, as plain values that YAML can hold.
    """

    class_path: str
    init_args: Mapping[str, Any]

    def make(self) -> Task:
        """A new task. Raises what its constructor raises."""
        task: Task = build(_task_class(self.class_path, "the task"), self.init_args)
        return task


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run, completely.

    Args:
        task: what is trained.
        recipe: all that may change a bit of the result.
        execution: all that must not; ``run_dir`` is filled in.
        config_path: the file it came from; ``None``: the demo.
    """

    task: TaskSpec
    recipe: Recipe
    execution: Execution
    config_path: Path | None = field(default=None, compare=False)

    @property
    def run_dir(self) -> Path:
        """Where the run lives."""
        return Path(self.execution.run_dir or "runs/demo")


def parse(argv: Sequence[str]) -> Settings:
    """Reads ``[CONFIG] [-n N] [--run-dir DIR] [--SECTION.NAME VALUE ...]``; without CONFIG, the demo.

    ``CONFIG`` may also be given as ``--config``; hyphens in names count as underscores; a value is YAML; the last of
    several values for one name holds.

    Raises:
        ConfigError: for every mistake in the file or in ``argv``.
    """
    config, overrides = _read_argv(argv)
    tree = _read_text(demo_text(), "the demo") if config is None else _read_file(config)
    for override in overrides:
        _merge(tree, *override)
    check_names(tree, _SECTIONS, "")
    task = _read_task(_branch(tree, "task"))
    recipe: Recipe = build(Recipe, check(Recipe, _branch(tree, "recipe"), "recipe"))
    execution: Execution = build(Execution, check(Execution, _branch(tree, "execution"), "execution"))
    execution.check(recipe)
    if execution.run_dir is None:
        name = "demo" if config is None else config.stem
        execution = dataclasses.replace(execution, run_dir=f"runs/{name}")
    return Settings(task=task, recipe=recipe, execution=execution, config_path=config)


def dump(settings: Settings) -> str:
    """The settings as YAML, every default written out; `parse` of that text gives equal settings."""
    task = {"class_path": settings.task.class_path, "init_args": dict(settings.task.init_args)}
    tree = {"task": task, "recipe": as_dict(settings.recipe), "execution": as_dict(settings.execution)}
    text: str = yaml.dump(tree, Dumper=YamlDumper, sort_keys=False, width=100)
    return text


def demo_text() -> str:
    """The YAML of the built-in demo."""
    return importlib.resources.files("paceline").joinpath("demo.yaml").read_text(encoding="utf-8")


def describe() -> Iterator[tuple[str, str, str]]:
    """Every setting of recipe and execution: its name, its default as YAML, what its docstring says."""

    def walk(cls: type, prefix: str) -> Iterator[tuple[str, str, str]]:
        notes = _notes(cls.__doc__ or "")
        for name, known in fields_of(cls).items():
            if (section := section_of(known.hint)) is not None:
                yield from walk(section, f"{prefix}.{name}")
            else:
                yield f"{prefix}.{name}", known.default_text, notes.get(name, "")

    yield from walk(Recipe, "recipe")
    yield from walk(Execution, "execution")


def _notes(docstring: str) -> dict[str, str]:
    """The ``Args:`` of a docstring, by name, each on one line."""
    notes: dict[str, str] = {}
    name = ""
    for line in docstring.partition("Args:")[2].splitlines():
        depth = len(line) - len(line.lstrip())
        head, colon, rest = line.strip().partition(": ")
        if depth == 8 and colon:
            name, notes[head] = head, rest
        elif depth > 8 and name:
            notes[name] += " " + line.strip()
    return {key: note.replace("``", "").replace("`", "") for key, note in notes.items()}


def _read_argv(argv: Sequence[str]) -> tuple[Path | None, list[tuple[str, Given]]]:
    config: Path | None = None
    overrides: list[tuple[str, Given]] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            config = _only_config(config, word)
            continue
        if word.startswith("-n") and word not in _SHORT:
            word, words = "-n", [word[2:].removeprefix("="), *words]
        option, equals, value = word.partition("=")
        key = _key(option)
        if not equals:
            if not words or words[0].startswith("--"):
                example = f"{option} {'FILE' if key == 'config' else 'VALUE'}"
                raise ConfigError(
                    f"cannot read {option}", found="nothing behind it", needed="a value", fix=f"Write {example}"
                )
            value = words.pop(0)
        if key == "config":
            config = _only_config(config, value)
        else:
            overrides.append((key, Given(value, value, _COMMAND_LINE, typed=False)))
    return config, overrides


def _only_config(before: Path | None, found: str) -> Path:
    if before is not None:
        raise ConfigError(
            "cannot read two configurations",
            found=f"{before} and {found}",
            needed="one",
            fix=f"Leave one out; a single setting is changed with --recipe.NAME VALUE, not with {found!r}",
        )
    return Path(found)


def _key(option: str) -> str:
    """The dotted name that an option sets; ``task.NAME`` is short for ``task.init_args.NAME``."""
    if option in _SHORT:
        return _SHORT[option]
    names = option.lstrip("-").replace("-", "_").split(".")
    if names == ["config"]:
        return "config"
    if option.startswith("--") and names[0] in _SECTIONS and all(names):
        if names[0] == "task" and names[1:] and names[1] not in ("class_path", "init_args"):
            names.insert(1, "init_args")
        return ".".join(names)
    known = [name for name, _, _ in describe()]
    wanted = ".".join(names)
    by_end = [name for name in known if name.rpartition(".")[2] == names[-1]]
    near = by_end or difflib.get_close_matches(wanted, [*known, "config", "run_dir"], n=1, cutoff=0.6)
    raise ConfigError(
        f"cannot read the option {option}",
        found="an unknown name",
        needed="--config, -n, --run-dir, --task.NAME, --recipe.NAME or --execution.NAME",
        fix=f"Did you mean --{near[0]}?" if near else "See `paceline train --help`",
    )


def _read_file(path: Path) -> dict[str, Tree]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        there = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(str(path), there, n=1)
        hint = f"Did you mean {near[0]}?" if near else "Name a YAML file, or none for the demo"
        if "=" in path.name:
            hint = f"A setting is written --{path.name.replace('=', ' ', 1)}"
        raise ConfigError(f"cannot read the configuration {path}", found="no such file", fix=hint) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"cannot read the configuration {path}",
            found=f"byte {error.start} is no UTF-8",
            needed="YAML text",
            fix="Name a YAML file",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}", found=error.strerror, needed="a readable file", fix="Name another"
        ) from None
    return _read_text(text, str(path))


def _read_text(text: str, origin: str) -> dict[str, Tree]:
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(
            f"cannot read the configuration {origin}",
            found=f"{len(text):,} characters",
            needed=f"YAML of at most {_MOST_CHARACTERS:,}",
            fix="Name a YAML file with task, recipe and execution",
        )
    try:
        tree = YamlLoader(text).tree(origin)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        lines, problem = text.splitlines(), str(error.problem).removeprefix("but ").removeprefix("found ")
        line = lines[mark.line].strip() if mark and mark.line < len(lines) else ""
        raise ConfigError(
            f"cannot read the configuration {origin}",
            found=f"{problem} in line {mark.line + 1}, column {mark.column + 1}" if mark else problem,
            needed="YAML",
            fix=f"Correct that line: {line!r}" if line else "Complete the file",
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(
            f"cannot read the configuration {origin}", found=str(error).partition("\n")[0], needed="YAML"
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"cannot read the configuration {origin}",
            found="an empty file" if tree is None or tree.value is None else f"{tree.raw!r}",
            needed="a mapping with task, recipe and execution",
            fix="See `paceline train --print_config` for a whole one",
        )
    return tree


def _merge(tree: dict[str, Tree], key: str, given: Given) -> None:
    """Sets ``key``; a value that is a mapping is laid over what is there."""
    *above, last = key.split(".")
    for name in above:
        tree = _below(tree, name)
    if given.raw.lstrip().startswith("{"):
        _lay(_below(tree, last), _read_text(given.raw, f"--{key} on {_COMMAND_LINE}"))
    else:
        tree[last] = given


def _lay(tree: dict[str, Tree], over: Mapping[str, Tree]) -> None:
    """Sets every value in ``over``. Names may have dots, such as a module's path; an empty mapping is one too."""
    for name, given in over.items():
        if isinstance(given, dict):
            _lay(_below(tree, name), given)
        else:
            tree[name] = dataclasses.replace(given, origin=_COMMAND_LINE)


def _below(tree: dict[str, Tree], name: str) -> dict[str, Tree]:
    """The mapping of that name, made anew in place of anything else."""
    branch = tree.get(name)
    if not isinstance(branch, dict):
        branch = tree[name] = {}
    return branch


def _branch(tree: Mapping[str, Tree], name: str) -> dict[str, Tree]:
    below = tree.get(name)
    if isinstance(below, dict):
        return below
    if below is None or below.value is None:  # absent, or a heading with nothing under it
        return {}
    raise ConfigError(
        f"cannot use {name} ({below.origin})", found=below.raw, needed="a mapping", fix=f"Write {name}: {{NAME: VALUE}}"
    )


def _read_task(tree: dict[str, Tree]) -> TaskSpec:
    check_names(tree, ("class_path", "init_args"), "task.")
    given = tree.get("class_path")
    if not isinstance(given, Given) or not isinstance(given.value, str):
        raise ConfigError(
            "cannot tell what to train",
            found="no task.class_path" if given is None else f"task.class_path={getattr(given, 'raw', 'a mapping')}",
            needed="the import path of a task",
            fix="Write task: {class_path: paceline.tasks.Language, init_args: {...}}",
        )
    path = given.value if "." in given.value else f"paceline.tasks.{given.value}"
    cls = _task_class(path, f"task.class_path, {given.origin}")
    return TaskSpec(class_path=path, init_args=check(cls, _branch(tree, "init_args"), "task.init_args"))


def _task_class(path: str, origin: str) -> type[Task]:
    from paceline.tasks import Task  # imports torch

    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.append(str(Path.cwd()))  # where `python -m paceline`, which the workers run, looks too
    module_name, _, name = path.rpartition(".")
    problem = f"cannot import the task {path} ({origin})"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that the user's own module lacks: that is for its author to see, with the traceback
        raise ConfigError(
            problem,
            found=f"no module named {error.name!r}",
            needed="MODULE.CLASS, installed or in this directory",
            fix="Correct the path, or set PYTHONPATH to where the module lies",
        ) from None
    cls = getattr(module, name, MISSING)
    if isinstance(cls, type) and issubclass(cls, Task) and not getattr(cls, "__abstractmethods__", None):
        return cls
    tasks = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Task)]
    if cls is MISSING:
        found = f"no {name!r} in {module_name}"
    elif isinstance(cls, type) and issubclass(cls, Task):
        found = f"an abstract class: it lacks {', '.join(sorted(cls.__abstractmethods__))}"
    else:
        found = f"the class {name}" if isinstance(cls, type) else f"an object of type {type(cls).__name__}"
    tasks = [key for key in tasks if key not in ("Task", name)]
    raise ConfigError(
        problem,
        found=found,
        needed="a whole subclass of paceline.tasks.Task",
        fix=did_you_mean(name, tasks) if tasks else "Derive the class from paceline.tasks.Task",
    )
