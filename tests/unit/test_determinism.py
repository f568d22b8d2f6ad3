"""Seeds from keys, flags in one place, digests that see every bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.determinism import (
    ALIGNMENT,
    aligned,
    autocast,
    compile_blocks,
    configure_process,
    digest,
    flatten_state,
    resolve_device,
    seed_by,
    tensor_digest,
)
from paceline.errors import ConfigError

KEYS = st.lists(st.integers(0, 2**40) | st.sampled_from(["train", "sample", "update"]), min_size=1, max_size=5)


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


@given(KEYS)
def test_all_three_generators_follow_the_key_and_nothing_else(key: list[int | str]) -> None:
    seed = seed_by(*key)
    first = draw()
    draw()
    assert seed_by(*key) == seed
    assert draw() == first
    assert 0 <= seed < 2**63
    assert float(torch.rand((), generator=torch.Generator().manual_seed(seed))) == first[0]


@given(st.lists(KEYS, min_size=2, max_size=8, unique_by=tuple))
def test_other_keys_give_other_seeds(keys: list[list[int | str]]) -> None:
    assert len({seed_by(*key) for key in keys}) == len(keys)
    assert len({draw() for key in keys if seed_by(*key)}) == len(keys)


def test_the_key_is_not_its_digits_run_together() -> None:
    assert len({seed_by(1, 23), seed_by(12, 3), seed_by(123), seed_by("1", "2", "3")}) == 4


@pytest.mark.usefixtures("process_state")
def test_a_worker_is_configured_whatever_was_set_before() -> None:
    torch.set_num_threads(2)
    configure_process(threads=1, device=torch.device("cpu"))
    assert torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()
    denormal = torch.tensor(1e-40) * 0.5
    assert denormal.item() > 0


def test_autocast_is_bf16_or_nothing() -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    with autocast("bf16", torch.device("cpu")):
        assert (a @ b).dtype == torch.bfloat16
    with autocast("fp32", torch.device("cpu")):
        assert (a @ b).dtype == torch.float32


@given(st.integers(0, 40))
def test_aligned_moves_what_is_not(offset: int) -> None:
    tensor = torch.arange(100.0)[offset:]
    result = aligned(tensor)
    assert result.data_ptr() % ALIGNMENT == 0
    assert torch.equal(result, tensor)
    assert (result is tensor) == (tensor.data_ptr() % ALIGNMENT == 0)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto", 0) == resolve_device("cpu", 3) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"recipe\.device=cuda"):
        resolve_device("cuda", 0)


def test_each_worker_of_a_machine_needs_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto", 1) == torch.device("cuda", 1)
    assert resolve_device("cpu", 5) == torch.device("cpu")
    with pytest.raises(ConfigError, match="-n 2 or fewer"):
        resolve_device("cuda", 2)


# Digests.


def test_a_digest_sees_name_dtype_shape_and_every_bit() -> None:
    tensor = torch.tensor([[0.0, 1.0], [2.0, torch.nan]])
    flipped = tensor.clone()
    flipped.view(torch.int32)[0, 1] ^= 1
    variants = {
        tensor_digest("a", tensor),
        tensor_digest("b", tensor),
        tensor_digest("a", tensor.view(4)),
        tensor_digest("a", tensor.view(torch.int32)),
        tensor_digest("a", flipped),
        tensor_digest("a", tensor * torch.tensor([-1.0, 1.0])),  # -0.0
        tensor_digest("a", torch.empty(0)),
        tensor_digest("a", torch.empty(0, 3)),
    }
    assert len(variants) == 8
    assert tensor_digest("a", tensor) == tensor_digest("a", tensor.clone())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.complex64, torch.int64]
)
def test_every_dtype_has_a_digest(dtype: torch.dtype) -> None:
    one = torch.ones(3, 2).to(dtype)
    assert tensor_digest("x", one) == tensor_digest("x", one.t().contiguous().t())
    assert tensor_digest("x", one) != tensor_digest("x", torch.zeros(3, 2).to(dtype))
    assert tensor_digest("x", one[0, 0]) != tensor_digest("x", one[0, :1])


def test_the_digest_of_many_does_not_depend_on_their_order_and_sees_swaps() -> None:
    a, b = torch.randn(3), torch.randn(3)
    assert digest({"a": a, "b": b}) == digest({"b": b, "a": a})
    assert len({digest({"a": a, "b": b}), digest({"a": b, "b": a}), digest({"a": a}), digest({})}) == 4


def test_every_tensor_of_a_nested_state_is_found_under_its_path() -> None:
    state: dict[str, Any] = {"state": {0: {"exp_avg": torch.ones(1), "step": 3}}, "list": [torch.zeros(1), (None,)]}
    assert [path for path, _ in flatten_state({"optimizer": state})] == [
        "optimizer.state.0.exp_avg",
        "optimizer.list.0",
    ]


# Compiling.


def test_a_model_without_repeated_blocks_cannot_be_compiled_by_blocks() -> None:
    with pytest.raises(ConfigError, match=r"no nn\.ModuleList in Linear"):
        compile_blocks(nn.Linear(2, 2))


def test_compiling_by_blocks_keeps_keys_and_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: asked.append(how))
    import torch._dynamo

    model = nn.Sequential(nn.Linear(2, 2))
    model.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    keys = list(model.state_dict())
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False, recompile_limit=8):  # puts back what is set
        compile_blocks(model)
        assert torch._dynamo.config.fail_on_recompile_limit_hit
    assert asked == [{"dynamic": False}, {"dynamic": False}]
    assert list(model.state_dict()) == keys
