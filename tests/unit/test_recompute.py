"""Recompute: blocks are found in any module tree, no bit moves, and a block that would move one is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.determinism import autocast, digest
from paceline.errors import ConfigError, UsageError
from paceline.memory import find_blocks, fit, recompute, saved_bytes
from paceline.memory.recompute import get_levels, set_levels
from paceline.models import GPT, GPTConfig

MODES: list[Any] = ["none", "all", "selective", "every:2", "every:3", ["layers.1"], {"layers.*": "selective"}]


class Layer(nn.Module):
    """All that a second forward must not do differently: BatchNorm, dropout, Python's and numpy's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.dropout = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Dropout(0.2)

    def forward(self, x_BCT: Tensor) -> Tensor:
        y_BCT: Tensor = self.dropout(self.norm(self.conv(x_BCT)).relu())
        if random.random() < 0.5:  # stochastic depth
            y_BCT = y_BCT * np.random.rand()
        return x_BCT + y_BCT


class Net(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module] = Layer, layers: int = 4) -> None:
        super().__init__()
        self.first, self.layers = nn.Conv1d(8, 8, 1), nn.ModuleList([layer() for _ in range(layers)])

    def forward(self, x_BCT: Tensor) -> Tensor:
        x_BCT = self.first(x_BCT)
        for layer in self.layers:
            x_BCT = layer(x_BCT)
        return x_BCT


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def trained(net: nn.Module, *, bf16: bool = False, backwards: int = 1) -> tuple[str, tuple[float, ...]]:
    """The digest of gradients and buffers after five steps, and the next random numbers."""
    for _ in range(5):
        seed()
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = net(torch.randn(4, 8, 16)).float().square().mean()
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)
    state = {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}
    return digest(state | dict(net.named_buffers())), (random.random(), np.random.rand(), float(torch.rand(())))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("mode", MODES[1:], ids=str)
def test_no_mode_moves_a_bit(mode: Any, bf16: bool) -> None:
    seed()
    net = Net()
    expected = trained(copy.deepcopy(net), bf16=bf16)
    keys = list(net.state_dict())
    recompute(net, mode)
    assert list(net.state_dict()) == keys
    assert trained(net, bf16=bf16) == expected


def test_a_weight_used_in_two_blocks_in_bf16() -> None:
    """Autocast's cache of weights would add the gradients of both uses up in bf16, unless one is recomputed."""
    seed()
    net = nn.Sequential(*[mlp() for _ in range(3)])
    net.get_submodule("2.0").register_parameter("weight", net.get_submodule("0.0").get_parameter("weight"))
    x_BF = torch.randn(16, 4)

    def gradients(mode: str) -> str:
        recompute(net, mode)
        net.zero_grad()
        with autocast("bf16", torch.device("cpu")):
            loss = net(x_BF).float().square().sum()
        loss.backward()
        return digest({name: p.grad for name, p in net.named_parameters() if p.grad is not None})

    assert gradients("none") == gradients("all") == gradients("every:2") == gradients("selective")


def test_a_second_backward_through_the_same_graph() -> None:
    seed()
    net = Net()
    expected = trained(copy.deepcopy(net), backwards=2)
    recompute(net, "all")
    assert trained(net, backwards=2) == expected


def test_modes_choose_and_free_what_they_say() -> None:
    net = Net(layers=5)
    chosen = {str(mode): [path for path, level in recompute(net, mode).items() if level != "keep"] for mode in MODES}
    assert chosen == {
        "none": [],
        "all": [f"layers.{n}" for n in range(5)],
        "selective": [f"layers.{n}" for n in range(5)],
        "every:2": ["layers.0", "layers.2", "layers.4"],
        "every:3": ["layers.0", "layers.3"],
        "['layers.1']": ["layers.1"],
        "{'layers.*': 'selective'}": [f"layers.{n}" for n in range(5)],
    }
    packed = {}
    for mode in MODES[:4]:
        recompute(net, mode)
        packed[mode] = saved_bytes(lambda: net(torch.randn(4, 8, 16))).packed
    assert packed["none"] > packed["every:2"] > packed["all"]
    recompute(net, "none")
    assert get_levels(net) == {}
    assert saved_bytes(lambda: net(torch.randn(4, 8, 16))).packed == packed["none"]


def test_selective_keeps_products_and_recomputes_the_rest() -> None:
    net = nn.Sequential(*[mlp() for _ in range(3)])
    x_BF = torch.randn(32, 4, requires_grad=True)

    def products(mode: str) -> int:
        recompute(net, mode)
        with FlopCounterMode(display=False) as counter:
            net(x_BF).sum().backward()
        flops: int = counter.get_total_flops()
        return flops

    assert products("selective") == products("none")
    assert products("all") > products("none")


def test_nothing_is_recomputed_without_gradients() -> None:
    calls = []
    net = Net()
    net.layers[0].register_forward_hook(lambda *_: calls.append(1))
    recompute(net, "all")
    with torch.no_grad():
        net(torch.randn(4, 8, 16))
    assert len(calls) == 1


class Counter(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x_BCT: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x_BCT) * self.calls


class InPlace(nn.Module):
    """Changes in place what it computed: well, unless that is kept selectively."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x_BCT: Tensor) -> Tensor:
        y_BCT: Tensor = self.linear(x_BCT)
        return y_BCT.relu_()


class PreActivation(InPlace):
    """Changes its input in place: well, unless that is needed again."""

    def forward(self, x_BCT: Tensor) -> Tensor:
        y_BCT: Tensor = self.linear(x_BCT.relu_())
        return y_BCT


class Codebook(Layer):
    """Reads a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x_BCT: Tensor) -> Tensor:
        y_BCT = super().forward(x_BCT) * self.get_buffer("scale").clone()
        self.get_buffer("scale").mul_(0.9)
        return y_BCT


class ChangesItsInput(Layer):
    def forward(self, x_BCT: Tensor) -> Tensor:
        y_BCT = super().forward(x_BCT.clone())
        x_BCT.data.add_(1)
        return y_BCT


class SavesMore(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x_BCT: Tensor) -> Tensor:
        self.calls += 1
        y_BCT = super().forward(x_BCT)
        return y_BCT if self.calls == 1 else y_BCT.sin().exp()


class Strays(Layer):
    """As it should be, until its fourth forward."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def forward(self, x_BCT: Tensor) -> Tensor:
        late = next(self.numbers) > 6
        return super().forward(x_BCT) * (1 + late * next(self.numbers))


@pytest.mark.parametrize("layer", [Counter, Codebook, ChangesItsInput, SavesMore, Strays])
@pytest.mark.parametrize("level", ["full", "selective"])
def test_a_block_that_gives_something_else_the_second_time_is_refused(layer: Any, level: str) -> None:
    net = Net(layer)
    recompute(net, {"layers.2": level})
    with pytest.raises(UsageError, match=r"cannot recompute block layers\.2") as caught:
        trained(net)
    assert f"{layer.__name__}.forward" in str(caught.value)


def test_what_a_block_changes_in_place() -> None:
    seed()
    net = Net(InPlace)
    expected = trained(copy.deepcopy(net))
    recompute(net, "all")
    assert trained(net) == expected
    recompute(net, "selective")
    with pytest.raises(UsageError, match=r"cannot recompute block layers\.3: found a change in place of what"):
        trained(net)
    profiled = fit(net, lambda: net(torch.randn(4, 8, 16)).square().mean(), "1MiB").profile
    assert [[option.level for option in block.options] for block in profiled.blocks] == [["keep", "full"]] * 4
    net = Net(PreActivation)
    trained(net)
    recompute(net, "all")
    with pytest.raises(UsageError, match=r"cannot recompute block layers\.0: found an input that its forward changes"):
        trained(net)


class Lazy(nn.Module):
    """Makes a mask at its first forward, and counts its calls, in a list too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mlp() for _ in range(4)])
        self.mask: Tensor | None = None
        self.calls, self.seen = 0, [0]

    def forward(self, x_BF: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        if self.mask is None:
            self.mask = torch.ones(4)
        for layer in self.layers:
            x_BF = layer(x_BF)
        return x_BF * self.mask * self.calls


@pytest.mark.parametrize("numbers", [False, True])
def test_fitting_leaves_a_model_as_it_was(numbers: bool) -> None:
    net, taken = Lazy(), list[Any]()
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(taken.append)
    state = torch.get_rng_state()

    def step() -> Tensor:
        loss: Tensor = net(torch.randn(64, 4)).square().mean()
        if numbers:  # it cannot run on shapes alone
            loss.item()
        return loss

    roomy = fit(net, step, "1GiB")
    tight = fit(net, step, roomy.unfitted - 1)
    assert "full" in {*tight.levels.values()}
    assert (net.mask, net.calls, net.seen) == (None, 0, [0])
    assert torch.equal(torch.get_rng_state(), state)
    assert numbers or not taken
    assert all(parameter.grad is None for parameter in net.parameters())
    with pytest.raises(ConfigError, match=r"cannot fit a micro-batch: found a budget of 4\.00 KiB, need at least"):
        fit(net, step, "4KiB")
    step().backward()


def test_a_shared_layer_and_a_model_compiled_as_a_whole() -> None:
    net = Net()
    net.first_again = net.layers[0]
    shared = nn.Sequential(net.layers[0], net)
    assert list(find_blocks(shared)) == ["0", "1.layers.1", "1.layers.2", "1.layers.3"]
    recompute(shared, "all")
    assert len(get_levels(shared)) == 4
    with pytest.raises(ConfigError, match=r"no module 'layers\.7'"):
        set_levels(net, {"layers.7": "full"})
    net.compile(backend="eager")
    with pytest.raises(ConfigError, match="inside of Net, which is compiled as a whole"):
        recompute(net, "all")


# Dynamo asks a tensor that is no leaf for its gradient, and silences its own warning only where warnings print.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_blocks_compiled_one_by_one_are_recomputed_around_their_compiled_call() -> None:
    config = GPTConfig(vocabulary=17, context=8, width=16, layers=2, heads=2, kv_heads=1, hidden=32)
    model = GPT(config)
    for block in model.blocks:
        block.compile(backend="eager")
    with pytest.raises(ConfigError, match="selectively"):
        recompute(model, "selective")
    recompute(model, "all")
    assert set(get_levels(model)) == {"blocks.0", "blocks.1"}
    model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
    recompute(model, "none")
    assert all(block._compiled_call_impl is not None for block in model.blocks)


def mlp(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 4))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4)


def test_blocks_are_found_in_any_tree() -> None:
    assert list(find_blocks(nn.Sequential(*[mlp() for _ in range(3)]))) == ["0", "1", "2"]
    assert list(find_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))) == []  # single operators
    assert list(find_blocks(mlp())) == []
    stages = nn.Sequential(*[nn.Sequential(Residual(), Residual()) for _ in range(2)])  # as in a ResNet
    assert list(find_blocks(stages)) == ["0.0", "0.1", "1.0", "1.1"]
    lists = nn.ModuleDict({"encoder": nn.ModuleList([Residual(), Residual()]), "head": mlp()})
    assert list(find_blocks(lists)) == ["encoder.0", "encoder.1"]
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    assert list(find_blocks(encoder)) == ["layers.0", "layers.1", "layers.2"]
    shared = Residual()
    assert list(find_blocks(nn.ModuleList([shared, shared, Residual()]))) == ["0", "2"]


@pytest.mark.parametrize(
    ("mode", "found"),
    [
        ("everything", "'everything'"),
        ("every:0", "'every:0'"),
        ("auto", "'auto'"),
        (["layer.1"], r"Did you mean .layers\.1"),
        (["layers"], "which has no forward"),
        ({"layers.1": "half"}, "'half'"),
    ],
    ids=str,
)
def test_what_is_not_there_is_refused(mode: Any, found: str) -> None:
    net = Net()
    with pytest.raises(ConfigError, match=found):
        recompute(net, mode)
    assert get_levels(net) == {}


def test_a_model_without_blocks_is_refused_unless_they_are_named() -> None:
    with pytest.raises(ConfigError, match="no repeated blocks in Sequential"):
        recompute(mlp(), "all")
    assert recompute(mlp(), ["0"]) == {"0": "full"}


def test_a_copy_and_a_pickle_do_without() -> None:
    net = Net()
    set_levels(net, {"layers.0": "full"})
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert get_levels(other) == {}
    assert get_levels(net) == {"layers.0": "full"}
