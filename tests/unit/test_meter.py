"""Bytes that autograd packs for backward: what a plain hook counts, weights and repeats included."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.memory import saved_bytes

MIB = 2**20


@pytest.fixture(scope="module")
def blocks() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256)) for _ in range(12)]


@pytest.mark.parametrize(
    ("recomputed", "mib"),
    [
        pytest.param(lambda number: False, 143.1, id="none"),
        pytest.param(lambda number: True, 12.0, id="all"),
        pytest.param(lambda number: number % 2 == 0, 78.1, id="every other"),
    ],
)
def test_twelve_blocks(blocks: list[nn.Module], recomputed: Callable[[int], bool], mib: float) -> None:
    x_BTF = torch.randn(8, 128, 256)

    def forward() -> Tensor:
        h_BTF = x_BTF
        for number, block in enumerate(blocks):
            h_BTF = checkpoint(block, h_BTF, use_reentrant=False) if recomputed(number) else block(h_BTF)
        return h_BTF

    assert round(saved_bytes(forward).packed / MIB, 1) == mib


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


def test_each_call_counts_anew_and_an_outer_one_counts_what_no_inner_one_does() -> None:
    x = torch.randn(10, requires_grad=True)
    inner: list[int] = []

    def nested() -> None:
        x.exp()
        inner.append(saved_bytes(x.exp).packed)

    assert saved_bytes(nested).packed == 40
    assert inner == [40]


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
