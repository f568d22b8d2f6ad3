"""Chooses what to recompute, so that a step fits a budget at the least cost in time: measured, then planned."""

from __future__ import annotations

import reprlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError, UsageError
from paceline.memory.blocks import find_blocks
from paceline.memory.plan import Level, choose, least, peak, uniform
from paceline.memory.profile import CPU, GPU, Profile, profile, simulated_peak, with_seconds
from paceline.memory.recompute import Recomputed, is_compiled, set_levels
from paceline.memory.trial import Trial, leaves_of, missing_arguments
from paceline.sizes import parse_size, show_size

__all__ = ["Fit", "find_fit", "fit", "peak_with"]


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
        return f"at least {show_size(self.peak)}, of which {most} takes {show_size(tops[most])}"

    def __str__(self) -> str:
        """One line: what is recomputed, what that frees, and what it costs.

        >>> empty = Profile(blocks=(), fixed=0, loss=0, seconds=1)
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
    backwards, in which all blocks recompute. What the step reaches, inside the model or not, is left as it was:
    gradients, buffers, attributes, random states. What it changes itself, past all modules, is not. No bit of a
    result ever changes. Not collective, so another worker may choose otherwise: that moves no bit.

    Args:
        step: the forward of one micro-batch; enters autocast itself and returns the loss.
        budget: bytes, or text such as ``2GiB``, for all that a forward and backward allocates: activations, their
            gradients, logits. Not weights, their gradients and the optimizer's state, which are there anyway.

    Raises:
        ConfigError: no choice fits, the model has no repeated blocks, or the budget is nonsense.
        UsageError: a step that returns no loss, does not call the model, or runs backward or an optimizer itself; a
            block that cannot be recomputed, see `recompute`; or a step that can be run, but not followed.

    >>> block = lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    >>> model = nn.Sequential(*[block() for _ in range(8)])
    >>> x_BF = torch.zeros(1024, 64)
    >>> fitted = fit(model, lambda: model(x_BF).square().mean(), "8MiB")
    >>> fitted.peak <= 8 * 2**20 < fitted.unfitted
    True
    """
    _check_arguments(model, step)
    limit = _checked_budget(budget)
    fitted, _ = find_fit(model, step, limit)
    if fitted.peak > limit:
        raise ConfigError(
            "cannot fit a micro-batch",
            found=f"a budget of {show_size(limit)}",
            needed=fitted.least,
            fix="Use smaller micro-batches, or a larger budget",
        )
    set_levels(model, fitted.levels)
    return fitted


def find_fit(
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
    trial = Trial(model, step)
    rates = CPU if _device_of(model).type == "cpu" else GPU
    costs, why = trial.on_shapes_or_for_real(lambda step: profile(step, model, blocks, set_levels, rates=rates))
    if any(map(is_compiled, blocks.values())):
        costs = _without_selective(costs)
    room, loss = budget, costs.loss
    if gaps and costs.heap is not None:
        room, loss = costs.heap.room(budget), costs.heap.loss
    keep = uniform(costs.blocks, "keep")
    smallest = least(costs.blocks, fixed=costs.fixed, loss=loss)
    if smallest.peak <= room < peak(costs.blocks, keep, fixed=costs.fixed, loss=loss):  # else nothing is to be weighed
        costs = _timed(trial, blocks, costs, budget)
    choice = choose(costs.blocks, fixed=costs.fixed, loss=loss, budget=room) or smallest
    return Fit(
        levels=choice.levels,
        peak=peak_with(trial, choice.levels),
        unfitted=costs.peak(keep),
        slower=1 + choice.seconds / costs.seconds,
        profile=costs,
    ), why


def peak_with(trial: Trial, levels: Mapping[str, Level]) -> int:
    """Most bytes that a forward and backward allocates with these levels."""
    return trial.on_shapes_or_for_real(lambda step: simulated_peak(step, trial.model, {}, set_levels, levels))[0]


def _without_selective(costs: Profile) -> Profile:
    """A compiled block shows none of its operators."""
    return replace(
        costs,
        blocks=tuple(
            replace(block, options=tuple(option for option in block.options if option.level != "selective"))
            for block in costs.blocks
        ),
    )


def _timed(trial: Trial, blocks: Mapping[str, nn.Module], costs: Profile, budget: int) -> Profile:
    """With times of this device, from the second of two real steps at each level. No step is run that would not fit:
    ``selective`` then has its estimate, scaled as ``full``'s, or both have."""
    levels = set.intersection(*({option.level for option in block.options} for block in costs.blocks))
    if "full" not in levels or costs.peak(dict.fromkeys(blocks, "full")) > budget:
        return costs
    full_s, again, forwards = _one_step(trial, blocks, "full")
    estimated_s = {block.name: block.at("full").seconds for block in costs.blocks}
    scale = sum(again.values()) / (sum(estimated_s.values()) or 1.0)
    added: dict[str, dict[Level, float]] = {
        block.name: {option.level: option.seconds * scale for option in block.options} for block in costs.blocks
    }
    alike = _alike(costs, blocks)
    for name, seconds in _medians(again, alike).items():
        added[name]["full"] = seconds
    if "selective" in levels and costs.peak(dict.fromkeys(blocks, "selective")) <= budget:
        try:
            _, again_selective, slowed = _one_step(trial, blocks, "selective")
        except UsageError:  # blocks that cannot be selective can have the others
            costs = _without_selective(costs)
        else:
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
    trial: Trial, blocks: Mapping[str, nn.Module], level: Level
) -> tuple[float, dict[str, float], dict[str, float]]:
    """Seconds of a whole forward and backward with all blocks at ``level``; of each second forward; of each first."""
    calls: dict[str, Recomputed] = {}
    with trial.undisturbed(watch=False) as step:
        set_levels(trial.model, dict.fromkeys(blocks, level))
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
                loss = step()
                torch.autograd.grad(loss, leaves_of(loss), allow_unused=True)
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()
                elapsed_s = time.perf_counter() - begun
        finally:
            set_levels(trial.model, {})
    return (
        elapsed_s,
        {name: call.again_s for name, call in calls.items()},
        {name: call.forward_s for name, call in calls.items()},
    )


def _checked_budget(budget: object) -> int:
    if isinstance(budget, str):
        return parse_size(budget, "the budget")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise ConfigError(
            "cannot use the budget",
            found=reprlib.repr(budget),
            needed="a whole number of bytes above 0, or text such as 2GiB",
            fix="Write fit(model, step, '2GiB')",
        )
    return budget


def _check_arguments(model: object, step: object) -> None:
    found, needed = None, "a function without arguments that returns the loss"
    fix = "Write fit(model, lambda: F.cross_entropy(model(x), y), '2GiB')"
    if not isinstance(model, nn.Module):
        found, needed = f"a model of type {type(model).__name__}", "a torch.nn.Module"
    elif any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        found, needed = "a model on the meta device", "a model where it will train: seconds are measured there"
        fix = "Call model.to_empty(device=...) and initialize it before"
    elif not callable(step):
        found = f"a step of type {type(step).__name__}"
    elif missing := missing_arguments(step):
        found = f"a step that needs {missing}"
    if found is not None:
        raise UsageError("cannot fit a micro-batch", found=found, needed=needed, fix=fix)


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
