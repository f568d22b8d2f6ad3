"""Does something as soon as a module has been imported, whoever imports it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

__all__ = ["after_import"]


def after_import(actions: Mapping[str, Callable[[], None]]) -> None:
    """Calls ``actions[name]`` when the module of that name has been imported for the first time; now if it has been."""
    sys.meta_path.insert(0, _Watching({name: act for name, act in actions.items() if name not in sys.modules}))
    for name, act in actions.items():
        if name in sys.modules:
            act()


class _Watching(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the others find a module, and adds to what its loader does."""

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self._actions = actions

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._actions:
            return None
        action = self._actions.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            self._actions[name] = action
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            action()

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec
