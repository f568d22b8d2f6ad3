"""The choice is the fastest that fits, then the lowest: against every choice there is, and a thousand blocks."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.memory import search
from paceline.memory.plan import BlockCost, Choice, Level, Option, choose, least, peak, uniform

LEVELS: tuple[Level, ...] = ("keep", "selective", "full")
NS = 1e-9


def block(name: str, *ways: tuple[int, int, int]) -> BlockCost:
    """From (held, backward, nanoseconds) of each level."""
    options = [
        Option(level=level, held=held, backward=backward, seconds=ns * NS)
        for level, (held, backward, ns) in zip(LEVELS, ways, strict=False)
    ]
    return BlockCost(name=name, options=tuple(options))


def nanoseconds(choice: Choice, blocks: Sequence[BlockCost]) -> int:
    return sum(counted_ns(block.at(choice.levels[block.name])) for block in blocks)


def counted_ns(option: Option) -> int:
    """Of an option that is no ``keep`` one at least: nothing is recomputed without need."""
    return max(round(option.seconds / NS), int(option.level != "keep"))


@dataclasses.dataclass(frozen=True)
class Case:
    blocks: tuple[BlockCost, ...]
    fixed: int
    loss: int


# What trips searches up: ties and zeros, figures near the largest, and all but one value being equal.
SMALL = st.integers(0, 4)
HUGE = st.integers(2**53 - 2, 2**53)
BYTES = st.sampled_from([SMALL, st.integers(0, 1000), HUGE, st.sampled_from([0, 7, 2**40])])
TIMES = st.sampled_from([SMALL, st.integers(0, 10**6), st.sampled_from([0, 10**15 // 8])])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    held, backward, ns = draw(BYTES), draw(BYTES), draw(TIMES)
    freed_per_ns = draw(st.sampled_from([None, 1, 3, 1000]))  # time proportional to bytes: bounds say nothing then
    blocks = []
    for place in range(draw(st.integers(0, 5))):
        ways: list[tuple[int, int, int]] = []
        for level in range(draw(st.integers(1, 3))):
            less = bool(ways) and draw(st.booleans())  # than keep holds, as it should be
            h = draw(st.integers(0, ways[0][0])) if less else draw(held)
            b = draw(backward | st.just(h))
            time_ns = draw(ns) if freed_per_ns is None or not ways else max(ways[0][0] - h, 0) // freed_per_ns
            ways.append((h, b, min(time_ns, 10**14) if level else 0))
        blocks.append(block(f"blocks.{place}", *ways))
    return Case(tuple(blocks), fixed=draw(draw(BYTES)), loss=draw(draw(BYTES)))


def every_choice(case: Case) -> Iterator[tuple[int, int]]:
    """(nanoseconds, peak) of each, from the definition and nothing of the package: what is live at each moment."""
    for options in itertools.product(*(block.options for block in case.blocks)):
        held = list(itertools.accumulate((option.held for option in options), initial=0))
        moments = [held[-1] + case.loss]
        moments += [before + option.backward for before, option in zip(held, options, strict=False)]
        yield sum(map(counted_ns, options)), case.fixed + max(moments)


def check(case: Case, budget: int, everything: Sequence[tuple[int, int]]) -> None:
    choice = choose(case.blocks, fixed=case.fixed, loss=case.loss, budget=budget)
    fitting = [one for one in everything if one[1] <= budget]
    if choice is None:
        assert not fitting
        return
    assert (nanoseconds(choice, case.blocks), choice.peak) == min(fitting)
    assert choice.gap == 0
    assert choice.peak == peak(case.blocks, choice.levels, fixed=case.fixed, loss=case.loss)
    assert list(choice.levels) == [block.name for block in case.blocks]
    added = [block.at(choice.levels[block.name]).seconds for block in case.blocks]
    assert choice.seconds == math.fsum(added)


@pytest.fixture(params=[2, 64], ids=["narrow", "as it is"])
def width(request: pytest.FixtureRequest) -> Iterator[int]:
    """Starting from two tails, small cases too are cut, found, bounded and searched again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_FIRST_WIDTH", request.param)
        yield request.param


@pytest.mark.usefixtures("width")
class TestAgainstEveryChoice:
    @settings(max_examples=60, deadline=None)
    @given(cases(), st.data())
    def test_the_fastest_that_fits_and_of_these_the_lowest(self, case: Case, data: st.DataObject) -> None:
        everything = list(every_choice(case))
        peaks = sorted({one[1] for one in everything})
        budget = data.draw(st.sampled_from(peaks)) + data.draw(st.sampled_from([0, 0, -1, 1, 10**6]))
        check(case, budget, everything)

    @settings(max_examples=30, deadline=None)
    @given(cases())
    def test_the_lowest_and_of_these_the_fastest(self, case: Case) -> None:
        lowest = least(case.blocks, fixed=case.fixed, loss=case.loss)
        assert (lowest.peak, nanoseconds(lowest, case.blocks)) == min((one[1], one[0]) for one in every_choice(case))
        assert choose(case.blocks, fixed=case.fixed, loss=case.loss, budget=lowest.peak - 1) is None

    @pytest.mark.parametrize("seed", range(9))
    def test_seven_blocks_that_all_differ(self, seed: int) -> None:
        """Times by chance, in proportion to the bytes saved, and of few values, so that peaks decide."""
        drawn = random.Random(seed)
        largest = drawn.choice([2**4, 2**30, 2**50])
        blocks = []
        for place in range(7):
            held, backward = drawn.randrange(largest), drawn.randrange(largest)
            ways = [(held, backward, 0)]
            for most_left in (held // 2, held // 8):
                left = drawn.randrange(most_left + 1)
                ns = [drawn.randrange(10**6), (held - left) * 1000 // largest, drawn.randrange(3)][seed % 3]
                ways.append((left, backward, ns))
            blocks.append(block(f"blocks.{place}", *ways))
        case = Case(tuple(blocks), fixed=5, loss=drawn.randrange(largest))
        everything = list(every_choice(case))
        peaks = sorted({one[1] for one in everything})
        for part in (0, 0.1, 0.3, 0.6, 1):
            check(case, peaks[int(part * (len(peaks) - 1))], everything)


def table(case: Case) -> dict[int, int]:
    """The least nanoseconds of every peak that can be had: for small sizes, since it lists all sums there are."""
    fastest = {case.loss: 0}
    for block in reversed(case.blocks):
        longer: dict[int, int] = {}
        for need, ns in fastest.items():
            for option in block.options:
                more, then = max(option.backward, option.held + need), ns + counted_ns(option)
                longer[more] = min(then, longer.get(more, then))
        fastest = longer
    return {case.fixed + need: ns for need, ns in fastest.items()}


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("tallest", [10, 30, 50, None])
def test_sixty_blocks_against_a_table_of_all_sums(tallest: int | None) -> None:
    """Where fronts are cut and bounds do their work, and choices are too many to list; one block may tower above."""
    drawn = random.Random(tallest)
    blocks = []
    for place in range(60):
        held, above = drawn.randrange(3, 9), 200 if place == tallest else 0
        keep = (held, above + held + drawn.randrange(9), 0)
        selective = (held // 2, above + drawn.randrange(40), drawn.randrange(10**6, 10**7))
        full = (drawn.randrange(2), above + drawn.randrange(80), drawn.randrange(2 * 10**6, 4 * 10**7))
        blocks.append(block(f"blocks.{place}", keep, selective, full))
    case = Case(tuple(blocks), fixed=3, loss=11)
    fastest = table(case)
    low, high = min(fastest), peak(blocks, uniform(blocks, "keep"), fixed=3, loss=11)
    for budget in (low, low + 1, *range(low + 9, high, 31)):
        choice = choose(blocks, fixed=3, loss=11, budget=budget)
        assert choice is not None
        assert (nanoseconds(choice, blocks), choice.peak) == min(
            (ns, most) for most, ns in fastest.items() if most <= budget
        )
    assert choose(blocks, fixed=3, loss=11, budget=low - 1) is None


def thousand(kind: str, blocks: int = 1000) -> Case:
    drawn = random.Random(kind)
    made = []
    for place in range(blocks):
        held = 340 << 20 if kind == "equal" else drawn.randrange(10**8, 10**9)
        if kind == "narrowing":  # as in convolutional networks: the first blocks hold most, and take most for backward
            held = held * (blocks - place) // blocks
        ways = [(held, held + held // 3, 0)]
        part = 0.5 if kind == "equal" else drawn.uniform(0.3, 0.6)
        for left, price in ((int(held * part), 0.005), (held // 17, 0.02)):
            ns_per_byte = {"equal": price, "proportional": 0.0137}.get(kind, price * drawn.uniform(0.7, 1.4))
            ways.append((left, 2 * held, round((held - left) * ns_per_byte)))
        made.append(block(f"blocks.{place}", *ways))
    return Case(tuple(made), 10**9, 10**9)


def between(case: Case, part: float) -> int:
    """A budget that lies so far from the peak of recomputing all to that of keeping all."""
    low = peak(case.blocks, uniform(case.blocks, "full"), fixed=case.fixed, loss=case.loss)
    high = peak(case.blocks, uniform(case.blocks, "keep"), fixed=case.fixed, loss=case.loss)
    return low + int(part * (high - low))


@pytest.mark.parametrize("kind", ["equal", "different", "narrowing"])
def test_a_thousand_blocks_take_a_moment_and_are_exact(kind: str) -> None:
    case = thousand(kind)
    budget = between(case, 0.4)
    began_s = time.process_time()
    choice = choose(case.blocks, fixed=case.fixed, loss=case.loss, budget=budget)
    assert time.process_time() - began_s < 10
    assert choice is not None
    assert choice.gap == 0
    assert choice.peak == peak(case.blocks, choice.levels, fixed=case.fixed, loss=case.loss) <= budget


def test_a_search_cut_to_two_tails_still_finds_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_FIRST_WIDTH", 2)
    monkeypatch.setattr(search, "MOST_TAILS", 0)
    for kind, blocks in itertools.product(("different", "narrowing", "proportional"), (5, 20, 60)):
        case = thousand(kind, blocks)
        low = least(case.blocks, fixed=case.fixed, loss=case.loss).peak
        for budget in (low, low + 1000, between(case, 0.5)):
            choice = choose(case.blocks, fixed=case.fixed, loss=case.loss, budget=budget)
            assert choice is not None
            assert choice.peak <= budget


def test_what_is_cut_is_accounted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search is cut short: what it returns fits, and the fastest there is lies within the gap that it admits."""
    case = thousand("proportional", blocks=30)
    budget = between(case, 0.5)

    def chosen(most_tails: int) -> Choice:
        monkeypatch.setattr(search, "MOST_TAILS", most_tails)
        choice = choose(case.blocks, fixed=case.fixed, loss=case.loss, budget=budget)
        assert choice is not None
        assert choice.peak == peak(case.blocks, choice.levels, fixed=case.fixed, loss=case.loss) <= budget
        return choice

    hasty, longer = chosen(2000), chosen(2**19)
    assert 0 < hasty.gap < 0.01 * hasty.seconds
    assert hasty.seconds - hasty.gap - NS <= longer.seconds <= hasty.seconds
    assert longer.gap < 100 * NS


@given(cases(), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_no_uniform_choice_is_better(case: Case, every: int) -> None:
    level: Level = "full" if all(len(block.options) == 3 for block in case.blocks) else "keep"
    by_hand = uniform(case.blocks, level, every)
    budget = peak(case.blocks, by_hand, fixed=case.fixed, loss=case.loss)
    choice = choose(case.blocks, fixed=case.fixed, loss=case.loss, budget=budget)
    assert choice is not None
    assert nanoseconds(choice, case.blocks) <= sum(counted_ns(block.at(by_hand[block.name])) for block in case.blocks)


EQUAL = tuple(block(f"blocks.{i}", (9, 12, 0), (4, 12, 10), (1, 13, 100)) for i in range(6))


@pytest.mark.parametrize(("budget", "levels"), [(59, "kkkkkk"), (58, "skkkkk"), (39, "sssskk"), (20, "ffffss")])
def test_of_equal_blocks_the_first_recompute_most(budget: int, levels: str) -> None:
    choice = choose(EQUAL, fixed=0, loss=5, budget=budget)
    assert choice is not None
    assert "".join(level[0] for level in choice.levels.values()) == levels


def test_without_blocks_there_is_what_is_there_anyway() -> None:
    assert choose((), fixed=3, loss=4, budget=7) == Choice(levels={}, peak=7, seconds=0.0) == least((), fixed=3, loss=4)
    assert choose((), fixed=3, loss=4, budget=6) is None
    assert choose(EQUAL, fixed=100, loss=0, budget=99) is None
    assert choose(EQUAL, fixed=0, loss=5, budget=2**80) == Choice(levels=uniform(EQUAL, "keep"), peak=59, seconds=0.0)


def test_time_counts_however_short() -> None:
    """Else ties would be broken by recomputing, which is not free."""
    picoseconds = [Option(level="keep", held=9, backward=12), Option(level="full", held=1, backward=2, seconds=1e-12)]
    choice = choose([BlockCost(name="a", options=tuple(picoseconds))], fixed=0, loss=0, budget=100)
    assert choice is not None
    assert choice.levels == {"a": "keep"}


@given(cases())
@settings(max_examples=60, deadline=None)
def test_nothing_is_recomputed_where_all_fits(case: Case) -> None:
    kept = uniform(case.blocks, "keep")
    budget = peak(case.blocks, kept, fixed=case.fixed, loss=case.loss)
    choice = choose(case.blocks, fixed=case.fixed, loss=case.loss, budget=budget)
    assert choice is not None
    assert choice.levels == kept


def test_what_frees_nothing_is_not_recomputed_for_no_time_either() -> None:
    """As blocks that do not train, whose second forward never comes: in any place, where others must recompute."""
    frozen = [block(f"frozen.{place}", (0, 5, 0), (0, 5, 0), (0, 5, 0)) for place in range(3)]
    free = [frozen[0], EQUAL[0], frozen[1], EQUAL[1], frozen[2]]
    choice = choose(free, fixed=0, loss=5, budget=peak(free, uniform(free, "keep"), fixed=0, loss=5) - 1)
    assert choice is not None
    assert [level for name, level in choice.levels.items() if name.startswith("frozen")] == ["keep"] * 3
    assert {choice.levels[block.name] for block in EQUAL[:2]} != {"keep"}


def test_every_kth_block() -> None:
    names = [block.name for block in EQUAL]
    assert uniform(EQUAL, "full") == dict.fromkeys(names, "full")
    assert "".join(level[0] for level in uniform(EQUAL, "full", every=4).values()) == "fkkkfk"
    only_kept = [dataclasses.replace(EQUAL[0], options=EQUAL[0].options[:1]), EQUAL[1]]
    with pytest.raises(ValueError, match=r"blocks\.0 has no level full, only keep"):
        uniform(only_kept, "full")
    with pytest.raises(ValueError, match="every 0"):
        uniform(EQUAL, "full", every=0)


KEEP = Option(level="keep", held=1, backward=1)


@pytest.mark.parametrize(
    "figures", [{"held": -1}, {"backward": -1}, {"seconds": -1e-9}, {"seconds": math.nan}, {"seconds": math.inf}]
)
def test_figures_that_cannot_be(figures: Mapping[str, float]) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        dataclasses.replace(KEEP, **figures)  # type: ignore[arg-type]


@pytest.mark.parametrize("levels", [[], ["full"], ["full", "keep"], ["keep", "keep"], ["keep", "full", "full"]])
def test_options_that_cannot_be(levels: Sequence[Level]) -> None:
    with pytest.raises(ValueError, match="keep and then other levels, each once"):
        BlockCost(name="a", options=tuple(dataclasses.replace(KEEP, level=level) for level in levels))


def test_blocks_that_cannot_be() -> None:
    twice = [BlockCost(name="a", options=(KEEP,))] * 2
    with pytest.raises(ValueError, match="names of blocks"):
        choose(twice, fixed=0, loss=0, budget=9)
    with pytest.raises(ValueError, match="names of blocks"):
        peak(twice, {"a": "keep"}, fixed=0, loss=0)
    for fixed, loss in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="not negative"):
            choose(twice[:1], fixed=fixed, loss=loss, budget=9)
    wrong: list[dict[str, Level]] = [{}, {"a": "keep", "b": "keep"}, {"b": "keep"}]
    for levels in wrong:
        with pytest.raises(ValueError, match="levels are of"):
            peak(twice[:1], levels, fixed=0, loss=0)
    with pytest.raises(ValueError, match="exbibyte"):
        least([BlockCost(name="a", options=(dataclasses.replace(KEEP, held=2**60),))], fixed=0, loss=0)
    with pytest.raises(ValueError, match="104 days"):
        slow = dataclasses.replace(KEEP, level="full", seconds=1e7)
        least([BlockCost(name="a", options=(KEEP, slow))], fixed=0, loss=0)
