"""What fake tensors remember of an operator is what torch says of it each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from paceline.memory.fakes import Fakes
from paceline.memory.live import LiveBytes


def twice(x_AB: Tensor, y_AB: Tensor) -> list[Any]:
    """An operator whose arguments are one tensor, and then two."""
    return [torch.add(x_AB, x_AB, out=x_AB), torch.add(x_AB, y_AB, out=y_AB), torch.add(x_AB, y_AB, out=x_AB)]


CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "new": lambda x, y: [x + y, x @ y.t(), x * 2, x * 2.0, x > 1, x.sum(), x.to(torch.bfloat16), torch.zeros(3)],
    "views": lambda x, y: [x.view(-1), x.t(), x[1:], x[1:].t()[2:], x.expand(2, 4, 6), x.unbind(), x.chunk(2), x[:0]],
    "in place": lambda x, y: [x.add_(1), x.t().mul_(2), y.copy_(x), x.clamp_(0, 1), x[1].zero_()],
    "one tensor or two": twice,
    "several": lambda x, y: [x.max(0), torch.var_mean(x, 1), x.sort(), F.layer_norm(x, (6,)), x.topk(2)],
    "changed shapes": lambda x, y: [
        x.clone().resize_(2, 2),
        x.clone().t_(),
        x.clone().unsqueeze_(0),
        x.set_(y.untyped_storage()),
    ],
    "strides": lambda x, y: [x.t().clone(), x.t().contiguous(), torch.empty_like(x.t()), x.t() + 1, x.t() + x.t()],
    "indices": lambda x, y: [x[[0, 1]], x.index_select(0, torch.tensor([1])), x.gather(0, torch.tensor([[1]]))],
    "convolution": lambda x, y: F.conv1d(x[None], y[:, None, :3], groups=4, padding=1),
    "numbers": lambda x, y: [torch.full((2,), 1), torch.full((2,), 1.0), torch.full((2,), True), x.size(0), x * 1],
    "complex": lambda x, y: [torch.view_as_complex(x.view(4, 3, 2)).conj() * 1, torch.complex(x, y).imag],
}


def seen(call: Callable[[Tensor, Tensor], Any], times: int) -> list[object]:
    """Of what it returns and of what it was given, in the end: shapes, and who shares memory with whom."""
    for _ in range(times):
        x_AB, y_AB = torch.ones(4, 6), torch.ones(4, 6)
        tensors = [leaf for leaf in tree_leaves([call(x_AB, y_AB), x_AB, y_AB]) if isinstance(leaf, Tensor)]
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [
        (
            *(tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device),
            *(tensor.untyped_storage().nbytes(), storages.index(storage)),
            *(tensor.requires_grad, tensor.is_conj(), torch._C._dispatch_keys(tensor)),
        )
        for tensor, storage in zip(tensors, storages, strict=True)
    ]


@pytest.mark.parametrize("name", CALLS)
def test_again_as_at_first(name: str) -> None:
    with FakeTensorMode():
        by_torch = seen(CALLS[name], 1)
    with Fakes():
        assert seen(CALLS[name], 3) == by_torch


def test_what_is_remembered_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with Fakes():
        seen(CALLS["new"], 1)
        monkeypatch.setattr(FakeTensorMode, "dispatch", None)
        seen(CALLS["new"], 1)
        with pytest.raises(TypeError):
            torch.ones(4) - 3


def test_default_dtype_counts() -> None:
    whole_B = torch.ones(3, dtype=torch.int64)
    with Fakes():
        of_float32 = whole_B / 2
        torch.set_default_dtype(torch.float64)
        try:
            assert (of_float32.dtype, (whole_B / 2).dtype) == (torch.float32, torch.float64)
        finally:
            torch.set_default_dtype(torch.float32)


def test_autograd_and_autocast_see_a_cpu() -> None:
    with Fakes():
        for _ in range(2):
            weight = torch.ones(6, 6, requires_grad=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y_AB = torch.ones(4, 6) @ weight
            y_AB.sum().backward()
            assert (y_AB.dtype, y_AB.device.type) == (torch.bfloat16, "cpu")
            assert weight.grad is not None and weight.grad.shape == (6, 6)


def test_one_who_watches_inside_another_is_told_alone() -> None:
    with Fakes(), LiveBytes() as outer:
        kept = [torch.ones(256)]
        with LiveBytes() as inner:
            kept.append(torch.ones(512))
        kept.append(torch.ones(256))
    assert (outer.current, inner.current) == (2048, 2048)
