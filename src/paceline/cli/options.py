"""How subcommands with plain options read the words behind their names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from paceline.errors import ConfigError, did_you_mean

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """argparse whose errors have four beats, and no abbreviated options.

    Args:
        about: what the command does.
        otherwise: what to do with words that it does not know; ``None``: nothing but to mend them.
    """

    def __init__(self, command: str, about: str, *, otherwise: str | None = None) -> None:
        super().__init__(prog=f"paceline {command}", description=about, allow_abbrev=False)
        self._otherwise = otherwise

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The options in ``words``; raises `ConfigError`."""
        options, unknown = self.parse_known_args(words)
        if unknown:
            fix = did_you_mean(unknown[0], self.names()) if unknown[0].startswith("-") else f"See `{self.prog} --help`"
            if self._otherwise is not None:
                fix = f"{self._otherwise}. {fix}"
            raise ConfigError(
                f"cannot read `{self.prog}`", found=f"an unknown {unknown[0]}", needed="known options", fix=fix
            )
        return options

    def names(self) -> list[str]:
        """All options."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"cannot read `{self.prog}`: {message}", fix=f"See `{self.prog} --help`")
