"""What the script was not let do to the user's files, as notes for the user."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paceline.doctor.watching.records import Run

__all__ = ["guarded"]

_SHOWN = 3
_DENIED = re.compile(
    r"permission denied|os error 13|read-?only (database|file)|unable to open database|cross-device link|"
    r"cannot be opened|failed to open",
    re.I,
)
"""How programs and libraries in C say that they could not write."""


def guarded(run: Run) -> Iterator[str]:
    """Which writes were refused, and how they were."""
    errors = list(run.all("error"))
    denied = any(_DENIED.search(record["text"] or "") for record in errors)
    refused = {r["path"]: r for r in run.all("refused") if r["own"] or errors}  # libraries do without a cache
    for path, record in list(refused.items())[:_SHOWN]:
        where = f" ({record.place.path}:{record.place.line})" if record.place is not None else ""
        yield (
            f"the script was not let write {path}{where}: it writes into a scratch folder, unless it is run with "
            "--in-place, or given a path in the working directory"
        )
    if len(refused) > _SHOWN:
        yield f"nor {len(refused) - _SHOWN} other paths outside of its scratch folder"
    if denied and not refused:
        yield (
            "what failed may have been to write outside of the scratch folder, or to change a large file beside the "
            "script, which it was not let do: --in-place lets it"
        )
    if any(record["by"] == "python" for record in run.all("guard")):
        yield (
            "this kernel has no Landlock, or keeps it from this process: what Python code writes stays in the scratch "
            "folder, but not what other programs and libraries in C write by absolute paths or through links"
        )
