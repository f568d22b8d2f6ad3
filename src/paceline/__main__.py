"""``python -m paceline``: the same as ``paceline``."""

from __future__ import annotations

import sys

from paceline.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
