"""Recompute: blocks are found in any module tree, no bit moves, and a block that would move one is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.flop_counter import FlopCounterMode

from paceline.config import Execution
from paceline.determinism import autocast, digest
from paceline.errors import ConfigError, UsageError
from paceline.memory import find_blocks, fit, recompute, saved_bytes
from paceline.memory.live import LiveBytes, gradients_in_place
from paceline.memory.recompute import Recomputed, get_levels, set_levels
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
    """Counts its calls, and fills a cache at the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.scale: Tensor | None = None

    def forward(self, x_BCT: Tensor) -> Tensor:
        self.calls += 1
        if self.scale is None:
            self.scale = torch.full((), 0.5)
        return super().forward(x_BCT) * self.calls * self.scale


@pytest.mark.parametrize("level", ["full", "selective"])
def test_plain_attributes_are_in_the_second_forward_what_they_were_in_the_first(level: str) -> None:
    seed()
    net = Net(Counter)
    expected = trained(copy.deepcopy(net))
    recompute(net, {"layers.*": level})
    assert trained(net) == expected
    assert [layer.calls for layer in net.layers] == [5] * 4


@pytest.mark.parametrize("mode", ["all", "selective"])
def test_eval_between_forward_and_backward(mode: str) -> None:
    net = Net()
    digests = []
    for which in ("none", mode):
        recompute(net, which)
        seed()
        net.train().zero_grad()
        loss = net(torch.randn(4, 8, 16)).square().mean()
        net.eval()
        loss.backward()
        assert not any(module.training for module in net.modules())
        digests.append(digest({name: p.grad for name, p in net.named_parameters() if p.grad is not None}))
    assert digests[0] == digests[1]


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
        self.numbers = itertools.count(1)

    def forward(self, x_BCT: Tensor) -> Tensor:
        y_BCT = super().forward(x_BCT)
        return y_BCT if next(self.numbers) == 1 else y_BCT.sin().exp()


class Appends(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x_BCT: Tensor) -> Tensor:
        self.seen.append(1)
        return super().forward(x_BCT) * len(self.seen)


class Strays(Layer):
    """As it should be, until its fourth forward."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def forward(self, x_BCT: Tensor) -> Tensor:
        late = next(self.numbers) > 6
        return super().forward(x_BCT) * (1 + late * next(self.numbers))


@pytest.mark.parametrize("layer", [Appends, Codebook, ChangesItsInput, SavesMore, Strays])
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


def between(change: str, net: nn.Sequential) -> None:
    """What a loop may do between forward and backward."""
    weights = list(net[1].parameters())
    match change:
        case "sgd" | "fused" | "foreach":
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            torch.optim.SGD(weights, lr=1.0, fused=change == "fused", foreach=change == "foreach").step()
        case "swap":
            net.get_submodule("1.0").register_parameter("weight", nn.Parameter(torch.ones(8, 4)))
        case "in place":
            with torch.no_grad():
                weights[0].mul_(0.9)
        case "buffer":
            net.get_buffer("1.scale").mul_(0.9)
        case "other buffer":
            net[1].register_buffer("scale", torch.zeros(()))


class Through(nn.Sequential):
    """A sequence that subclasses may do more than."""

    def through(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class Scaled(Through):
    def __init__(self) -> None:
        super().__init__(*mlp().children())
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x_BF: Tensor) -> Tensor:
        return self.through(x_BF) * self.get_buffer("scale").clone()


@pytest.mark.parametrize("mode", ["all", "selective"])
@pytest.mark.parametrize("change", ["sgd", "fused", "foreach", "swap", "in place", "buffer", "other buffer"])
def test_what_changes_between_forward_and_backward_is_refused_in_every_call(mode: str, change: str) -> None:
    net = nn.Sequential(Scaled(), Scaled(), Scaled())
    recompute(net, mode)
    for _ in range(2):  # the third call's output is not compared
        net(torch.randn(8, 4)).sum().backward()
    loss = net(torch.randn(8, 4)).sum()
    between(change, net)
    with pytest.raises(UsageError, match=r"cannot recompute block 1: found .*(weight|buffer)"):
        loss.backward()


@pytest.mark.parametrize("mode", ["all", "selective"])
def test_other_weights_by_a_functional_call(mode: str) -> None:
    net = nn.Sequential(mlp(), mlp())
    recompute(net, mode)
    other = {name: (2 * weight).detach().requires_grad_() for name, weight in net.named_parameters()}
    x_BF = torch.randn(8, 4)
    loss = torch.func.functional_call(net, other, (x_BF,)).sum()
    with pytest.raises(UsageError, match=r"block 1: found other weights .* as by torch\.func\.functional_call"):
        loss.backward()

    def gradients() -> Tensor:
        loss = net(x_BF).sum()
        return torch.autograd.grad(loss, other["0.0.weight"])[0]

    class Inside(nn.Module):  # the backward inside of the call
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self) -> Tensor:
            return gradients()

    named = {f"net.{name}": weight for name, weight in other.items()}
    found = torch.func.functional_call(Inside(), named, ())
    recompute(net, "none")
    assert torch.equal(found, torch.func.functional_call(Inside(), named, ()))


class ChangesItsWeight(Layer):
    def forward(self, x_BCT: Tensor) -> Tensor:
        with torch.no_grad():
            self.norm.weight.mul_(0.9)
        return super().forward(x_BCT)


@pytest.mark.parametrize("mode", ["all", "selective"])
def test_a_block_that_changes_its_own_weight(mode: str) -> None:
    net = Net(ChangesItsWeight)
    recompute(net, mode)
    with pytest.raises(UsageError, match=r"layers\.0: found a weight that its forward changes, norm\.weight"):
        net(torch.randn(4, 8, 16))


class Passing(Layer):
    """Hands things on in a dict, as models with caches and several streams do."""

    def forward(self, x_BCT: Tensor, box: dict[str, Any]) -> Tensor:  # type: ignore[override]
        y_BCT: Tensor = super().forward(x_BCT) * box["scales"][0]
        if "changes" in box:
            box["scales"][0] = box["scales"][0] * 2
        if "appends" in box:
            box["scales"].append(1)
        return y_BCT


@pytest.mark.parametrize("mode", ["all", "selective"])
@pytest.mark.parametrize("box", [{"changes": 1, "scales": [1.0]}, {"appends": 1, "scales": [1.0]}], ids=str)
def test_a_container_that_a_block_changes(mode: str, box: dict[str, Any]) -> None:
    net = nn.ModuleList([Passing(), Passing()])
    recompute(net, mode)
    for layer in net:  # calls whose output is not compared
        cast(Recomputed, layer._compiled_call_impl)._calls = 2
    with pytest.raises(UsageError, match="a list or dict among its inputs whose contents its forward changes"):
        net[0](torch.randn(4, 8, 16), box=copy.deepcopy(box))


@pytest.mark.parametrize("mode", ["all", "selective"])
def test_a_container_that_changes_before_the_backward(mode: str) -> None:
    net = nn.ModuleList([Passing(), Passing()])
    recompute(net, mode)
    x_BCT, boxes = torch.randn(4, 8, 16), [{"scales": [torch.ones(1)]} for _ in range(3)]
    first, second, third = (net[0](x_BCT, box).sum() for box in boxes)
    boxes[0]["scales"][0] = torch.zeros(1)
    boxes[1]["scales"][0].mul_(2)
    for loss in (first, second):
        with pytest.raises(UsageError, match="a list or dict among its inputs that was changed between"):
            loss.backward()
    third.backward()


def test_a_second_backward_through_what_selective_keeps_is_refused() -> None:
    net = nn.Sequential(mlp(), mlp())
    recompute(net, "selective")
    loss = net(torch.randn(8, 4)).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match=r"block 1: found a second backward .* \(retain_graph or create_graph"):
        loss.backward()


def test_a_penalty_on_a_gradient() -> None:
    net = nn.Sequential(mlp(), mlp())

    def gradients(mode: str) -> str:
        recompute(net, mode)
        net.zero_grad()
        x_BF = torch.linspace(-1, 1, 32).view(8, 4).requires_grad_()
        (slope_BF,) = torch.autograd.grad(net(x_BF).sum(), x_BF, create_graph=True)
        (slope_BF.norm(dim=1) - 1).square().mean().backward()
        return digest({name: p.grad for name, p in net.named_parameters() if p.grad is not None})

    assert gradients("none") == gradients("all") == gradients("every:2")
    with pytest.raises(UsageError, match="block 1: found a second backward"):
        gradients("selective")


class Conservative(nn.Module):
    """Returns the gradient of what it computes, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()

    def forward(self, x_BF: Tensor) -> Tensor:
        at_BF = x_BF if x_BF.requires_grad else x_BF.detach().requires_grad_()
        (y_BF,) = torch.autograd.grad(self.inside(at_BF).square().sum(), at_BF, create_graph=True)
        return x_BF + y_BF


def test_a_block_that_takes_a_gradient_itself() -> None:
    net = nn.Sequential(Conservative(), Conservative())

    def gradients(mode: str) -> str:
        recompute(net, mode)
        net.zero_grad()
        net(torch.linspace(-1, 1, 32).view(8, 4)).square().sum().backward()
        return digest({name: p.grad for name, p in net.named_parameters() if p.grad is not None})

    assert gradients("none") == gradients("all")
    with pytest.raises(UsageError, match="cannot recompute block"):
        gradients("selective")


@pytest.mark.parametrize("mode", ["all", "selective"])
def test_transformations_of_torch_func_and_tracing(mode: str) -> None:
    net = nn.Sequential(mlp(), mlp())
    recompute(net, mode)
    x_BF, weights = torch.randn(8, 4), {name: weight.detach() for name, weight in net.named_parameters()}

    def called(at: dict[str, Tensor]) -> Tensor:
        returned: Tensor = torch.func.functional_call(net, at, (x_BF,))
        return returned.sum()

    takes_gradient: Callable[..., Any] = torch.func.grad(called)
    vectorized: Callable[..., Any] = torch.func.vmap(net)
    for transformed, given in ((takes_gradient, weights), (vectorized, x_BF)):
        with pytest.raises(UsageError, match="cannot recompute block 0: found a transformation by torch"):
            transformed(given)
    with torch.no_grad():
        assert torch.func.vmap(net)(x_BF).shape == x_BF.shape


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
    assert {*tight.levels.values()} != {"keep"}
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


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
def test_parametrized_blocks_are_found(norm: Callable[[nn.Module], nn.Module]) -> None:
    def block() -> nn.Module:
        return nn.Sequential(norm(nn.Linear(4, 8)), nn.GELU(), norm(nn.Linear(8, 4)))

    net = nn.Sequential(*[block() for _ in range(3)])
    assert list(find_blocks(net)) == ["0", "1", "2"]
    assert list(find_blocks(nn.Sequential(*[norm(nn.Linear(4, 4)) for _ in range(3)]))) == []  # single operators
    assert list(find_blocks(nn.Sequential(*[norm(Inside()) for _ in range(3)]))) == ["0", "1", "2"]
    if norm is spectral_norm:
        net.eval()  # in training it reads buffers that it changes
    x_BF, digests = torch.randn(8, 4), []
    for mode in ("none", "all", "selective"):
        recompute(net, mode)
        net.zero_grad()
        net(x_BF).square().sum().backward()
        digests.append(digest({name: p.grad for name, p in net.named_parameters() if p.grad is not None}))
    assert digests[1:] == digests[:1] * 2
    if norm is spectral_norm:
        with pytest.raises(UsageError, match="cannot recompute block"):
            recompute(net.train(), "all") and net(x_BF).sum().backward()


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inside = nn.Parameter(torch.ones(4, 4)), nn.Linear(4, 4)


def test_an_unknown_block_of_many_lists_a_few() -> None:
    net = nn.Sequential(*[mlp() for _ in range(200)])
    with pytest.raises(ConfigError) as caught:
        recompute(net, ["encoder"])
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("mode", "fix"),
    [("[blocks.0]", "write [blocks.0]."), ("blocks.0", "write [blocks.0]."), ("[encoder]", "write [encoder].")],
)
def test_names_without_a_list_in_the_settings(mode: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Execution(recompute=mode)
    assert str(caught.value).endswith(fix)
    with pytest.raises(ConfigError, match="Did you mean 'all'"):
        Execution(recompute="ALL")


@pytest.mark.parametrize(
    ("mode", "found"),
    [
        ("everything", "'everything'"),
        ("every:0", "'every:0'"),
        ("auto", "'auto'"),
        (["layer.1"], r"Did you mean .layers\.1"),
        (["layers"], "which has no forward"),
        ({"layers.1": "half"}, "'half'"),
        ({"layers.1": 1}, "found 1, need keep or selective or full"),
        ("ALL", "Did you mean 'all'"),
        (None, "found None, need none, all"),
        (3, "found 3, need none, all"),
        ([3], r"found \[3\], need none, all"),
        ({1: "full"}, "need none, all"),
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


def gradient_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


class Strange(Through):
    """Takes something from elsewhere, and hides it behind a product, which selective recompute keeps."""

    def __init__(self, kind: str) -> None:
        super().__init__(*mlp().children())
        self.kind, self.seen = kind, [0]
        self.count = torch.zeros(())
        self.torchs, self.numpys = torch.Generator().manual_seed(0), np.random.default_rng(0)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x_BF: Tensor) -> Tensor:
        scale = torch.ones(())
        match self.kind:
            case "a generator":
                scale = torch.rand((), generator=self.torchs)
            case "numpy's generator":
                scale = torch.tensor(self.numpys.random(dtype=np.float32))
            case "a list":
                self.seen.append(len(self.seen))
                scale = scale * len(self.seen)
            case "a tensor":
                self.count = self.count + 1
                scale = self.count
            case "a buffer":
                scale = self.get_buffer("scale").clone()
                self.get_buffer("scale").mul_(0.5)
        return self.through(x_BF * scale)


@pytest.mark.parametrize("mode", ["all", "selective"])
@pytest.mark.parametrize("kind", ["a generator", "numpy's generator", "a list", "a tensor", "a buffer"])
def test_what_is_kept_does_not_hide_what_is_not(mode: str, kind: str) -> None:
    net = nn.Sequential(Strange(kind), Strange(kind))
    recompute(net, mode)
    loss = net(torch.ones(8, 4)).sum()
    with pytest.raises(UsageError, match="cannot recompute block 1: found another output"):
        loss.backward()


class Sometimes(Through):
    """Reads a buffer, and changes it in every third call."""

    def __init__(self) -> None:
        super().__init__(*mlp().children())
        self.calls = 0
        self.register_buffer("codebook", torch.ones(()))

    def forward(self, x_BF: Tensor) -> Tensor:
        y_BF = self.through(x_BF) * self.get_buffer("codebook").clone()
        self.calls += 1
        if self.calls % 3 == 0:
            self.get_buffer("codebook").mul_(0.5)
        return y_BF


@pytest.mark.parametrize("mode", ["all", "selective"])
def test_a_buffer_that_changes_in_some_calls_only(mode: str) -> None:
    net = nn.Sequential(Sometimes(), Sometimes())
    recompute(net, mode)
    for _ in range(2):
        net(torch.ones(8, 4)).sum().backward()
    with pytest.raises(UsageError, match="found a buffer that its forward changes in some calls only, codebook"):
        net(torch.ones(8, 4))


def test_batch_norm_may_begin_to_train_at_any_time() -> None:
    digests = []
    for mode in ("none", "all", "selective"):
        net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
        torch.nn.init.ones_(net.get_submodule("0.0").get_parameter("weight"))
        net.load_state_dict({name: torch.ones_like(at) for name, at in net.state_dict().items()})
        recompute(net, mode)
        for call in range(1, 7):
            net.train(call >= 3)
            net(torch.linspace(-1, 1, 32).view(8, 4)).square().sum().backward()
        digests.append(digest({**net.state_dict(), "gradient": gradient_of(net.get_parameter("0.0.weight"))}))
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.parametrize("mode", ["all", "selective"])
def test_weights_that_train_only_in_backward(mode: str) -> None:
    """As a GAN's discriminator, frozen while the generator's loss is computed."""

    def gradients(mode: str) -> str:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2)))
        recompute(net, mode)
        x_BF = torch.linspace(-1, 1, 256).view(16, 16).requires_grad_()
        for _ in range(5):
            net.requires_grad_(False)
            loss = net(x_BF).square().sum()
            net.requires_grad_(True)
            loss.backward()
            assert all(weight.grad is None and weight.requires_grad for weight in net.parameters())
        return digest({"x": gradient_of(x_BF)})

    assert gradients(mode) == gradients("none")


class Auxiliary(Through):
    """Leaves a second loss on itself, as mixtures of experts do."""

    def forward(self, x_BF: Tensor) -> Tensor:
        y_BF = self.through(x_BF)
        self.auxiliary = y_BF.square().mean()
        return y_BF


def test_what_the_second_forward_leaves_behind_is_dropped() -> None:
    def most(mode: str) -> list[int]:
        net = nn.Sequential(*(Auxiliary(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(4)))
        recompute(net, mode)
        peaks = []
        for _ in range(3):
            with gradients_in_place(net), LiveBytes() as live:
                loss = net(torch.ones(256, 64)).sum()
                for part in net:
                    loss = loss + cast(Tensor, part.auxiliary)
                loss.backward()
            peaks.append(live.peak)
        return peaks

    assert max(most("all")) < 0.6 * min(most("none"))


def test_a_large_buffer_that_is_only_read_is_not_copied() -> None:
    class Masked(Through):
        def __init__(self) -> None:
            super().__init__(*mlp().children())
            self.register_buffer("mask", torch.ones(2**20))

        def forward(self, x_BF: Tensor) -> Tensor:
            return self.through(x_BF) * self.get_buffer("mask")[:4]

    net = nn.Sequential(Masked(), Masked())
    recompute(net, "all")
    with LiveBytes() as live:
        net(torch.ones(8, 4)).sum().backward()
    assert live.peak < 2**20
