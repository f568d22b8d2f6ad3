"""A step that is simulated holds what the same step holds for real, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError
from paceline.memory.live import LiveBytes, gradients_in_place, shapes_only
from paceline.memory.simulate import Trace, simulate
from paceline.models import GPT, GPTConfig

KIB = 2**10


def gpt(**other: object) -> GPT:
    shape: dict[str, object] = {"vocabulary": 61, "context": 16, "width": 32, "layers": 3, "heads": 4, "kv_heads": 2}
    return GPT(GPTConfig(**{**shape, "hidden": 64, **other}))  # type: ignore[arg-type]


class Tied(nn.Module):
    """What is hard to take for fake: tied weights, an RNN's own list, a parametrized weight, a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(8, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.late: Tensor | None
        self.register_buffer("late", None)
        self.plain = torch.ones(8)

    def forward(self, x_TBF: Tensor) -> Tensor:
        if self.late is None:
            self.late = torch.ones(8)
            self.register_buffer("later", torch.ones(8))
        y_TBF = self.rnn(x_TBF)[0] * self.late * self.plain
        result: Tensor = self.scaled(self.second(self.first(y_TBF)))
        return result


def test_what_counts() -> None:
    before, other = torch.ones(256), torch.ones(256)
    with LiveBytes() as live:
        before.mul_(2)
        before.view(16, 16).t()
        torch.add(before, other, out=other)
        before.contiguous()
        before.detach()
        assert (live.current, live.peak) == (0, 0)
        new = before + other
        views = [new[:10], new.view(16, 16), new.t()]
        new.add_(1)
        assert live.current == KIB
        new.resize_(512)
        assert (live.current, live.peak) == (2 * KIB, 2 * KIB)
        half = new.to(torch.bfloat16)
        assert live.current == 3 * KIB
    del new
    assert live.current == 3 * KIB  # its views hold the storage
    del views, half
    assert (live.current, live.peak) == (0, 3 * KIB)


def test_what_autograd_alone_holds_counts() -> None:
    weight = torch.ones(256, requires_grad=True)
    with LiveBytes() as live:
        loss = (weight * 2).exp().sum()
        assert live.current == KIB + 4  # of exp its result, and the loss
        loss.backward()
    assert live.current == KIB + 4  # the result is let go, a gradient is there
    weight.grad = None
    assert live.current == 4


def images() -> nn.Module:
    blocks = (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) for _ in range(3))
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(256, 10))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def of_text(model: Any) -> Any:
    tokens_BT = torch.zeros(4, 16, dtype=torch.int64)
    return model(tokens_BT, tokens_BT)


def of_images(model: Any) -> Tensor:
    return F.cross_entropy(model(torch.zeros(2, 4, 8, 8)), torch.zeros(2, dtype=torch.int64))


STEPS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "gpt": (gpt, of_text),
    "gpt, dropout, tied": (lambda: gpt(dropout=0.1, tied=True), of_text),
    "images": (images, of_images),
    "encoder": (encoder, lambda model: model(torch.zeros(4, 16, 16)).square().mean()),
    "hard to fake": (Tied, lambda model: model(torch.zeros(5, 2, 8)).sum()),
}


def traced(model: nn.Module, loss: Callable[[Any], Any], dtype: torch.dtype) -> Trace:
    def step() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            return loss(model)

    with gradients_in_place(model):
        return simulate(step, dict(model.named_children()) if isinstance(model, nn.Sequential) else {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", STEPS)
def test_simulated_as_real(name: str, dtype: torch.dtype) -> None:
    build, loss = STEPS[name]
    model = build()
    with shapes_only(model):
        simulated = traced(model, loss, dtype)
    real = traced(build(), loss, dtype)
    assert simulated.peak == pytest.approx(real.peak, rel=0.01)
    for mine, its in zip(simulated.segments, real.segments, strict=True):
        assert mine.kept == pytest.approx(its.kept, rel=0.01)
    assert simulated.left == real.left < 69  # the loss, and buffers made in forward; gradients were there


def test_counts_what_the_allocator_gives() -> None:
    model = gpt()
    peak = traced(model, STEPS["gpt"][1], torch.float32).peak
    cpu = torch.profiler.ProfilerActivity.CPU
    with gradients_in_place(model), torch.profiler.profile(activities=[cpu], profile_memory=True) as profiler:
        STEPS["gpt"][1](model).backward()
    events = profiler.profiler.kineto_results.events()
    sizes = torch.tensor([event.nbytes() for event in events if event.name() == "[memory]"])
    assert peak == pytest.approx(int(sizes.cumsum(0).max()), rel=0.02)


def test_a_model_is_given_back_as_it_was() -> None:
    model = Tied()
    state = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    flat, randomness = list(model.rnn._flat_weights), torch.get_rng_state()
    with pytest.raises(KeyError, match="mine"), shapes_only(model), gradients_in_place(model):
        assert model.first.weight is model.second.weight
        assert not any(given is real for given, real in zip(model.rnn._flat_weights, flat, strict=True))
        simulate(lambda: F.dropout(model(torch.rand(5, 2, 8))).sum(), {"rnn": model.rnn})
        raise KeyError("mine")
    now = model.state_dict(keep_vars=True)
    assert list(now) == list(state)
    assert all(now[name] is tensor and torch.equal(tensor, copy) for name, (tensor, copy) in state.items())
    assert all(given is real for given, real in zip(model.rnn._flat_weights, flat, strict=True))
    assert model.late is None
    assert list(dict(model.named_buffers(recurse=False))) == []
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), randomness)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_numbers_are_asked_for() -> None:
    with pytest.raises(UsageError, match=r"shapes alone: found aten.*\.item\(\)"), shapes_only():
        (torch.ones(3) * 2).sum().item()


class Sevenfold(nn.Module):
    def forward(self, x_BF: Tensor) -> Tensor:
        return (x_BF * 7).exp()


@pytest.mark.parametrize("again", [False, True])
def test_blocks(again: bool) -> None:
    """Each block keeps exp's result, and recomputed only its input."""

    class Recomputed(Sevenfold):
        def forward(self, x_BF: Tensor) -> Tensor:
            result = checkpoint(super().forward, x_BF, use_reentrant=False) if again else super().forward(x_BF)
            assert isinstance(result, Tensor)
            return result

    model = nn.Sequential(nn.Linear(16, 16, bias=False), *(Recomputed() for _ in range(3)))
    with shapes_only(model), gradients_in_place(model):
        x_BF = torch.zeros(16, 16)
        trace = simulate(lambda: model(x_BF).sum(), {str(place): model[place] for place in (1, 2, 3)})
    assert [segment.name for segment in trace.segments] == ["", "1", "2", "3"]  # not the forwards in backward
    prologue, *blocks = trace.segments
    assert prologue.kept == KIB
    assert [block.kept for block in blocks] == [KIB] * 3
    assert prologue.stays == (KIB if again else 0)
    # What exp returned, kept or again, and its gradients in and out: for the last one the sum's is a single number.
    assert [block.backward for block in blocks] == [3 * KIB + 8, 3 * KIB + 8, 2 * KIB + 8]
    assert trace.segments[1].work.flops == 0
    assert trace.work.flops == 2 * 2 * 16**3  # the product, and its weight's gradient
    assert trace.peak == max(block.before + block.backward for block in blocks)


def test_a_block_that_is_called_twice_and_one_that_is_not() -> None:
    block, other = Sevenfold(), Sevenfold()
    weight = torch.ones(256, requires_grad=True)
    trace = simulate(lambda: block(block(weight)).sum(), {"block": block, "other": other})
    assert [segment.name for segment in trace.segments] == ["", "block", "block"]


def test_no_blocks() -> None:
    weight = torch.ones(256, requires_grad=True)
    trace = simulate(lambda: weight.exp().sum(), {})
    assert trace.loss == trace.peak > 2 * KIB
    assert trace.left == KIB + 4


def test_an_lstm_is_not_counted_on_shapes() -> None:
    model = nn.LSTM(8, 8)
    with pytest.raises(UsageError, match="only when it runs"), shapes_only(model):
        simulate(lambda: model(torch.zeros(5, 2, 8))[0].sum(), {})
    assert simulate(lambda: model(torch.zeros(5, 2, 8))[0].sum(), {}).peak > 0


def test_blocks_do_not_lie_in_one_another() -> None:
    inner = nn.Sequential(nn.Linear(4, 4))
    model = nn.Sequential(inner)
    with pytest.raises(UsageError, match=r"0\.0 called inside 0"):
        simulate(lambda: model(torch.zeros(1, 4)).sum(), {"0": inner, "0.0": inner[0]})
    assert not inner._forward_pre_hooks
