"""Amounts of memory as people write them, ``24GiB``, read and shown."""

from __future__ import annotations

import re
import reprlib

from paceline.errors import ConfigError

__all__ = ["parse_size", "show_size"]

_UNITS = {
    "B": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)},
    **{letter: 1024**power for power, letter in enumerate("KMGTP", 1)},
}
"""A letter alone is binary, as for Slurm's ``--mem``, Docker's ``--memory`` and Java's ``-Xmx``."""
_BY_LOWER_CASE = {unit.lower(): size for unit, size in _UNITS.items()}
_MOST = 1024**6
_NEEDED = "a number and a unit, such as 24GiB, 800MB or 1.5G"


def parse_size(text: object, name: str) -> int:
    """Bytes. ``GB`` is 10**9, ``GiB`` and ``G`` are 2**30; case does not matter, a space may stand before the unit.

    Args:
        text: what was written; anything but text is refused, a bare number too: few mean bytes by ``24``.
        name: what it was written for, used in the error: ``execution.memory``.

    Raises:
        ConfigError: nonsense, no unit or an unknown one, less than a byte, or more than 1 EiB.

    >>> parse_size("24GiB", "--memory"), parse_size("800 mb", "--memory"), parse_size("1.5G", "--memory")
    (25769803776, 800000000, 1610612736)
    """
    matched = re.fullmatch(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)\s*", str(text), re.IGNORECASE)
    if matched is None or isinstance(text, bool):
        raise _refused(text, name, "Write 24GiB")
    number, unit = float(matched[1]), matched[2]
    if number <= 0:
        raise _refused(text, name, "Write how much there is, such as 24GiB")
    if not unit:
        likely = f"{number:g}GiB" if number < 10_000 else f"{number:.0f}B" if number < _MOST else "24GiB"
        raise _refused(text, name, f"Write {likely}")
    if unit.lower() not in _BY_LOWER_CASE:
        raise _refused(text, name, _nearest(matched[1], unit))
    if not 1 <= number * _BY_LOWER_CASE[unit.lower()] <= _MOST:
        raise _refused(text, name, "Write between 1B and 1024PiB")
    return int(number * _BY_LOWER_CASE[unit.lower()])


def show_size(size: float) -> str:
    """Bytes with three digits and a binary unit.

    >>> show_size(1610612736), show_size(153_000_000), show_size(1000), show_size(0), show_size(-2048)
    ('1.50 GiB', '146 MiB', '1000 B', '0 B', '-2.00 KiB')
    """
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if abs(size) >= 0.9995 * _UNITS[unit]:
            number = size / _UNITS[unit]
            return f"{number:.2f} {unit}" if abs(number) < 9.995 else _three_digits(number, unit)
    return f"{size:.0f} B"


def _three_digits(number: float, unit: str) -> str:
    return f"{number:.1f} {unit}" if abs(number) < 99.95 else f"{number:.0f} {unit}"


def _nearest(number: str, unit: str) -> str:
    letter = unit[0].upper()
    if letter == "B":
        return f"Did you mean {number}B?"
    return (
        f"Did you mean {number}{letter}iB?"
        if letter in _UNITS
        else "Known units: B, KiB, MiB, GiB, TiB, PiB, kB, MB, GB"
    )


def _refused(text: object, name: str, fix: str) -> ConfigError:
    return ConfigError(f"cannot use {name}", found=reprlib.repr(text), needed=_NEEDED, fix=fix)
