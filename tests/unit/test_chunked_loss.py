"""The loss in chunks: what the plain one gives, without the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from paceline.config import Recipe
from paceline.errors import ConfigError, DataError, UsageError
from paceline.models import GPT, GPTConfig, chunked_cross_entropy
from paceline.tasks import Digits, Language, Task

N, C, V = 29, 6, 101


def inputs(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Hidden states, weight, bias and targets."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(N, C), (V, C), (V,)]
    hidden, weight, offset = (torch.randn(*shape, dtype=dtype, generator=generator) for shape in shapes)
    for tensor in (hidden, weight, offset):
        tensor.requires_grad_()
    return hidden, weight, offset if bias else None, torch.randint(V, (N,), generator=generator)


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="sum")


def chunked(chunks: int) -> Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]:
    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        return chunked_cross_entropy(hidden, weight, targets, chunks=chunks, bias_V=bias)

    return loss


def run(loss_of: Callable[..., Tensor], *arguments: Tensor | None, scale: float = 1.0) -> list[Tensor]:
    """The loss and the gradients of all that needs one."""
    wanted = [tensor for tensor in arguments if tensor is not None and tensor.requires_grad]
    loss = loss_of(*arguments)
    return [loss.detach(), *torch.autograd.grad(loss * scale, wanted)]


def relative_error(tensor: Tensor, reference: Tensor) -> float:
    return float((tensor - reference).norm() / reference.norm())


class Seen(TorchDispatchMode):
    """What operators did: the elements of the largest tensor that one made, and how often matrices were multiplied."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.products += func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_")
        given = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, Tensor)}
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunks", [1, 4, 7, 28, 29, 1000])
def test_loss_and_gradients_are_the_plain_ones(chunks: int, bias: bool) -> None:
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        arguments = inputs(dtype, bias=bias)
        got, expected = run(chunked(chunks), *arguments, scale=0.25), run(plain, *arguments, scale=0.25)
        for tensor, reference in zip(got, expected, strict=True):
            assert (tensor.dtype, tensor.shape) == (reference.dtype, reference.shape)
            assert relative_error(tensor, reference) < tolerance


def test_a_target_to_be_ignored_adds_nothing() -> None:
    hidden, weight, bias, targets = inputs(torch.float64)
    targets[[0, 3, 4, 5, 28]] = -100  # of three chunks some, and of the second a whole token's share
    for tensor, reference in zip(
        run(chunked(6), hidden, weight, bias, targets), run(plain, hidden, weight, bias, targets), strict=True
    ):
        assert relative_error(tensor, reference) < 1e-13


@pytest.mark.parametrize("target", [V, -1, -101, 2**40])
def test_a_target_that_is_no_token_is_refused(target: int) -> None:
    hidden, weight, _, targets = inputs()
    targets[:] = -100
    targets[17] = target
    with pytest.raises(UsageError, match=rf"found targets from {target} to {target}, need 0 to 100, or -100 for"):
        chunked_cross_entropy(hidden, weight, targets, chunks=3)


def test_under_autocast_logits_are_rounded_as_in_the_plain_loss_and_the_sum_is_float32() -> None:
    arguments = inputs()
    exact = run(plain, *arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, expected = run(chunked(4), *arguments), run(plain, *arguments)
    assert {tensor.dtype for tensor in got} == {torch.float32}
    assert relative_error(got[0], expected[0]) < 1e-6 < relative_error(got[0], exact[0])
    for tensor, reference, true in zip(got, expected, exact, strict=True):
        assert relative_error(tensor, reference) < 5e-3
        assert relative_error(tensor, true) <= 1.2 * relative_error(reference, true)


def test_under_autocast_only_matrix_products_are_rounded() -> None:
    hidden, weight, bias, targets = inputs()
    assert bias is not None
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        logits = F.linear(hidden, weight, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        of_bias = run(chunked(4), hidden, weight, bias, targets)[-1]
    expected = (logits.float().softmax(-1) - F.one_hot(targets, V)).sum(0)
    assert relative_error(of_bias, expected) < 1e-6


def test_the_weight_is_cast_once_and_not_left_cast_without_gradients() -> None:
    """Autocast keeps what it casts; kept from where gradients are off, it would have none in the layers after."""
    hidden, weight, _, targets = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chunked_cross_entropy(hidden, weight, targets, chunks=4)
        again = F.linear(hidden, weight).float().sum()
    assert torch.autograd.grad(again, weight)[0].any()


def test_a_large_vocabulary_under_autocast() -> None:
    """More rows of the weight than are added at a time."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, C, generator=generator).requires_grad_() for rows in (N, 9001))
    targets = torch.randint(9001, (N,), generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, expected = (run(loss, hidden, weight, None, targets)[-1] for loss in (chunked(4), plain))
    for rows in (slice(4096), slice(4096, 8192), slice(8192, None)):
        assert relative_error(got[rows], expected[rows]) < 1e-2


def test_bfloat16_weights_keep_their_sums_in_float32() -> None:
    arguments = inputs(torch.bfloat16)
    got, expected = run(chunked(4), *arguments), run(plain, *arguments)
    assert [tensor.dtype for tensor in got] == [torch.float32] + 3 * [torch.bfloat16]
    assert relative_error(got[0], expected[0]) < 1e-6


def test_the_same_bits_each_time_and_inside_recompute() -> None:
    arguments = inputs()
    first, again = run(chunked(4), *arguments), run(chunked(4), *arguments)
    inside = run(lambda *tensors: checkpoint(chunked(4), *tensors, use_reentrant=False), *arguments)
    for tensor, repeated, recomputed in zip(first, again, inside, strict=True):
        assert torch.equal(tensor, repeated)
        assert torch.equal(tensor, recomputed)


@pytest.mark.parametrize("chunks", [1, 3, 10])
def test_no_more_than_one_chunk_of_logits_is_ever_there(chunks: int) -> None:
    arguments = inputs(bias=False)
    with Seen() as seen:
        run(chunked(chunks), *arguments)
    assert seen.largest == max(-(-N // chunks) * V, V * C)
    assert seen.products == 3 * -(-N // -(-N // chunks))  # logits, and the gradients of both that made them
    with Seen() as whole:
        run(plain, *arguments)
    assert whole.largest == N * V


def test_gradients_that_nobody_wants_are_not_computed() -> None:
    hidden, weight, bias, targets = inputs()
    with torch.no_grad(), Seen() as seen:
        loss = chunked_cross_entropy(hidden, weight, targets, chunks=N, bias_V=bias)
    assert (seen.products, loss.requires_grad) == (N, False)
    assert seen.largest < V * C
    frozen = weight.detach()
    with Seen() as seen:
        got = run(chunked(N), hidden, frozen, None, targets)
    assert seen.products == 2 * N
    assert seen.largest < V * C
    assert relative_error(got[1], run(plain, hidden, frozen, None, targets)[1]) < 1e-6
    got = run(chunked(4), hidden.detach(), weight, bias, targets)
    for tensor, reference in zip(got, run(plain, hidden.detach(), weight, bias, targets), strict=True):
        assert relative_error(tensor, reference) < 1e-6


def test_it_runs_on_shapes_alone() -> None:
    with FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, weight = nn.Parameter(torch.randn(10**6, 4096)), nn.Parameter(torch.randn(10**5, 4096))
        loss, *grads = run(chunked(64), hidden, weight, None, torch.zeros(10**6, dtype=torch.int64))
    assert loss.dtype == torch.float32
    assert [tuple(grad.shape) for grad in grads] == [(10**6, 4096), (10**5, 4096)]


def test_a_second_backward_is_refused() -> None:
    loss = chunked(4)(*inputs())
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match=r"cannot go back .* found a second backward"):
        loss.backward()
    with pytest.raises(UsageError, match="found create_graph=True"):
        chunked(4)(*inputs()).backward(create_graph=True)


def test_no_tokens_have_no_loss() -> None:
    hidden, weight, bias, targets = inputs()
    loss, *grads = run(chunked(4), hidden[:0].detach().requires_grad_(), weight, bias, targets[:0])
    assert loss == 0
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({"chunks": chunks}, rf"found chunks={chunks!r} for 29 tokens, need a whole number from 1 to 4096")
            for chunks in (0, -1, 4097, 10**8, 1.5, None, "2", True)
        ),
        *(
            ({"targets_N": torch.zeros(N, dtype=kind)}, f"found targets of {kind}")
            for kind in (torch.int8, torch.float)
        ),
        ({"hidden_NC": torch.zeros(2, 5, C)}, r"found hidden \(2, 5, 6\), .* Flatten"),
        ({"hidden_NC": torch.zeros(N, C + 1)}, r"found hidden \(29, 7\), weight \(101, 6\)"),
        ({"targets_N": torch.zeros(N - 1, dtype=torch.int64)}, r"targets \(28,\), need \(tokens, width\)"),
        ({"bias_V": torch.zeros(1)}, r"found bias \(1,\), need \(101,\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    hidden, weight, bias, targets = inputs()
    arguments = {"hidden_NC": hidden, "weight_VC": weight, "targets_N": targets, "bias_V": bias, "chunks": 4}
    with pytest.raises(UsageError, match=message):
        chunked_cross_entropy(**{**arguments, **changes})


# In a model and in tasks.

SHAPE: dict[str, Any] = {"context": 12, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 24}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_model_learns_the_same_with_its_loss_in_chunks(tied: bool, precision: torch.dtype) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=50, tied=tied, **SHAPE))
    tokens_BT = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(1))

    def gradients(loss_chunks: int | None) -> list[Tensor]:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)  # as in a run: gradients are added to what is there
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is torch.bfloat16):
            loss = model(tokens_BT, tokens_BT.roll(-1, 1), loss_chunks=loss_chunks)
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    tolerance = 1e-5 if precision is torch.float32 else 1e-2
    for tensor, reference in zip(gradients(5), gradients(None), strict=True):
        assert relative_error(tensor, reference) < tolerance
    assert all(torch.equal(*pair) for pair in zip(gradients(5), gradients(5), strict=True))


def test_a_language_model_needs_no_data_to_be_planned() -> None:
    task = Language("does/not/exist", vocabulary=50, **SHAPE)
    batch = task.example(3)
    assert [(tensor.shape, tensor.dtype) for tensor in batch] == 2 * [((3, 12), torch.int64)]
    model = task.build_model()
    loss, weight = task.loss(model, batch)
    task.chunk_loss(7)
    with Seen() as seen:
        again, tokens = task.loss(model, batch)
    assert tokens == weight
    assert again.item() == pytest.approx(loss.item(), rel=1e-6)
    assert seen.largest < 36 * 50
    with pytest.raises(DataError, match="does/not/exist"):
        task.train_data()


class Numbers(Task):
    """Counts up to a number."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Any:
        return [torch.tensor([float(number)]) for number in range(self.samples)]

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        return model(batch).sum(), len(batch)


def test_an_example_of_any_task_has_as_many_samples_as_asked_for() -> None:
    assert Numbers(3).example(2).tolist() == [[0.0], [1.0]]
    assert Numbers(3).example(5).tolist() == [[0.0], [1.0], [2.0], [0.0], [1.0]]
    with pytest.raises(DataError, match="cannot take an example: found an empty dataset"):
        Numbers(0).example(1)


class Own(Language):
    """Has a loss that knows nothing of chunks."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        return super().loss(model, batch)


class OwnInChunks(Own):
    """Has one that does."""

    can_chunk_loss = True

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        return super().loss(model, batch)


class Renamed(OwnInChunks):
    """Has none of its own."""


def test_chunks_are_for_tasks_that_heed_them() -> None:
    tasks: list[Task] = [Digits(), Numbers(3), Own("x")]
    for task in tasks:
        task.chunk_loss(None)
        with pytest.raises(ConfigError, match=rf"cannot split the loss of {type(task).__name__}: found loss_chunks=4"):
            task.chunk_loss(4)
    tasks = [Language("x"), OwnInChunks("x"), Renamed("x")]
    for task in tasks:
        task.chunk_loss(4)
        assert task.loss_chunks == 4
    with pytest.raises(ConfigError, match=r"cannot use recipe.loss_chunks: found loss_chunks=0"):
        Recipe(steps=1, loss_chunks=0)
