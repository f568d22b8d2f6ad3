"""The house keeps its order: who may import whom, who alone may touch what, and what every module says of itself."""

from __future__ import annotations

import ast
import dataclasses
import functools
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline.config

SOURCE = Path(paceline.config.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))

# Of each module, or folder of modules, the others that it may import. One that is not here fails.
MAY_IMPORT = {
    "errors": "",
    "lanes": "errors",
    "sizes": "errors",
    "config": "errors lanes faults sizes",
    "env": "errors",
    "events": "errors",
    "values": "errors",
    "determinism": "errors",
    "run_dir": "errors config",
    "callsite": "",
    "faults": "errors",
    "pulse": "",
    "stacks": "callsite",
    "signals": "errors env",
    "link": "errors pulse",
    "worker": "errors env callsite link run_dir",
    "template": "env determinism worker",
    "supervisor": "errors config env events link pulse run_dir stacks",
    "launcher": "errors env supervisor worker",
    "team": "errors env determinism faults pulse",
    "records": "errors pulse team",
    "membership": "errors config env link pulse records stacks team",
    "optim": "errors config",
    "models": "errors",
    "data": "errors config determinism",
    "reduction": "errors lanes determinism team",
    "memory": "errors determinism sizes",
    "metrics": "errors reduction",
    "checkpoint": "errors config",
    "progress": "events",
    "tasks": "errors models data metrics",
    "parsing": "errors config values tasks",
    "member": "errors callsite team",
    "agreement": "errors config determinism team",
    "saving": "errors config events run_dir team checkpoint",
    "mistakes": "errors sizes",
    "step": "errors determinism mistakes team reduction data",
    "tracked": "errors determinism memory team checkpoint",
    "loop": "errors config determinism agreement data reduction step team tracked",
    "standing": "checkpoint determinism loop tracked",
    "evaluation": "config data determinism lanes metrics team",
    "run": "errors config env faults lanes link events callsite determinism signals worker member membership agreement "
    "data evaluation metrics saving loop standing step tracked",
    "planning": "errors callsite config data determinism lanes memory mistakes optim parsing progress reduction sizes "
    "tasks",
    "train": "errors config determinism env events memory run_dir parsing planning optim tasks progress step run",
    "generate": "errors models tasks checkpoint parsing",
    "verify": "errors config env events faults run_dir parsing supervisor checkpoint",
    "doctor": "errors callsite env stacks supervisor",
    "cli": "*",
    "__main__": "cli",
    "__init__": "*",
}

# What may be named only there: pattern of the dotted name -> modules or files.
ONLY_IN = {
    r"os\.(environb?|getenv|putenv|unsetenv)": {"env"},
    r"torch\.distributed(\..*)?": {"team", "template", "doctor"},
    # The doctor's probe takes chance out of a user's script, in runs that are compared.
    r"torch\.(random\.)?(manual_seed|seed|set_rng_state)": {"determinism", "doctor/watching/probe/comparing.py"},
    r"torch\.default_generator(\..*)?": {"determinism", "doctor/watching/probe/comparing.py"},
    r"(np|numpy)\.random\.seed|random\.seed": {"determinism", "doctor/watching/probe/comparing.py"},
    r"torch\.set_(num_threads|num_interop_threads|flush_denormal|default_dtype|float32_matmul_precision)": {
        "determinism"
    },
    r"torch\.use_deterministic_algorithms|torch\.backends\..*|torch\._dynamo\.config\..*": {"determinism"},
    r"torch\.set_deterministic_debug_mode|torch\._inductor\.config\..*|torch\.utils\.deterministic\..*": {
        "determinism"
    },
    r"sys\.excepthook": {"worker"},
    # Only between processes of one run or command, as they speak: no checkpoint, no data is ever unpickled.
    r"(pickle|cPickle|marshal|shelve|dill|cloudpickle|joblib)(\..*)?": {
        "data/encoding.py",
        "launcher",
        "team",
        "worker",
    },
    r"torch\.(load|save|jit\.load)": {"doctor"},  # which watches those of a user
}


def top(path: Path) -> str:
    """The module's name in the table: its folder's, if it lies in one."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    parts = ["paceline", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


DOTTED = {dotted(path): path for path in MODULES}


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Everything that is imported anywhere in a file, by full dotted name: ``paceline.step.Step``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def used_names(tree: ast.AST) -> Iterator[str]:
    """Every imported name and every ``a.b.c`` in a file."""
    yield from imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    return frozenset(used_names(ast.parse(path.read_text())))


def modules_imported(path: Path) -> set[str]:
    """The package's own modules that a file imports."""
    found = set()
    for name in imported_names(ast.parse(path.read_text())):
        if name.split(".")[0] == "paceline":
            while name not in DOTTED:
                name = name.rpartition(".")[0]
            found.add(name)
    return found - {dotted(path)}


def permitted(module: str) -> set[str]:
    if MAY_IMPORT[module] == "*":
        return set(MAY_IMPORT) - {"__init__", "__main__", module}
    return set(MAY_IMPORT[module].split())


def by_name(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", MODULES, ids=by_name)
def test_a_module_imports_what_the_table_permits(path: Path) -> None:
    assert top(path) in MAY_IMPORT, f"{by_name(path)} has no line in MAY_IMPORT"
    imported = {top(DOTTED[name]) for name in modules_imported(path)} - {top(path)}
    assert imported <= permitted(top(path))


def test_the_table_is_acyclic_and_names_only_what_is_in_it() -> None:
    for module in MAY_IMPORT:
        assert permitted(module) <= set(MAY_IMPORT), module
    graphlib.TopologicalSorter({module: permitted(module) for module in MAY_IMPORT}).prepare()


def test_imports_inside_folders_are_acyclic_too() -> None:
    graph = {name: modules_imported(path) for name, path in DOTTED.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_the_checks_would_notice() -> None:
    """The patterns against what they are for."""
    bad = "import torch.distributed as dist\nfrom os import environ\ntorch.manual_seed(0)\nfrom pickle import loads"
    names = list(used_names(ast.parse(bad)))
    caught = [pattern for pattern in ONLY_IN if any(re.fullmatch(pattern, name) for name in names)]
    assert len(caught) == 4
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()


@pytest.mark.parametrize("pattern", ONLY_IN)
def test_one_place_for_each_power(pattern: str) -> None:
    users = {
        by_name(path): name
        for path in MODULES
        for name in names_in(path)
        if re.fullmatch(pattern, name) and not {top(path), by_name(path)} & ONLY_IN[pattern]
    }
    assert not users


@pytest.mark.parametrize("name", DOTTED)
def test_a_module_says_what_it_is_and_what_it_exports(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    assert isinstance(module.__all__, list)
    missing = [export for export in module.__all__ if not hasattr(module, export)]
    assert not missing
    assert sorted(set(module.__all__)) == sorted(module.__all__)


@pytest.mark.parametrize("path", MODULES, ids=by_name)
def test_no_file_is_too_long_to_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


def test_no_module_is_named_for_nothing() -> None:
    assert not {path.stem for path in MODULES} & {"utils", "util", "common", "helpers", "core", "base", "misc"}


SETTINGS = [
    value
    for name, value in vars(paceline.config).items()
    if dataclasses.is_dataclass(value) and inspect.isclass(value) and name in paceline.config.__all__
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.__name__)
def test_settings_are_frozen_and_each_field_is_explained(settings: type) -> None:
    assert settings.__dataclass_params__.frozen  # type: ignore[attr-defined]
    fields = [field.name for field in dataclasses.fields(settings) if field.kw_only]
    described = re.findall(r"^    (\w+): \S", inspect.getdoc(settings) or "", re.MULTILINE)
    assert described == fields


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.__name__)
def test_every_public_attribute_of_settings_is_a_field_a_property_or_a_method(settings: type) -> None:
    fields = {field.name for field in dataclasses.fields(settings)}
    for name, value in vars(settings).items():
        if not name.startswith("_"):
            assert name in fields or isinstance(value, property | classmethod) or inspect.isfunction(value), name
    assert not set(vars(settings).get("__annotations__", {})) - fields


@pytest.mark.parametrize("name", ["paceline", "paceline.cli", "paceline.supervisor", "paceline.config", "paceline.env"])
def test_what_starts_a_run_imports_no_torch(name: str) -> None:
    look = f"import sys, {name}; print([m for m in ('torch', 'numpy', 'tokenizers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"
