"""`paceline verify`: the same run with other workers, each from scratch, and the bits of all their steps compared.

``trace``: what two logs say of each other (pure); ``runs``: each run, leg by leg, supervised by this process;
``table``: what is shown; ``record``: ``proof.json`` and what is in it; ``command``: all of it.
"""

from __future__ import annotations

from paceline.verify.command import verify

__all__ = ["verify"]
