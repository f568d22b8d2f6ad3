"""The script's own files: read and parsed, never imported."""

from __future__ import annotations

import ast
import io
import tokenize
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from paceline.doctor.reading.knowledge import LIBRARIES
from paceline.doctor.reading.values import Value

__all__ = ["Module", "Program", "parsed"]

MAX_FILES: Final = 60
MAX_BYTES: Final = 2_000_000
MAX_ROOTS: Final = 8


@dataclass(eq=False, slots=True)
class Module:
    """One file.

    Args:
        name: dotted, as it is imported; ``__main__`` of the script.
        names: what its top level binds.
        is_package: whether it is an ``__init__.py``.
        package: dotted, that relative imports start from.
        stars: modules that it imports everything from, and that cannot be read.
    """

    name: str
    path: Path
    tree: ast.Module
    is_package: bool = False
    names: dict[str, Value] = field(default_factory=dict)
    package: tuple[str, ...] = ()
    stars: list[str] = field(default_factory=list)


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file.

    Raises:
        ValueError: it is not Python, or too large; says why and where.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path} is larger than {MAX_BYTES // 1_000_000} MB")
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        source = data.decode(encoding)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the script: invalid escapes and the like
            return ast.parse(source, filename=str(path))
    except SyntaxError as error:
        raise ValueError(f"{path}:{error.lineno or 1}: not valid Python: {error.msg}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not text in the encoding that it declares (UTF-8 if it declares none)") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{path}: nested too deeply to be read") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None


class Program:
    """The script and the files beside it that it imports."""

    def __init__(self, script: Path) -> None:
        package, above = _package(script)
        self.main = Module("__main__", script, parsed(script), package=package)
        self.roots = [script.parent]
        self.last = Path.cwd()
        self.modules: dict[str, Module] = {}
        self.notes: list[str] = []
        self.search(above, first=False)

    def search(self, folder: Path, *, first: bool) -> None:
        """Looks for modules there, too."""
        folder = self._shown(folder)
        if folder.name in ("site-packages", "dist-packages"):
            return  # those are libraries: known by name
        if folder not in self.roots and len(self.roots) < MAX_ROOTS:
            self.roots.insert(0 if first else len(self.roots), folder)

    def _shown(self, folder: Path) -> Path:
        """As the user names the script: relative, if that is."""
        relative = not self.main.path.is_absolute() and folder.is_relative_to(self.last)
        return folder.relative_to(self.last) if relative else folder

    def find(self, name: str) -> Module | None:
        """The local file of a dotted name; ``None`` if there is none, or if it cannot be read."""
        if name in self.modules:
            return self.modules[name]
        if len(self.modules) >= MAX_FILES or not all(part.isidentifier() for part in name.split(".")):
            return None
        roots = [*self.roots]
        if name.split(".")[0] not in LIBRARIES and self.last in self.main.path.absolute().parents:
            roots.append(self.last)  # `python -m package.train` looks in the working directory
        for root in dict.fromkeys(root.absolute() for root in roots):
            if (module := self._at(self._shown(root).joinpath(*name.split(".")), name)) is not None:
                self.modules[name] = module
                return module
        return None

    def _at(self, base: Path, name: str) -> Module | None:
        parts = tuple(name.split("."))
        for path, is_package in ((base / "__init__.py", True), (base.with_name(base.name + ".py"), False)):
            if path.is_file():
                try:
                    return Module(name, path, parsed(path), is_package, package=parts if is_package else parts[:-1])
                except ValueError as error:
                    if (note := f"{error}; what it defines is unknown") not in self.notes:
                        self.notes.append(note)
                    return None
        if base.is_dir() and any(base.glob("*.py")):  # a package without __init__.py
            return Module(name, base, ast.Module([], []), is_package=True, package=parts)
        return None


def _package(script: Path) -> tuple[tuple[str, ...], Path]:
    """The package that a script lies in, and the folder that holds its top: `python -m` starts it from there."""
    parts: list[str] = []
    folder = script.absolute().parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        parts.insert(0, folder.name)
        folder = folder.parent
    return tuple(parts), folder if parts else script.parent
