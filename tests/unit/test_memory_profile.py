"""What is foretold from three simulated steps is what a step with any mix of levels holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.memory.live import gradients_in_place, shapes_only
from paceline.memory.plan import Level
from paceline.memory.profile import CPU, Profile, Rates, profile, simulated_peak, with_seconds
from paceline.memory.recompute import get_levels, set_levels
from paceline.memory.simulate import simulate
from paceline.models import GPT, GPTConfig


def gpt(*, samples: int = 2, bf16: bool = False, cache: bool = False, **other: Any) -> tuple[GPT, Callable[[], Any]]:
    shape = {"vocabulary": 61, "context": 32, "width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "hidden": 96}
    model = GPT(GPTConfig(**{**shape, **other}))

    def step() -> Any:
        tokens_BT = torch.zeros(samples, 32, dtype=torch.int64)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16, cache_enabled=cache):
            return model(tokens_BT, tokens_BT)

    return model, step


def twelve() -> tuple[nn.Module, Callable[[], Any]]:
    blocks = (
        nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256)) for _ in range(12)
    )
    model = nn.Sequential(*blocks)
    return model, lambda: model(torch.zeros(8, 128, 256)).sum()


def convolutions(ins: int, outs: int) -> nn.Sequential:
    first = (nn.Conv2d(ins, outs, 3, padding=1), nn.BatchNorm2d(outs), nn.ReLU(inplace=True))
    return nn.Sequential(*first, nn.Conv2d(outs, outs, 3, padding=1), nn.BatchNorm2d(outs), nn.ReLU(inplace=True))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = convolutions(16, 16)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return torch.relu(x_BCHW + self.branch(x_BCHW))


def images() -> tuple[nn.Module, Callable[[], Any]]:
    growing = (convolutions(3, 16), nn.MaxPool2d(2), convolutions(16, 32), nn.AvgPool2d(2), convolutions(32, 16))
    model = nn.Sequential(*growing, Residual(), Residual(), nn.Flatten(), nn.Linear(16 * 64, 10))
    labels_B = torch.zeros(8, dtype=torch.int64)
    return model, lambda: F.cross_entropy(model(torch.zeros(8, 3, 32, 32)), labels_B)


def encoder() -> tuple[nn.Module, Callable[[], Any]]:
    layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return model, lambda: model(torch.zeros(4, 64, 32)).square().mean()


class Narrowing(nn.Module):
    """A U: what the way down returns is read on the way up again."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([convolutions(4, 8), convolutions(8, 16)])
        self.up = nn.ModuleList([convolutions(24, 8), convolutions(12, 4)])

    def forward(self, x_BCHW: Tensor) -> Tensor:
        seen = []
        for block in self.down:
            seen.append(x_BCHW)
            x_BCHW = F.max_pool2d(block(x_BCHW), 2)
        for block in self.up:
            skipped_BCHW = seen.pop()
            x_BCHW = block(torch.cat([F.interpolate(x_BCHW, skipped_BCHW.shape[-2:]), skipped_BCHW], 1))
        return x_BCHW


def narrowing() -> tuple[nn.Module, Callable[[], Any]]:
    model = Narrowing()
    return model, lambda: model(torch.zeros(4, 4, 32, 32)).mean()


class InTurn(nn.Module):
    """Two blocks that run twice each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = convolutions(4, 4), convolutions(4, 4)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        for _ in range(2):
            x_BCHW = self.second(self.first(x_BCHW))
        return x_BCHW


def in_turn() -> tuple[nn.Module, Callable[[], Any]]:
    model = InTurn()
    return model, lambda: model(torch.zeros(4, 4, 16, 16)).mean()


def dropped() -> tuple[nn.Module, Callable[[], Any]]:
    """A forward whose result nobody needs, before the one that counts."""
    model, step = gpt()

    def twice() -> Any:
        step()
        return step()

    return model, twice


def penalty(build: Callable[[], tuple[nn.Module, Callable[[], Any]]]) -> tuple[nn.Module, Callable[[], Any]]:
    """A backward inside of the forward, whose graph stays."""
    model, step = build()

    def penalized() -> Any:
        loss = step()
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return loss * 1

    return model, penalized


BLOCKS: dict[type, str] = {
    GPT: "blocks.",
    nn.TransformerEncoder: "layers.",
    Narrowing: "down. up.",
    InTurn: "first second",
}


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    if isinstance(model, InTurn | Narrowing | GPT | nn.TransformerEncoder):
        starts = tuple(BLOCKS[type(model)].split())
        depth = starts[0].count(".")
        return {n: m for n, m in model.named_modules() if n.startswith(starts) and n.count(".") == depth}
    return {name: block for name, block in model.named_children() if isinstance(block, nn.Sequential | Residual)}


def mixes(names: list[str]) -> dict[str, dict[str, Level]]:
    levels: tuple[Level, ...] = ("keep", "selective", "full")
    return {
        "full": dict.fromkeys(names, "full"),
        "the second half": dict.fromkeys(names[len(names) // 2 :], "full"),
        "in turn": {name: levels[place % 3] for place, name in enumerate(names)},
        "in turn, backwards": {name: levels[-1 - place % 3] for place, name in enumerate(names)},
    }


def more_mixes(names: list[str]) -> dict[str, dict[str, Level]]:
    alike: tuple[Level, ...] = ("keep", "selective")
    return {
        **{level: dict.fromkeys(names, level) for level in alike},
        "every:2": dict.fromkeys(names[::2], "full"),
    }


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Callable[[], Any]]], float]] = {
    "gpt": (gpt, 0),
    "gpt, bf16": (lambda: gpt(bf16=True, dropout=0.1), 0),
    "twelve blocks": (twelve, 0),
    "images": (images, 0),
    "encoder": (encoder, 0.02),
    "a U": (narrowing, 0.04),
    "copies of weights kept by autocast": (lambda: gpt(bf16=True, cache=True), 0.5),
    "in turn": (in_turn, 0.5),
    "dropped": (dropped, 1.0),
    "in turn, with a penalty": (lambda: penalty(in_turn), 0.5),
    "a U with a penalty": (lambda: penalty(narrowing), 0.6),
}


ON_SHAPES = {"twelve blocks"}
"""The others run for real, which is faster for what is small."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two would mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES)
def test_any_mix_is_foretold(case: str, request: pytest.FixtureRequest) -> None:
    build, most_over = CASES[case]
    model, step = build()
    blocks = blocks_of(model)
    assert len(blocks) > 1
    with shapes_only(model) if case in ON_SHAPES else nullcontext():
        found = profile(step, model, blocks, set_levels)
        known = {option.level for block in found.blocks for option in block.options}
        assert known >= {"keep", "full"}
        tried = mixes(list(blocks)) | (more_mixes(list(blocks)) if request.config.getoption("--long") else {})
        for name, levels in tried.items():
            if not known.issuperset(levels.values()):
                continue  # what `selective` keeps can be read once
            peak = simulated_peak(step, model, blocks, set_levels, levels)
            over = found.peak(levels) / peak - 1
            assert 0 <= over <= most_over, f"{name}: {found.peak(levels)} foretold, {peak} found"


def test_for_real() -> None:
    """The same figures from real tensors, and what is foretold is what is there."""
    model, step = gpt()
    blocks = blocks_of(model)
    with shapes_only(model):
        found = profile(step, model, blocks, set_levels)
    levels: dict[str, Level] = dict.fromkeys(list(blocks)[::2], "full")
    assert found.peak(levels) == pytest.approx(simulated_peak(step, model, blocks, set_levels, levels), rel=0.01)
    assert get_levels(model) == {}
    assert all(parameter.grad is None for parameter in model.parameters())


def at(samples: int) -> Profile:
    model, step = gpt(samples=samples, layers=2)
    return profile(step, model, blocks_of(model), set_levels, rates=CPU)


def test_all_that_is_held_grows_with_the_samples() -> None:
    two, four, six = at(2), at(4), at(6)
    for low, middle, high in zip(two.blocks, four.blocks, six.blocks, strict=True):
        for its in zip(low.options, middle.options, high.options, strict=True):
            held = [option.held for option in its]
            assert held[2] - held[1] == held[1] - held[0] >= 0
            assert its[0].level != "keep" or held[0] > 0
            backward = [option.backward for option in its]
            assert backward[2] - backward[1] >= backward[1] - backward[0]  # the most of several such lines


def test_time() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    rates = Rates(flops_per_s=1e9, bytes_per_s=1e6)

    def step() -> torch.Tensor:
        total: torch.Tensor = model(torch.zeros(16, 64)).sum()
        return total

    with shapes_only(model), gradients_in_place(model):
        found = profile(step, model, blocks_of(model), set_levels, rates=rates)
        work = simulate(step, {}).work
    product = 2 * 16 * 64 * 64
    assert work.flops == product * (4 * 3 - 1)  # three each, but for the first input's gradient
    assert found.seconds == pytest.approx(work.flops / 1e9 + work.moved / 1e6)
    tanh_s = 2 * 16 * 64 * 4 / 1e6
    for block in found.blocks:
        keep, selective, full = block.options
        assert keep.seconds == 0
        assert selective.seconds == pytest.approx(tanh_s)
        assert full.seconds == pytest.approx(tanh_s + product / 1e9)
    measured = with_seconds(found, {"1": {"full": 0.5}})
    assert [block.options[2].seconds for block in measured.blocks] == [
        0.5 if block.name == "1" else block.options[2].seconds for block in found.blocks
    ]


def test_blocks_that_do_not_run_cost_nothing() -> None:
    model, idle = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))), "1"
    with shapes_only(model):
        found = profile(lambda: model[0](torch.zeros(2, 8)).sum(), model, blocks_of(model), set_levels)
    assert [block.name for block in found.blocks] == ["0", idle]
    assert all((option.held, option.backward) == (0, 0) for option in found.blocks[1].options)
    assert found.peak({idle: "full"}) == found.peak({})


def test_without_blocks_all_is_loss() -> None:
    model, step = gpt()
    with shapes_only(model), gradients_in_place(model):
        found = profile(step, model, {}, set_levels)
        assert found.peak({}) == found.loss == simulate(step, {}).peak
    assert found.seconds > 0


def test_names_are_paths() -> None:
    model, step = gpt()
    with pytest.raises(UsageError, match=r"block named '0'.*its path in GPT"):
        profile(step, model, {"0": model.blocks[0]}, set_levels)
