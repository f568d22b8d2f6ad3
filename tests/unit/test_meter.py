"""What autograd keeps for backward: as a plain hook counts it, as memory holds it, and module by module."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError
from paceline.memory import recompute, saved_bytes
from paceline.memory.live import shapes_only

KIB, MIB = 2**10, 2**20


@pytest.fixture(scope="module")
def blocks() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256)) for _ in range(12)]


# By hand, of one block. The first Linear keeps its input (8 x 128 x 256 floats, 1 MiB) and its weight (1 MiB), GELU its
# input (4 MiB), the second Linear its input (4 MiB) and its weight (1 MiB), LayerNorm its input (1 MiB), a mean and a
# deviation of each row (4 KiB each), its weight and its bias (1 KiB each). A Linear needs its weight for the gradient
# of its input alone: the very first one keeps none. A recomputed block keeps its input, 1 MiB. Nothing is there twice:
# what a LayerNorm returns is kept by the next block only.
INPUT, INSIDES = 1 * MIB, 10 * MIB + 8 * KIB
WEIGHTS = 2 * MIB + 2 * KIB


@pytest.mark.parametrize(
    ("recomputed", "packed", "packed_mib", "held", "held_mib"),
    [
        pytest.param(lambda number: False, 12 * (INSIDES + WEIGHTS) - 1 * MIB, 143.1, 12 * INSIDES, 120.1, id="none"),
        pytest.param(lambda number: True, 12 * INPUT, 12.0, 12 * INPUT, 12.0, id="all"),
        pytest.param(
            lambda number: number % 2 == 0,
            6 * (INPUT + INSIDES + WEIGHTS),
            78.1,
            6 * (INPUT + INSIDES),
            66.0,
            id="every other",
        ),
    ],
)
def test_twelve_blocks(
    blocks: list[nn.Module],
    recomputed: Callable[[int], bool],
    packed: int,
    packed_mib: float,
    held: int,
    held_mib: float,
) -> None:
    x_BTF = torch.randn(8, 128, 256)

    def forward() -> Tensor:
        h_BTF = x_BTF
        for number, block in enumerate(blocks):
            h_BTF = checkpoint(block, h_BTF, use_reentrant=False) if recomputed(number) else block(h_BTF)
        return h_BTF

    saved = saved_bytes(forward)
    assert (saved.packed, saved.held) == (packed, held)
    assert (round(packed / MIB, 1), round(held / MIB, 1)) == (packed_mib, held_mib)


def test_by_block_the_same_whether_recomputed_by_hand_or_by_name(blocks: list[nn.Module]) -> None:
    model = nn.Sequential(*blocks)
    recompute(model, "every:2")
    try:
        with shapes_only(model):
            x_BTF = torch.randn(8, 128, 256)
            saved = saved_bytes(lambda: model(x_BTF), model)
    finally:
        recompute(model, "none")
    parts = [saved.modules[str(number)] for number in range(12)]
    assert [part.held for part in parts] == 6 * [INPUT, INSIDES]
    assert [part.packed for part in parts] == 6 * [INPUT, INSIDES + WEIGHTS]
    assert saved.modules["1.1"].held == 4 * MIB
    assert saved.modules["0.1"].held == 0
    assert (saved.modules[""].packed, saved.modules[""].held) == (saved.packed, saved.held)
    assert (saved.packed, saved.held) == (6 * (INPUT + INSIDES + WEIGHTS), 6 * (INPUT + INSIDES))


def test_weights_and_repeats_count_each_time() -> None:
    weight, x_BF = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    assert saved_bytes(lambda: x_BF @ weight.T).packed == 4 * (4 * 3 + 5 * 3)
    assert saved_bytes(lambda: [x_BF @ weight.T for _ in range(3)]).packed == 3 * 4 * (4 * 3 + 5 * 3)
    assert saved_bytes(lambda: x_BF * x_BF).packed == 2 * 4 * 5 * 3


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes_are_those_of_the_dtype(dtype: torch.dtype, size: int) -> None:
    x = torch.randn(7, dtype=dtype, requires_grad=True)
    assert saved_bytes(x.exp).packed == 7 * size


def test_what_needs_no_gradient_saves_nothing() -> None:
    layer, x_BF = nn.Linear(3, 3), torch.randn(5, 3)

    def without() -> None:
        with torch.no_grad():
            layer(x_BF)

    assert saved_bytes(without).packed == 0
    assert saved_bytes(lambda: x_BF.exp() * x_BF).packed == 0


def test_each_call_counts_anew_and_an_outer_one_counts_what_inner_ones_do() -> None:
    x = torch.randn(10, requires_grad=True)
    inner: list[int] = []

    def nested() -> None:
        x.exp()
        inner.append(saved_bytes(x.exp).packed)

    assert saved_bytes(nested).packed == 80
    assert saved_bytes(lambda: saved_bytes(nested)).packed == 80
    assert inner == [40, 40]


def test_an_error_in_an_inner_call_leaves_the_outer_one_on() -> None:
    x = torch.randn(10, requires_grad=True)

    def nested() -> None:
        with pytest.raises(RuntimeError, match="size"):
            saved_bytes(lambda: x.exp() + torch.zeros(3))
        x.exp()

    assert saved_bytes(nested).packed == 80
    assert saved_bytes(x.exp).packed == 40


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((None,), "a NoneType in place of a function"),
        ((torch.zeros(3),), "a Tensor in place of a function"),
        ((nn.Linear(3, 3),), "a function that needs input"),
        ((lambda x, *, y, z=0: x,), "a function that needs x, y"),
        ((lambda: None, "model"), "a model of type str"),
        ((lambda: None, [nn.Linear(3, 3)]), "a model of type list"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[Any, ...], found: str) -> None:
    with pytest.raises(UsageError, match=f"cannot measure what autograd keeps: found {found}, need a function without"):
        saved_bytes(*arguments)


def test_gradients_inside_are_those_without_the_meter() -> None:
    """Backward may run in ``fn``: what was packed comes back as it was, recomputed parts too."""
    torch.manual_seed(0)
    first, second = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x_BF = torch.randn(6, 4)

    def step() -> None:
        torch.manual_seed(1)
        second(checkpoint(first, x_BF, use_reentrant=False)).square().sum().backward()

    step()
    expected = [parameter.grad for parameter in [*first.parameters(), *second.parameters()]]
    first.zero_grad()
    second.zero_grad()
    assert saved_bytes(step).packed > 0
    for parameter, grad in zip([*first.parameters(), *second.parameters()], expected, strict=True):
        assert parameter.grad is not None and grad is not None
        assert torch.equal(parameter.grad, grad)


def test_nothing_stays_when_fn_has_ended() -> None:
    """Not even an operator's own output, which refers to the node that saved it."""
    kept: list[weakref.ref[Tensor]] = []

    def forward() -> None:
        y = torch.randn(3, requires_grad=True).tanh()
        kept.append(weakref.ref(y))

    gc.disable()
    try:
        saved_bytes(forward)
        assert kept[0]() is None
    finally:
        gc.enable()


def test_an_error_in_fn_takes_the_hooks_off() -> None:
    packed: list[int] = []

    def fail() -> None:
        raise ValueError("mine")

    def pack(tensor: Tensor) -> Tensor:
        packed.append(1)
        return tensor.detach()

    with pytest.raises(ValueError, match="mine"):
        saved_bytes(fail)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.randn(3, requires_grad=True).exp()
    assert packed == [1]


# Held: storages, each once.


def test_a_storage_is_held_once_however_many_look_into_it() -> None:
    x_BF = torch.randn(6, 4, requires_grad=True)
    assert saved_bytes(lambda: [x_BF.square(), x_BF.T.square(), x_BF.view(-1).square()]).held == x_BF.nbytes
    assert saved_bytes(lambda: [part.square() for part in x_BF.split(2)]).held == x_BF.nbytes


def test_a_view_holds_the_whole_that_it_looks_into() -> None:
    x_BF = torch.randn(6, 4, requires_grad=True)
    saved = saved_bytes(x_BF[1].square)
    assert (saved.packed, saved.held) == (16, x_BF.nbytes)


def test_an_address_that_is_used_again_is_another_storage() -> None:
    x = torch.randn(5000, requires_grad=True)
    addresses: set[int] = set()

    def forward() -> None:
        for _ in range(10):
            addresses.add(x.exp().data_ptr())  # exp keeps what it returns, until here

    assert saved_bytes(forward).held == 10 * x.nbytes
    assert len(addresses) < 10


def test_parameters_are_not_held_and_buffers_of_the_model_neither() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight_FF = nn.Parameter(torch.randn(4, 4))
            self.scale_F = nn.Buffer(torch.randn(4))

        def forward(self, x_BF: Tensor) -> Tensor:
            y_BF: Tensor = (x_BF @ self.weight_FF.T[:, :4]) * self.scale_F
            return y_BF * self.weight_FF.detach()[0]

    model, x_BF = Scaled(), torch.randn(6, 4, requires_grad=True)
    alone, known = saved_bytes(lambda: model(x_BF)), saved_bytes(lambda: model(x_BF), model)
    assert alone.packed == known.packed == 4 * (6 * 4 + 4 * 4 + 4 + 4)
    assert known.held == x_BF.nbytes
    assert alone.held == x_BF.nbytes + 4 * 4  # the buffer


def test_inputs_that_want_a_gradient_are_held() -> None:
    weight_FF, x_BF = torch.randn(4, 4, requires_grad=True), torch.randn(6, 4)
    assert saved_bytes(lambda: x_BF @ weight_FF).held == x_BF.nbytes
    assert saved_bytes(lambda: (x_BF @ weight_FF) @ weight_FF).held == 2 * x_BF.nbytes + weight_FF.nbytes


def test_copies_that_autocast_makes_of_weights_are_held() -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y_BF: Tensor = second(second(first(torch.randn(4, 8))))
            return y_BF

    model = nn.ModuleList([first, second])
    saved = saved_bytes(forward, model)
    assert saved.held == 3 * 2 * 4 * 8 + 2 * 8 * 8  # three inputs, one weight, used twice
    assert saved.packed == 3 * 2 * 4 * 8 + 2 * 2 * 8 * 8


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_tensor_is_what_it_is_made_of(layout: torch.layout) -> None:
    ones, diagonal, starts = torch.ones(100), torch.arange(100), torch.arange(101)
    size = (100, 100)
    if layout is torch.sparse_coo:
        both = torch.stack([diagonal, diagonal])
        sparse_BF, indices = torch.sparse_coo_tensor(both, ones, size, check_invariants=True), both.numel()
    else:
        sparse_BF = torch.sparse_compressed_tensor(starts, diagonal, ones, size, layout=layout, check_invariants=True)
        indices = starts.numel() + diagonal.numel()
    weight_FG = nn.Parameter(torch.randn(100, 2))
    saved = saved_bytes(lambda: torch.sparse.mm(sparse_BF, weight_FG))
    assert (saved.packed, saved.held) == (100 * 4 + indices * 8,) * 2


def test_on_shapes_alone_the_bytes_are_the_same() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
    real = saved_bytes(lambda: model(torch.zeros(4, 8)), model)
    with shapes_only(model):
        assert saved_bytes(lambda: model(torch.zeros(4, 8)), model) == real
    assert real.held > 0


# By module.


class Tree(nn.Module):
    """Branches in a list, and one layer that all of them call."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.branches = nn.ModuleList([Branch(self.shared) for _ in range(2)])

    def forward(self, x_BF: Tensor) -> Tensor:
        for branch in self.branches:
            x_BF = branch(x_BF)
        return x_BF.exp()


class Branch(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.act = shared, nn.Tanh()

    def forward(self, x_BF: Tensor) -> Tensor:
        y_BF: Tensor = self.shared(x_BF)
        acted_BF: Tensor = checkpoint(self.act, y_BF, use_reentrant=False)
        return x_BF + acted_BF.sin()


def test_each_module_has_what_was_packed_while_it_ran() -> None:
    """Of 1 unit each: of a branch the input of the shared layer, and of the checkpointed Tanh, and what sin keeps."""
    model, x_BF = Tree(), torch.randn(5, 4)
    unit, weight = x_BF.nbytes, 4 * 4 * 4
    saved = saved_bytes(lambda: model(x_BF), model)
    assert list(saved.modules) == [path for path, _ in model.named_modules()]
    held = {path: part.held / unit for path, part in saved.modules.items()}
    assert held == {
        "": 7,  # with what exp returned
        "shared": 2,  # by its first path, of both calls
        "branches": 6,  # which is never called
        "branches.0": 3,
        "branches.0.act": 0,
        "branches.1": 3,
        "branches.1.act": 0,
    }
    assert saved.held == 7 * unit
    assert saved.modules["shared"].packed == 2 * unit + weight
    assert saved.modules["branches.1"].packed == 3 * unit + weight


def test_a_storage_belongs_to_the_first_module_that_packs_it() -> None:
    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x_BF: Tensor) -> list[Tensor]:
            return [self.q(x_BF), self.k(x_BF), self.v(x_BF)]

    model, x_BF = Projections(), torch.randn(5, 4)
    saved = saved_bytes(lambda: model(x_BF), model)
    assert {path: part.held for path, part in saved.modules.items()} == {"": 80, "q": 80, "k": 0, "v": 0}
    assert {path: part.packed for path, part in saved.modules.items()} == {"": 240, "q": 80, "k": 80, "v": 80}


def test_parts_are_told_apart_when_the_model_itself_is_not_called() -> None:
    model, x_BF = nn.Sequential(nn.Sequential(nn.Tanh()), nn.Tanh()), torch.randn(5, 4, requires_grad=True)
    saved = saved_bytes(lambda: model[0](x_BF).exp(), model)
    assert {path: part.held for path, part in saved.modules.items()} == {"": 80, "0": 80, "0.0": 80, "1": 0}
    assert saved.held == 160


def test_nested_meters_and_nested_checkpoints() -> None:
    model, x_BF = Tree(), torch.randn(5, 4)
    inner = []

    def nested() -> None:
        inner.append(saved_bytes(lambda: model(x_BF), model))
        checkpoint(model, x_BF, use_reentrant=False)
        model(x_BF)

    outer = saved_bytes(nested, model)
    assert inner[0] == saved_bytes(lambda: model(x_BF), model)
    # The input, of the first call, is that of the checkpoint and of the first shared layer of the third call too.
    assert outer.held == 2 * inner[0].held - x_BF.nbytes
    assert outer.modules[""].held == outer.held


def test_whole_steps_count_once_what_recompute_makes_in_backward_not_at_all() -> None:
    model, x_BF = Tree(), torch.randn(5, 4)
    forward = saved_bytes(lambda: model(x_BF).sum(), model)
    assert saved_bytes(lambda: model(x_BF).sum().backward(), model) == forward


def test_an_error_caught_inside_leaves_the_right_modules_running_and_one_outside_none() -> None:
    class Fails(nn.Module):
        def forward(self, x_BF: Tensor) -> Tensor:
            x_BF.exp()
            raise ValueError("mine")

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.act = Fails(), nn.Tanh()

        def forward(self, x_BF: Tensor) -> Tensor:
            with pytest.raises(ValueError, match="mine"):
                self.fails(x_BF)
            y_BF: Tensor = self.act(x_BF)
            return y_BF

    model, x_BF = Catches(), torch.randn(5, 4, requires_grad=True)
    saved = saved_bytes(lambda: model(x_BF), model)
    assert {path: part.held for path, part in saved.modules.items()} == {"": 160, "fails": 80, "act": 80}
    with pytest.raises(ValueError, match="mine"):
        saved_bytes(lambda: model.fails(x_BF), model)
    assert all(module._compiled_call_impl is None for module in model.modules())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x_BF: Tensor) -> Tensor:
        y_BF: Tensor = self.act(self.linear(x_BF))
        return y_BF


def test_inside_a_compiled_module_nothing_is_touched() -> None:
    model, x_BF = nn.Sequential(Block(), Block()), torch.randn(5, 4)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    model[0].compile(backend=backend)
    model(x_BF)
    compiled = model[0]._compiled_call_impl
    saved = saved_bytes(lambda: model(x_BF), model)
    assert {path: part.held // x_BF.nbytes for path, part in saved.modules.items()} == {
        "": 3,
        "0": 2,
        "1": 1,  # and what it got, which is the first one's
        "1.linear": 0,
        "1.act": 1,
    }
    assert model[0]._compiled_call_impl is compiled
    assert len(graphs) == 1
