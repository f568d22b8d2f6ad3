"""``index.json`` of a prepared directory: what `prepare` writes and `Corpus` checks. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import DataError

__all__ = ["PREPARE_AGAIN", "SCHEMA", "read_index"]

SCHEMA = "paceline.tokens/1"
PREPARE_AGAIN = "Write it again with `paceline prepare SRC --out DIR`"


def read_index(folder: Path) -> dict[str, Any]:
    """The ``index.json`` of a prepared ``folder``.

    Raises:
        DataError: missing, damaged, or written by a newer version.
    """
    path = folder / "index.json"
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        schema, needed = index.get("schema"), ("dtype", "vocabulary", "tokenizer", "splits")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(
            f"cannot read {path}",
            found=getattr(error, "strerror", None) or "no valid JSON object",
            needed="the index that `paceline prepare` wrote",
            fix=PREPARE_AGAIN,
        ) from error
    if schema != SCHEMA or any(name not in index for name in needed):
        raise DataError(
            f"cannot read {path}",
            found=f"schema={schema!r}",
            needed=f"schema={SCHEMA!r} with all fields",
            fix=PREPARE_AGAIN,
        )
    return index
