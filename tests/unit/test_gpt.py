"""The model: shapes, causality, counts against the real module, and a cache that changes nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from paceline.errors import ConfigError
from paceline.models import GPT, Cache, GPTConfig, flops_per_token, parameter_count

SMALL: dict[str, Any] = {
    "vocabulary": 17,
    "context": 12,
    "width": 16,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 24,
}


def small(seed: int = 0, **changes: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{**SMALL, **changes}))


def some_tokens(*shape: int, vocabulary: int = 17) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def compiler_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's compiler, once imported, sets this variable for good unless it is there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_parameter_count_is_that_of_the_module(tied: bool, kv_heads: int) -> None:
    model = small(tied=tied, kv_heads=kv_heads, layers=3)
    assert parameter_count(model.config) == sum(p.numel() for p in model.parameters())


@pytest.mark.usefixtures("compiler_cache")
@pytest.mark.parametrize("tied", [False, True])
def test_flops_per_token_are_those_that_torch_counts(tied: bool) -> None:
    model = small(tied=tied)
    tokens_BT = some_tokens(3, 12)
    # Only the math backend spells attention out as the matrix products that torch's counter knows on a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens_BT, tokens_BT).backward()
    assert counter.get_total_flops() == flops_per_token(model.config) * tokens_BT.numel()


def test_a_token_sees_itself_and_what_came_before_and_nothing_else() -> None:
    model = small()
    before_BT = some_tokens(1, 12)
    after_BT = before_BT.clone()
    after_BT[0, 7] = (after_BT[0, 7] + 1) % 17
    same = (model(before_BT) == model(after_BT)).all(-1)[0]
    assert same.tolist() == [True] * 7 + [False] * 5


def test_rotary_attention_depends_on_distances_only() -> None:
    model = small(context=24)
    tokens_BT = some_tokens(1, 6)
    plain_BTV = model(tokens_BT)
    rotary_2TD = model.get_buffer("rotary_2TD")
    saved = rotary_2TD.clone()
    rotary_2TD.copy_(saved.roll(-9, dims=1))  # as if the text began at position 9
    torch.testing.assert_close(model(tokens_BT), plain_BTV)
    rotary_2TD.copy_(saved[:, :1].expand_as(saved))  # all tokens at one position
    assert not torch.allclose(model(tokens_BT), plain_BTV)


def test_grouped_queries_share_keys_as_if_these_were_repeated() -> None:
    grouped, full = small(kv_heads=2), small(kv_heads=4)
    full_state = dict(grouped.state_dict())
    for name in [name for name in full_state if name.endswith("qkv.weight")]:
        q, k, v = full_state[name].split([16, 8, 8])
        k, v = (part.unflatten(0, (2, 4)).repeat_interleave(2, dim=0).flatten(0, 1) for part in (k, v))
        full_state[name] = torch.cat([q, k, v])
    full.load_state_dict(full_state)
    tokens_BT = some_tokens(2, 12)
    torch.testing.assert_close(grouped(tokens_BT), full(tokens_BT))


@pytest.mark.parametrize("chunks", [(12,), (1,) * 12, (5, 1, 4, 2)])
def test_the_cache_gives_the_logits_of_the_whole(chunks: tuple[int, ...]) -> None:
    model = small().eval()
    tokens_BT = some_tokens(3, 12)
    cache = Cache(model.config, batch=3, like=model.embedding.weight)
    with torch.no_grad():
        pieces = [model(piece_BT, cache=cache) for piece_BT in tokens_BT.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens_BT))
    assert cache.length == 12


def test_the_loss_is_a_sum_in_float32_also_under_autocast() -> None:
    model = small()
    tokens_BT, targets_BT = some_tokens(2, 12), some_tokens(2, 12)
    loss = model(tokens_BT, targets_BT)
    by_hand = -model(tokens_BT).log_softmax(-1).gather(-1, targets_BT[..., None]).sum()
    torch.testing.assert_close(loss, by_hand)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(tokens_BT).dtype == torch.bfloat16
        rough = model(tokens_BT, targets_BT)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, loss, rtol=1e-2, atol=0.0)
    rough.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_dropout_acts_in_training_only_and_follows_the_seed() -> None:
    model = small(dropout=0.5)
    tokens_BT = some_tokens(2, 12)

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        logits_BTV: torch.Tensor = model(tokens_BT)
        return logits_BTV

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    model.eval()
    assert torch.equal(run(0), run(1))


def test_the_state_is_the_parameters_alone_and_tied_weights_stay_one() -> None:
    model = small(tied=True)
    assert set(model.state_dict()) == {*dict(model.named_parameters()), "head.weight"}
    assert model.head.weight is model.embedding.weight
    assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in model.parameters())


def test_initial_weights_follow_the_seed_and_give_nearly_even_chances() -> None:
    a, b, c = small(seed=0), small(seed=0), small(seed=1)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.head.weight, c.head.weight)
    loss_per_token = a(some_tokens(4, 12), some_tokens(4, 12)).item() / 48
    assert abs(loss_per_token - math.log(17)) < 1.0


def test_it_learns_to_repeat() -> None:
    model = small()
    tokens_BT = torch.arange(13).remainder(5)[None]
    losses = []
    for _ in range(60):
        loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:]) / 12
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(0.5 * gradient)
        losses.append(loss.item())
    assert losses[-1] < 0.1 < 2 < losses[0]


@pytest.mark.usefixtures("compiler_cache")
# Dynamo asks a tensor that is no leaf for its gradient, and silences its own warning only where warnings print.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_blocks_compiled_one_by_one_share_one_graph() -> None:
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model, counter = small(layers=3), CompileCounter()
    tokens_BT = some_tokens(2, 12)
    plain = model(tokens_BT, tokens_BT)
    for block in model.blocks:
        block.compile(backend=counter, dynamic=False, fullgraph=True)
    torch.testing.assert_close(model(tokens_BT, tokens_BT), plain)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "found width=16, heads=5, need width to be a multiple of heads. Use one of heads=1, 2, 4, 8"),
        ({"heads": 16}, "need an even number of channels a head"),
        ({"heads": 4, "kv_heads": 3}, "need heads to be a multiple of kv_heads. Use one of kv_heads=1, 2, 4."),
        ({"dropout": 1.0}, "found dropout=1.0, need a probability"),
        ({"layers": 0}, "found layers=0, need layers >= 1"),
        ({"rope_theta": float("inf")}, "found rope_theta=inf, need a finite rope_theta > 0"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GPTConfig(**{**SMALL, **changes})
    assert message in str(caught.value)


def test_more_tokens_than_the_context_are_refused() -> None:
    model = small()
    with pytest.raises(ConfigError, match=r"found 13 tokens, need at most context=12"):
        model(some_tokens(1, 13))
    cache = Cache(model.config, like=model.embedding.weight)
    model(some_tokens(1, 10), cache=cache)
    with pytest.raises(ConfigError, match=r"found 13 tokens"):
        model(some_tokens(1, 3), cache=cache)


def test_initial_scales_are_the_documented_ones() -> None:
    model = small(width=64, hidden=256, vocabulary=500, layers=2, context=32)
    expected = {
        "embedding.weight": 0.02,
        "head.weight": 64**-0.5,
        "blocks.0.attention.qkv.weight": 64**-0.5,
        "blocks.0.attention.out.weight": 64**-0.5 / 2,
        "blocks.1.feed_forward.down.weight": 256**-0.5 / 2,
    }
    for name, std in expected.items():
        assert model.get_parameter(name).std().item() == pytest.approx(std, rel=0.05), name
    assert torch.equal(model.get_parameter("blocks.0.attention_norm.weight"), torch.ones(64))
    assert small(tied=True, vocabulary=500).head.weight.std().item() == pytest.approx(0.02, rel=0.05)
