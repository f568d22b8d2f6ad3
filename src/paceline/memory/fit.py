"""Chooses what to recompute, so that a step fits a budget at the least cost in time: measured, then planned."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from paceline.determinism import forked_randomness
from paceline.errors import ConfigError
from paceline.memory.again import buffers_copied
from paceline.memory.blocks import find_blocks
from paceline.memory.plan import Level, choose, least, peak, uniform
from paceline.memory.profile import CPU, GPU, Profile, profile, simulated_peak, with_seconds
from paceline.memory.recompute import Recomputed, is_compiled, set_levels
from paceline.memory.simulate import shapes_only
from paceline.sizes import parse_size, show_size

T = TypeVar("T")

__all__ = ["Fit", "fit", "measured", "on_shapes", "on_shapes_or_for_real", "peak_with", "undisturbed"]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What was chosen for one micro-batch; bytes on top of what is there without it.

    Args:
        levels: of each block, by module path.
        peak: the most bytes with these levels.
        unfitted: the most if nothing was recomputed.
        slower: seconds of a forward and backward with these levels, relative to those without recompute.
        profile: what each block costs at each level, measured on this device where that could be.
    """

    levels: Mapping[str, Level]
    peak: int
    unfitted: int
    slower: float
    profile: Profile

    @property
    def least(self) -> str:
        """If nothing fits: what would be needed, and what for."""
        blocks, levels = self.profile.blocks, self.levels
        held = [block.at(levels[block.name]).held for block in blocks]
        tops = {f"the backward of {block.name}": block.at(levels[block.name]).backward for block in blocks}
        moments = {what: sum(held[:place]) + top for place, (what, top) in enumerate(tops.items())}
        moments["what comes behind the last block, such as logits and loss"] = sum(held) + self.profile.loss
        tops["what comes behind the last block, such as logits and loss"] = self.profile.loss
        most = max(moments, key=lambda what: moments[what])
        return f"at least {self.peak / 2**20:.1f} MiB, of which {most} takes {tops[most] / 2**20:.1f}"

    def __str__(self) -> str:
        """One line: what is recomputed, what that frees, and what it costs.

        >>> from paceline.memory.simulate import Work
        >>> empty = Profile(blocks=(), fixed=0, loss=0, work=Work(), seconds=1)
        >>> levels = {"blocks.0": "full", "blocks.1": "full", "blocks.2": "keep"}
        >>> print(Fit(levels=levels, peak=3 << 20, unfitted=8 << 20, slower=1.071, profile=empty))
        2 of 3 blocks; activations 3.00 MiB instead of 8.00 MiB; 7.1 % more time
        """
        counts = Counter(self.levels.values())
        if counts["keep"] == len(self.levels):
            return f"none of {len(self.levels)} blocks; activations {show_size(self.peak)}"
        what = f"{counts['full'] + counts['selective']} of {len(self.levels)} blocks"
        if counts["selective"]:
            what += f", {counts['selective']} of them selectively"
        freed = f"activations {show_size(self.peak)} instead of {show_size(self.unfitted)}"
        return f"{what}; {freed}; {100 * (self.slower - 1):.1f} % more time"


def fit(model: nn.Module, step: Callable[[], Tensor], budget: int | str) -> Fit:
    """Lets blocks of ``model`` recompute, so that a micro-batch needs at most ``budget``, at the least cost in time.

    For a loop of one's own, after ``compile`` and before ``run.steps``; `paceline train` has ``execution.recompute:
    auto``. Bytes are counted on shapes alone, so that no step larger than the budget is ever run, unless the forward
    looks at numbers, as ``.item()`` does: then on real tensors. Seconds are measured in a few real forwards and
    backwards, in which all blocks recompute. What the model holds is left as it was, and random states; no bit of a
    result ever changes. Not collective, so another worker may choose otherwise: that moves no bit.

    Args:
        step: the forward of one micro-batch; enters autocast itself and returns the loss.
        budget: bytes, or text such as ``2GiB``, for all that a forward and backward allocates: activations, their
            gradients, logits. Not weights, their gradients and the optimizer's state, which are there anyway.

    Raises:
        ConfigError: no choice fits, or the model has no repeated blocks.
        UsageError: a block that cannot be recomputed; see `recompute`.

    >>> block = lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    >>> model = nn.Sequential(*[block() for _ in range(8)])
    >>> x_BF = torch.zeros(1024, 64)
    >>> fitted = fit(model, lambda: model(x_BF).square().mean(), "8MiB")
    >>> fitted.peak <= 8 * 2**20 < fitted.unfitted
    True
    """
    limit = parse_size(budget, "the budget") if isinstance(budget, str) else budget
    fitted, _ = measured(model, step, limit)
    if fitted.peak > limit:
        raise ConfigError(
            "cannot fit a micro-batch",
            found=f"a budget of {show_size(limit)}",
            needed=fitted.least,
            fix="Use smaller micro-batches, or a larger budget",
        )
    set_levels(model, fitted.levels)
    return fitted


def measured(
    model: nn.Module, step: Callable[[], Tensor], budget: int, *, gaps: bool = False
) -> tuple[Fit, str | None]:
    """What `fit` would choose, undone as yet, or what needs the least if nothing fits; and why bytes had to be counted
    on real tensors, if so. ``gaps``: there shall be room for those in the heap, too."""
    blocks = find_blocks(model)
    if not blocks:
        raise ConfigError(
            "cannot choose blocks to recompute",
            found=f"no repeated blocks in {type(model).__name__}",
            needed="modules of one class side by side, with modules inside, as the layers of a transformer",
            fix="Name what shall be recomputed, as in execution.recompute: [encoder, decoder]",
        )
    why = None
    rates = CPU if _device_of(model).type == "cpu" else GPU
    costs, why = on_shapes_or_for_real(model, lambda: profile(step, model, blocks, set_levels, rates=rates))
    if any(map(is_compiled, blocks.values())):
        costs = _without_selective(costs)
    room, loss = budget, costs.loss
    if gaps and costs.heap is not None:
        room, loss = costs.heap.room(budget), costs.heap.loss
    keep = uniform(costs.blocks, "keep")
    smallest = least(costs.blocks, fixed=costs.fixed, loss=loss)
    if smallest.peak <= room < peak(costs.blocks, keep, fixed=costs.fixed, loss=loss):  # else nothing is to be weighed
        costs = _timed(model, step, blocks, costs, budget)
    choice = choose(costs.blocks, fixed=costs.fixed, loss=loss, budget=room) or smallest
    return Fit(
        levels=choice.levels,
        peak=peak_with(model, step, choice.levels),
        unfitted=costs.peak(keep),
        slower=1 + choice.seconds / costs.seconds,
        profile=costs,
    ), why


def peak_with(model: nn.Module, step: Callable[[], Tensor], levels: Mapping[str, Level]) -> int:
    """Most bytes that a forward and backward allocates with these levels."""
    return on_shapes_or_for_real(model, lambda: simulated_peak(step, model, {}, set_levels, levels))[0]


def on_shapes_or_for_real(model: nn.Module, count: Callable[[], T]) -> tuple[T, str | None]:
    """What ``count`` gives on shapes alone, or on real tensors if it must be, and why then; blocks run eagerly, and
    nothing is left changed."""
    try:
        return on_shapes(model, count), None
    except Exception as error:  # a forward may look at numbers, in any way; if it is something else, it comes again
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
    with _as_written(model), undisturbed(model):
        return count(), why


def on_shapes(model: nn.Module, count: Callable[[], T]) -> T:
    """What ``count`` gives on shapes alone; raises whatever it does where it needs numbers."""
    with _as_written(model), undisturbed(model), shapes_only(model):
        return count()


def _without_selective(costs: Profile) -> Profile:
    """A compiled block shows none of its operators."""
    return replace(
        costs,
        blocks=tuple(
            replace(block, options=tuple(option for option in block.options if option.level != "selective"))
            for block in costs.blocks
        ),
    )


def _timed(
    model: nn.Module, step: Callable[[], Tensor], blocks: Mapping[str, nn.Module], costs: Profile, budget: int
) -> Profile:
    """With times of this device, from the second of two real steps at each level. No step is run that would not fit:
    ``selective`` then has its estimate, scaled as ``full``'s, or both have."""
    if costs.peak(dict.fromkeys(blocks, "full")) > budget:
        return costs
    full_s, again, forwards = _one_step(model, step, blocks, "full")
    estimated_s = {block.name: block.at("full").seconds for block in costs.blocks}
    scale = sum(again.values()) / (sum(estimated_s.values()) or 1.0)
    added: dict[str, dict[Level, float]] = {
        block.name: {option.level: option.seconds * scale for option in block.options} for block in costs.blocks
    }
    alike = _alike(costs, blocks)
    for name, seconds in _medians(again, alike).items():
        added[name]["full"] = seconds
    selective = all(len(block.options) == 3 for block in costs.blocks)
    if selective and costs.peak(dict.fromkeys(blocks, "selective")) <= budget:
        _, again_selective, slowed = _one_step(model, step, blocks, "selective")
        more = {name: again_selective[name] + max(0.0, slowed[name] - forwards[name]) for name in blocks}
        for name, seconds in _medians(more, alike).items():
            added[name]["selective"] = seconds
    return replace(with_seconds(costs, added), seconds=max(1e-9, full_s - sum(again.values())))


def _alike(costs: Profile, blocks: Mapping[str, nn.Module]) -> dict[str, object]:
    """What tells blocks apart of which one time holds for all: their class and what they hold."""
    return {b.name: (type(blocks[b.name]), *(option.held for option in b.options)) for b in costs.blocks}


def _medians(seconds: Mapping[str, float], alike: Mapping[str, object]) -> dict[str, float]:
    """Of each block the median of those alike: one that a busy machine held up is no dearer than the others."""
    kinds: dict[object, list[float]] = {}
    for name, kind in alike.items():
        kinds.setdefault(kind, []).append(seconds[name])
    return {name: statistics.median(kinds[kind]) for name, kind in alike.items()}


def _one_step(
    model: nn.Module, step: Callable[[], Tensor], blocks: Mapping[str, nn.Module], level: Level
) -> tuple[float, dict[str, float], dict[str, float]]:
    """Seconds of a whole forward and backward with all blocks at ``level``; of each second forward; of each first."""
    calls: dict[str, Recomputed] = {}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with undisturbed(model):
        set_levels(model, dict.fromkeys(blocks, level))
        try:
            for name, block in blocks.items():
                call = block._compiled_call_impl
                assert isinstance(call, Recomputed)
                calls[name] = call
                call.timed = True
            for _ in range(2):  # the first one warms up
                for call in calls.values():
                    call.forward_s = call.again_s = 0.0
                begun = time.perf_counter()
                torch.autograd.grad(step(), trained, allow_unused=True)  # no hook that takes up gradients is called
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()
                elapsed_s = time.perf_counter() - begun
        finally:
            set_levels(model, {})
    return (
        elapsed_s,
        {name: call.again_s for name, call in calls.items()},
        {name: call.forward_s for name, call in calls.items()},
    )


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside it steps may be tried: gradients, buffers, random states, and what the modules' attributes hold, lists and
    dicts of them too, are afterwards what they were."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    attributes = [own for module in model.modules() for own in (module.__dict__, *module.__dict__.values())]
    kept = [(own, own.copy()) for own in attributes if isinstance(own, dict | list | set)]
    with forked_randomness(_device_of(model)):
        try:
            with buffers_copied(model):
                for parameter, _ in gradients:
                    parameter.grad = None
                yield
        finally:
            for own, was in kept:
                own.clear()
                own.extend(was) if isinstance(own, list) else own.update(was)
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


@contextmanager
def _as_written(model: nn.Module) -> Iterator[None]:
    """Inside it blocks run eagerly: of shapes alone nothing is compiled. What compiled blocks hold is about as much, or
    less."""
    compiled = [(module, module._compiled_call_impl) for module in model.modules() if is_compiled(module)]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
