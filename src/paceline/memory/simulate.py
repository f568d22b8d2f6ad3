"""Runs a step and records what it holds, in all and block by block.

[Note: phases of a step] A step is cut where a block's forward begins, and the same cuts hold for its backward: autograd
numbers its nodes as forward makes them, so the node at work says which phase the backward is in, whatever the model
returns and however often blocks recompute. What lies between two blocks belongs to the first of them; before the first
block is the prologue, whose backward belongs to the first block; after the last one comes the loss, with its backward.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.memory.live import LiveBytes

__all__ = ["Segment", "Trace", "Work", "flop_formulas", "simulate"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What operators had to do, for an estimate of their time.

    Args:
        flops: floating point operations of matrix products, convolutions and attention.
        moved: bytes read and written by all other operators, which memory's speed decides about.
    """

    flops: int = 0
    moved: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(flops=self.flops + other.flops, moved=self.moved + other.moved)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of a step: from where a block's forward begins to where the next one's does, or its own ends for the
    last; and its backward. Bytes; see [Note: phases of a step] at the top of the file.

    Args:
        name: the block's. One that is called twice has two segments.
        before: alive when it began, on top of what was there before the step.
        after: alive when the block's forward had ended.
        rise: most bytes alive until it ended, on top of ``before``.
        kept: what came to life in it and was alive when it ended.
        released: of that, what died before backward came to it: by the place of the segment in whose forward it did;
            the loss comes after the last.
        released_cheap: the same, without what matrix products, convolutions and attention returned.
        backward: most bytes alive in its backward, on top of what there was to keep from all segments before it.
        work: of the block's forward.
        backward_work: of its backward, with what is recomputed.
    """

    name: str
    before: int = 0
    after: int = 0
    rise: int = 0
    kept: int = 0
    released: Mapping[int, int] = field(default_factory=dict)
    released_cheap: Mapping[int, int] = field(default_factory=dict)
    backward: int = 0
    work: Work = Work()
    backward_work: Work = Work()

    @property
    def stays(self) -> int:
        """What of ``kept`` is there until its backward."""
        return self.kept - sum(self.released.values())


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a forward and backward held and did. Bytes on top of what was there before.

    Args:
        segments: the prologue, whose name is empty and whose backward is the first block's, and then one for each call
            of a block, in the order of their forwards.
        loss: most bytes alive from the end of the last block's forward until its backward, on top of what was alive
            then. All there is, if no block ran.
        peak: the most alive at any time.
        backward_within: the forward ran a backward of its own, as for a penalty on gradients.
        left: still alive at the end: the loss, and gradients that were not there before.
        work: of all.
        small: the part, 0 to 1, of what was alive when the last block's forward had ended that was in tensors below
            `paceline.memory.gaps.SMALL`.
        loss_small, loss_large: as ``loss``, of these and of the others: each the most.
    """

    segments: tuple[Segment, ...]
    loss: int
    peak: int
    small: float
    loss_small: int
    loss_large: int
    backward_within: bool
    left: int
    work: Work


def simulate(step: Callable[[], Tensor], blocks: Mapping[str, nn.Module]) -> Trace:
    """Runs a step's forward and backward once and records what it held, in all and for each block. Not collective.

    Inside `shapes_only` nothing is computed; outside it is real. Give gradients first (`gradients_in_place`), or they
    count as what the step makes.

    Args:
        step: forward; enters autocast itself and returns the loss, a scalar.
        blocks: modules by name; none inside another.

    Raises:
        UsageError: a block inside a block.

    >>> from paceline.memory.live import gradients_in_place, shapes_only
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(3)))
    >>> with shapes_only(model), gradients_in_place(model):
    ...     x_BF = torch.zeros(8, 64)
    ...     trace = simulate(lambda: model(x_BF).sum(), dict(model.named_children()))
    >>> [(segment.name, segment.stays) for segment in trace.segments]  # of each what Tanh returned
    [('', 0), ('0', 2048), ('1', 2048), ('2', 2048)]
    """
    recorder = _Recorder()
    with recorder.watching(blocks), recorder:
        loss = step()
        recorder.end = _autograd_nodes()
        loss.backward()
    return recorder.trace()


_Phase = tuple[Literal["forward", "between", "backward"], int]
"""And the place of the segment: ``("between", 0)`` is the prologue, ``("between", <the last>)`` the loss."""


class _Recorder(LiveBytes):
    """`LiveBytes` by phase of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.phase: _Phase = ("between", 0)
        self.peaks: defaultdict[_Phase, int] = defaultdict(int)
        self.freed: defaultdict[tuple[_Phase, _Phase], int] = defaultdict(int)
        """Bytes by the phases in which they came and went."""
        self.freed_cheap: defaultdict[tuple[_Phase, _Phase], int] = defaultdict(int)
        self.flops: defaultdict[_Phase, int] = defaultdict(int)
        self.moved: defaultdict[_Phase, int] = defaultdict(int)
        self.names = [""]
        self.before, self.after = [0], [0]
        self.starts: list[int] = []
        """Autograd's nodes when each block's forward began."""
        self.stop = 0
        """And when the last one's ended."""
        self.small_after = self.loss_small = 0
        """Bytes in small tensors then, and the most since, until backward came to it."""
        self.backward_within = False
        self.end: int | None = None
        """And when the whole forward had ended."""

    @contextmanager
    def watching(self, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Notes when each of ``blocks`` begins and ends its forward; a forward in backward is a recomputed one."""

        def begin(name: str) -> None:
            if _in_backward():
                return
            if self.phase[0] == "forward":
                raise UsageError(
                    "cannot tell the blocks' memory apart",
                    found=f"{name} called inside {self.names[-1]}",
                    needed="blocks that do not lie inside one another",
                    fix="Name the outer or the inner ones",
                )
            self.starts.append(_autograd_nodes())
            self.names.append(name)
            self.before.append(self.current)
            self._enter(("forward", len(self.starts)))

        def finish() -> None:
            if not _in_backward():
                self.stop = _autograd_nodes()
                self.after.append(self.current)
                self.small_after = self.loss_small = self.small
                self._enter(("between", len(self.starts)))

        with ExitStack() as stack:
            for name, block in blocks.items():
                first = block.register_forward_pre_hook(lambda *_, name=name: begin(name), prepend=True)
                last = block.register_forward_hook(lambda *_: finish())
                stack.callback(first.remove)
                stack.callback(last.remove)
            yield

    def trace(self) -> Trace:
        """What was recorded, in the end."""
        last = len(self.names) - 1
        ends = [*self.before[1:], self.after[last]]
        released, cheap = self._released(self.freed), self._released(self.freed_cheap)
        segments: list[Segment] = []
        base = 0
        for place, name in enumerate(self.names):
            forward: tuple[_Phase, ...] = (("forward", place), ("between", place))
            if place == last:
                forward = forward[:1]
            backward = self.peaks["backward", place] - base if place else 0
            segment = Segment(
                name=name,
                before=self.before[place],
                after=self.after[place],
                rise=max(self.peaks[phase] for phase in forward) - self.before[place],
                kept=ends[place] - self.before[place] + sum(earlier.get(place, 0) for earlier in released[:place]),
                released=released[place],
                released_cheap=cheap[place],
                backward=max(0, backward),
                work=self._work("forward", place),
                backward_work=self._work("backward", place),
            )
            base += segment.stays
            segments.append(segment)
        return Trace(
            segments=tuple(segments),
            loss=self.peaks["between", last] - self.after[last],
            peak=self.peak,
            small=self.small_after / self.after[last] if self.after[last] else 1.0,
            loss_small=self.loss_small - self.small_after,
            loss_large=max(0, self.most_large - (self.after[last] - self.small_after)),
            backward_within=self.backward_within,
            left=self.current,
            work=Work(flops=sum(self.flops.values()), moved=sum(self.moved.values())),
        )

    def _work(self, *phase: Any) -> Work:
        return Work(flops=self.flops[phase], moved=self.moved[phase])

    def _released(self, freed: Mapping[tuple[_Phase, _Phase], int]) -> list[dict[int, int]]:
        """For each segment, `Segment.released`."""
        released: list[dict[int, int]] = [{} for _ in self.names]
        for (born, died), size in freed.items():
            came, went = self._place(born), self._place(died)
            if came is not None and went is not None and came < went:
                released[came][went] = released[came].get(went, 0) + size
        return released

    def _place(self, phase: _Phase) -> int | None:
        """Of the segment in whose forward a phase lies, one past the last for the loss; ``None`` for a backward."""
        kind, place = phase
        if kind == "backward":
            return None
        return len(self.names) if kind == "between" and place == len(self.names) - 1 else place

    def _enter(self, phase: _Phase) -> None:
        self.phase = phase
        self.peaks[phase] = max(self.peaks[phase], self.current)

    def begins(self, func: Any) -> None:
        """Finds the phase."""
        if not _in_backward():
            return
        if self.end is None:
            self.backward_within = True
            return
        node = torch._C._current_autograd_node()
        made = self.end if node is None else node._sequence_nr()
        if made >= self.end:
            return  # the node that adds up a parameter's gradient, or one made in backward: part of what goes on
        phase: _Phase = ("between", len(self.starts))
        if made < self.stop:
            phase = ("backward", max(1, bisect_right(self.starts, made)))
        if phase != self.phase:
            self._enter(phase)

    def _touched(self, func: Any, args: Any, kwargs: Any, result: Any, tensors: list[Tensor]) -> None:
        formula = flop_formulas().get(func._overloadpacket)
        if formula is not None:
            self.flops[self.phase] += formula(*args, **kwargs, out_val=result)
        else:
            self.moved[self.phase] += sum(each.nbytes for each in tensors)

    def _mark(self, func: Any) -> object:
        return self.phase, func._overloadpacket not in flop_formulas()

    def _gone(self, size: int, mark: object) -> None:
        super()._gone(size, mark)
        born, cheap = cast(tuple[_Phase, bool], mark)
        self.freed[born, self.phase] += size
        if cheap:
            self.freed_cheap[born, self.phase] += size

    def _grow(self, size: int, before: int = 0) -> None:
        super()._grow(size, before)
        self.peaks[self.phase] = max(self.peaks[self.phase], self.current)
        if self.phase == ("between", len(self.starts)):
            self.loss_small = max(self.loss_small, self.small)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _autograd_nodes() -> int:
    """How many nodes autograd has made in this thread: the number of the next."""
    return int(torch._C._autograd._get_sequence_nr())


@functools.cache
def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Operations of matrix products, convolutions and attention, by operator: torch's, with attention on CPU, which it
    leaves out: the same as on a GPU."""
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    return {
        **flop_registry,
        aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
        aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
            aten._scaled_dot_product_flash_attention_backward
        ],
    }
