"""Module buffers that training changes (BatchNorm statistics), kept independent of who drives which lane.

Every lane starts a step from the same buffers. Afterwards a float buffer that some lane changed becomes the tree-mean
over the lanes that had data, an integer one the maximum; an unchanged one is left alone, since averaging equal values
over 3 lanes already moves their last bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.reduction.tree import fold
from paceline.team import Team

__all__ = ["LaneBuffers"]


class LaneBuffers:
    """The buffers of ``modules`` (by tracked name) over the lanes of one step."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._start: dict[str, Tensor] = {}
        self._changed: dict[int, dict[str, Tensor]] = {}

    def _current(self) -> dict[str, Tensor]:
        return {
            f"{name}.{path}": buffer
            for name, module in self._modules.items()
            for path, buffer in module.named_buffers()
        }

    def begin_step(self) -> None:
        """Remembers what every lane of the step starts from."""
        self._start = {name: buffer.clone() for name, buffer in self._current().items()}
        self._changed = {}

    def end_lane(self, lane: int) -> None:
        """Keeps what a lane that had data changed, and puts the start back for the next.

        Compares bytes: torch's batch norm does not count its writes in a buffer's version.

        Raises:
            UsageError: a buffer has come or gone.
        """
        current = self._current()
        if differing := sorted(current.keys() ^ self._start.keys()):
            raise UsageError(
                "cannot keep the lanes' buffers apart",
                found=f"another set of buffers after lane {lane}: {', '.join(differing)}",
                needed="the same before and after every forward",
                fix="Register buffers when the module is made",
            )
        changed: dict[str, Tensor] = {}
        for name, buffer in current.items():
            if not _same_bytes(buffer, self._start[name]):
                changed[name] = buffer.clone()
                buffer.copy_(self._start[name])
        self._changed[lane] = changed

    def restore(self) -> None:
        """Puts back what the step started from: it does not count."""
        for name, buffer in self._current().items():
            if name in self._start and not _same_bytes(buffer, self._start[name]):
                buffer.copy_(self._start[name])

    @property
    def changed(self) -> bool:
        """Whether a lane of this worker changed a buffer. When one of any worker did, all must call `finish`."""
        return any(self._changed.values())

    def finish(self, team: Team, lanes: int) -> None:
        """Merges over all lanes of all workers. Collective."""
        lanes_changed: dict[int, dict[str, Tensor]] = {}
        for part in team.gather({lane: {k: v.cpu() for k, v in c.items()} for lane, c in self._changed.items()}):
            lanes_changed |= part
        current = self._current()
        for name in sorted({name for changed in lanes_changed.values() for name in changed}):
            start = self._start[name].cpu()
            values = {lane: changed.get(name, start) for lane, changed in lanes_changed.items()}
            current[name].copy_(_merge(values, lanes))


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, so that NaN equals itself and -0.0 differs from 0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise UsageError(
            "cannot keep the lanes' buffers apart",
            found=f"a buffer of {tuple(b.shape)} that became one of {tuple(a.shape)}",
            needed="the same shape and dtype before and after every forward",
            fix="Give the buffer its whole size when the module is made",
        )
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def _merge(values: Mapping[int, Tensor], lanes: int) -> Tensor:
    """The tree-mean over the lanes that have a value, or the maximum of integers."""
    like = next(iter(values.values()))
    if not like.is_floating_point():
        return torch.stack(list(values.values())).amax(0)
    zero = torch.zeros_like(like)
    ((_, total),) = fold(lanes, [((lane, lane + 1), values.get(lane, zero)) for lane in range(lanes)], torch.add)
    return total / len(values)
