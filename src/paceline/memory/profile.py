"""What each block of a model costs at each level of recompute: three simulated steps, from which any mix follows.

[Note: what adds up] A step is simulated with all blocks at one level, for each level; sums must hold for any mix, and
never fall short. So what a segment (`paceline.memory.simulate.Segment`) *holds* is all that it kept, whatever died
before its backward, but for two kinds. What dies early at every level is *passing*: it counts where it is alive, in the
forward of the segments that it passes through and in the loss. What dies in the next segment's forward if all keep, and
in backward if all recompute, is that segment's *inputs*: its maker did not save it, and does not when it recomputes
either, unless it is what ``selective`` saves, a matrix product. So the next segment holds it, when it recomputes. Of
all else that dies early at some levels only, it is not known which mixes keep it: some bytes too many for some models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.memory.gaps import Heap
from paceline.memory.live import gradients_in_place
from paceline.memory.plan import BlockCost, Level, Option, peak
from paceline.memory.simulate import Trace, Work, simulate

__all__ = ["CPU", "GPU", "Profile", "Rates", "profile", "simulated_peak", "with_seconds"]

SetLevels = Callable[[nn.Module, Mapping[str, Level]], object]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a device is, for estimates of which only the ratios mean something.

    Args:
        flops_per_s: what matrix products reach.
        bytes_per_s: what all other operators read and write, together.
    """

    flops_per_s: float
    bytes_per_s: float

    def seconds(self, work: Work) -> float:
        """The time of some work: the sum of both, as eager operators run one after the other."""
        return work.flops / self.flops_per_s + work.moved / self.bytes_per_s


GPU = Rates(flops_per_s=150e12, bytes_per_s=1.4e12)
"""A data centre's GPU in bf16: about half of an A100's peak, and three quarters of its memory's speed."""
CPU = Rates(flops_per_s=100e9, bytes_per_s=20e9)
"""A laptop: two or three cores with AVX2 in float32."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What `paceline.memory.plan` needs to know of a step. Bytes and seconds of one micro-batch.

    Args:
        blocks: their costs, in the order in which forward runs them.
        fixed: kept from before the first block until its backward, such as what an embedding returned.
        loss: most bytes between the last block's forward and its backward, on top of all that blocks hold.
        seconds: of the whole forward and backward when every block keeps all, by the same rates as the options'.
        heap: how a CPU's process would hold it; ``None``: not known.
    """

    blocks: tuple[BlockCost, ...]
    fixed: int
    loss: int
    seconds: float
    heap: Heap | None = None

    def peak(self, levels: Mapping[str, Level]) -> int:
        """Most bytes alive in a step with these levels, on top of what was there before; blocks left out keep all."""
        every = {block.name: levels.get(block.name, "keep") for block in self.blocks}
        return peak(self.blocks, every, fixed=self.fixed, loss=self.loss)


def profile(
    step: Callable[[], Tensor],
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    set_levels: SetLevels,
    *,
    rates: Rates = GPU,
    done: Callable[[], None] = lambda: None,
) -> Profile:
    """Simulates the step with all blocks at each level, and gives what each block costs. Not collective.

    Inside `paceline.memory.simulate.shapes_only` nothing is computed: a model of 7 billion parameters takes some
    seconds. All levels are ``keep`` afterwards.

    `Profile.peak` of any levels is the peak of a step with them: to the byte for most models, and else more, not less.
    See [Note: what adds up] at the top of the file. Blocks that cannot be selective have two options. A block that runs
    several times holds the sum; where several take turns, what lies between two calls counts as if all was kept. One
    that does not run costs nothing.

    Args:
        step: forward; enters autocast itself and returns the loss, a scalar.
        model: its parameters are given gradients first, as in a run.
        blocks: parts of ``model`` by module path.
        set_levels: called as ``set_levels(model, levels)``: lets the named blocks recompute from now on, all others
            keep; `paceline.memory.recompute.set_levels`.
        rates: of the device that times are estimated for.
        done: called after each level.

    Raises:
        UsageError: a name that is not a block's path; or as `paceline.memory.simulate.simulate`.
    """
    paths = dict(model.named_modules(remove_duplicate=False))
    for name, block in blocks.items():
        if paths.get(name) is not block:
            raise UsageError(
                "cannot profile the blocks",
                found=f"a block named {name!r}, which is not its path in {type(model).__name__}",
                needed="blocks by module path",
                fix="Use paceline.memory.find_blocks(model)",
            )
    traces: dict[Level, Trace] = {}
    with gradients_in_place(model):
        for level in get_args(Level):
            try:
                traces[level] = _simulated(step, model, blocks, set_levels, dict.fromkeys(blocks, level))
            except Exception:
                if level != "selective":  # blocks can have the others, such as those that change in place what it keeps
                    raise
            done()
    kept = traces["keep"]
    sums = {level: _Sums.of(level, traces) for level in traces}
    called = [segment.name for segment in kept.segments[1:]]
    names = list(dict.fromkeys(reversed(called)))[::-1]  # by their last calls
    names += [name for name in blocks if name not in called]
    costs: list[BlockCost] = []
    for place, name in enumerate(names):
        options: list[Option] = []
        mine = [at for at, segment in enumerate(kept.segments) if segment.name == name]
        later = set(names[place + 1 :])
        for level, its in sums.items():
            # Before a call there is also what earlier ones hold: its own and, where blocks take turns, others' whose
            # last call comes later, at whatever level they hold most.
            turns = (
                [at for at, segment in enumerate(kept.segments[: mine[-1]]) if segment.name in later] if mine else []
            )
            most = (
                its.most[at]
                + sum(its.held[own] for own in mine if own < at)
                + sum(max(each.held[other] for each in sums.values()) for other in turns if other < at)
                for at in mine
            )
            options.append(
                Option(
                    level=level,
                    held=sum(its.held[at] for at in mine),
                    backward=max(most, default=0),
                    seconds=max(0.0, _backward_s(traces[level], mine, rates) - _backward_s(kept, mine, rates)),
                )
            )
        costs.append(BlockCost(name=name, options=tuple(options)))
    loss = max(its.loss for its in sums.values())
    if any(trace.backward_within for trace in traces.values()):
        # In a mix it may find more in place than at any one level: what one block computes again, beside others' own.
        spans = zip(*(its.held[1:] for its in sums.values()), strict=True)
        loss += max((max(held) - min(held) for held in spans), default=0)
    return Profile(
        blocks=tuple(costs),
        fixed=max(its.held[0] for its in sums.values()),
        loss=loss,
        seconds=rates.seconds(kept.work),
        heap=_heap(kept, loss, sums["keep"]),
    )


def _heap(kept: Trace, loss: int, sums: _Sums) -> Heap:
    small_loss = loss - round(kept.small * (kept.loss - kept.loss_small))
    turnover = min(max(sums.most[1:], default=0) + small_loss, kept.peak // 2)
    beside = round(kept.small * kept.loss_large)
    return Heap(small=kept.small, loss=small_loss, beside=beside, turnover=round(kept.small * turnover))


def simulated_peak(
    step: Callable[[], Tensor],
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    set_levels: SetLevels,
    levels: Mapping[str, Level],
) -> int:
    """What `Profile.peak` foretells, found by simulating the step with these levels. Arguments as for `profile`."""
    with gradients_in_place(model):
        return _simulated(step, model, blocks, set_levels, levels).peak


def with_seconds(profile: Profile, seconds: Mapping[str, Mapping[Level, float]]) -> Profile:
    """The profile with measured times in place of estimated ones: seconds added by block and level; others stay.

    >>> options = (Option(level="keep", held=9, backward=12), Option(level="full", held=1, backward=13, seconds=0.1))
    >>> block = BlockCost(name="blocks.0", options=options)
    >>> estimated = Profile(blocks=(block,), fixed=0, loss=0, seconds=0.3)
    >>> with_seconds(estimated, {"blocks.0": {"full": 0.2}}).blocks[0].options[1].seconds
    0.2
    """

    def replaced(block: BlockCost) -> BlockCost:
        measured = seconds.get(block.name, {})
        options = (replace(option, seconds=measured.get(option.level, option.seconds)) for option in block.options)
        return replace(block, options=tuple(options))

    return replace(profile, blocks=tuple(map(replaced, profile.blocks)))


def _simulated(
    step: Callable[[], Tensor],
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    set_levels: SetLevels,
    levels: Mapping[str, Level],
) -> Trace:
    set_levels(model, levels)
    try:
        return simulate(step, blocks)
    finally:
        set_levels(model, {})


def _backward_s(trace: Trace, places: Iterable[int], rates: Rates) -> float:
    return sum(rates.seconds(trace.segments[place].backward_work) for place in places)


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """A trace in terms that add up. See [Note: what adds up].

    Args:
        held: by each segment, the prologue first.
        most: the most alive in each segment's forward and backward, on top of what those before it hold.
        loss: the same of the loss.
    """

    held: list[int]
    most: list[int]
    loss: int

    @classmethod
    def of(cls, level: Level, traces: Mapping[Level, Trace]) -> _Sums:
        segments = traces[level].segments
        held = [segment.kept for segment in segments]
        most = [segment.backward for segment in segments]
        through = [0] * (len(segments) + 1)
        for came, at in enumerate(zip(*(trace.segments for trace in traces.values()), strict=True)):
            for went in at[0].released:
                gone = min(segment.released.get(went, 0) for segment in at)
                if went == came + 1 < len(segments):
                    cheap, *recomputed = (segment.released_cheap.get(went, 0) for segment in at)
                    inputs = max(0, cheap - max(recomputed))
                    gone += inputs
                    if level != "keep":
                        held[went] += inputs
                        most[went] += inputs
                held[came] = max(0, held[came] - gone)
                for place in range(came + 1, went + 1):
                    through[place] += gone
        for place, segment in enumerate(segments):
            most[place] = max(most[place], segment.rise + through[place])
        if len(most) > 1:  # the prologue is never recomputed: its most is the first block's
            most[1] = max(most[1], most[0] - held[0])
        return cls(held=held, most=most, loss=traces[level].loss + through[-1])
