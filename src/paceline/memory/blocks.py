"""Finds the blocks of a model: the repeated parts, such as transformer layers, that are recomputed one by one."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from paceline.errors import ConfigError, did_you_mean

__all__ = ["find_blocks", "named_modules", "nearest_path"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated parts of ``model`` by module path (``blocks.3``), in the order in which they are registered.

    Modules side by side are blocks if they have one class and modules inside. A container counts by what it contains:
    it is a block itself only where nothing inside repeats, as with `torch.nn.Sequential`s in a `torch.nn.Sequential`.
    A parametrized module (``weight_norm``) counts as what it was before. Blocks lie outermost: inside one no other is
    looked for.

    >>> mlp = lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    >>> list(find_blocks(nn.Sequential(nn.Linear(2, 4), mlp(), mlp(), nn.Linear(4, 2))))
    ['1', '2']
    """
    found: dict[str, nn.Module] = {}
    first = {module: path for path, module in reversed([*model.named_modules(remove_duplicate=False)])}

    def look(prefix: str, module: nn.Module) -> None:
        children = {f"{prefix}{name}": child for name, child in _children(module).items()}
        kinds = {path: _kind(child) for path, child in children.items()}
        repeated = Counter(kind for kind in kinds.values() if kind is not None)
        for path, child in children.items():
            if repeated[kinds[path]] > 1:
                found[first[child]] = child  # where it is registered twice, as a shared layer is
            else:
                look(f"{path}.", child)

    look("", model)
    return found


def _kind(module: nn.Module) -> object:
    """What makes two modules repeats of one another; ``None``: it cannot be a block."""
    if not _children(module):
        return None
    if not isinstance(module, _CONTAINERS):
        return type_before_parametrizations(module)
    if not isinstance(module, nn.Sequential) or find_blocks(module):
        return None  # a list has no forward; and of what repeats inside, each is a block
    return tuple(type_before_parametrizations(part) for part in module.modules())


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """Without what torch puts into a parametrized module."""
    hidden = "parametrizations" if is_parametrized(module) else None
    return {name: child for name, child in module.named_children() if name != hidden}


def nearest_path(path: str, known: Iterable[str]) -> str:
    """The sentence that names the nearest of many paths, or a few of them."""
    return did_you_mean(path, difflib.get_close_matches(path, list(known), n=4, cutoff=0.0))


def named_modules(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The modules of ``model`` whose path is one of ``patterns`` or matches one (``*.layers.*`` as for file names).

    A pattern takes the outermost modules that it matches: of ``blocks.*`` the blocks, not what they are made of.

    Raises:
        ConfigError: a pattern that matches nothing, with the nearest path; or a module that cannot be called.
    """
    modules = {path: module for path, module in model.named_modules() if path}
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matches = [pattern] if pattern in modules else [path for path in modules if fnmatchcase(path, pattern)]
        if not matches:
            raise ConfigError(
                "cannot recompute a block",
                found=f"no module {pattern!r} in {type(model).__name__}",
                needed="the path of a module, or a pattern such as blocks.*",
                fix=nearest_path(pattern, modules),
            )
        for path in matches:
            if any(path.startswith(f"{outer}.") for outer in matches):
                continue
            if isinstance(modules[path], nn.ModuleList | nn.ModuleDict):
                raise ConfigError(
                    "cannot recompute a block",
                    found=f"{path}, a {type(modules[path]).__name__}, which has no forward",
                    needed="modules that are called",
                    fix=f"Write {path}.* for all in it",
                )
            found[path] = modules[path]
    return {path: found[path] for path in modules if path in found}
