"""Arithmetic on losses and gradients, whoever writes it: operators, methods, functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.doctor.reading.arithmetic import named
from reading_of import LOSS, found_in, value_of

DIVIDED = [
    "loss / 4",
    "loss * 0.25",
    "loss.div(4)",
    "loss.mul(1 / 4)",
    "loss.true_divide(4)",
    "loss.div_(4)",
    "loss.__truediv__(4)",
    "torch.div(loss, 4)",
    "torch.mul(loss, 0.25)",
    "torch.true_divide(loss, other=4)",
    "operator.truediv(loss, 4)",
]
TIMES_WORLD = [
    "loss * world",
    "world * loss",
    "loss * (world * 4)",
    "loss * 4 * float(world)",
    "loss.mul(world)",
    "torch.mul(loss, world)",
    "loss * max(world, 1)",
    "loss * int(os.environ['WORLD_SIZE'])",
    "loss * torch.tensor(world)",
]
BY_WORLD = ["loss / world", "loss / (4 * world)", "loss * (1 / world)", "loss.div(world)", "torch.div(loss, world * 2)"]
BY_NEITHER = [
    "loss / (64 // world)",  # what each rank takes of a global count
    "loss * world / world",
    "loss / world * world",
    "loss * (world > 1)",
    "loss * (world - 1)",
    "loss * len('x' * world)",
]


@pytest.mark.parametrize("expression", DIVIDED)
def test_divided(expression: str, tmp_path: Path) -> None:
    assert {"divided", "mean", "graph"} <= value_of(tmp_path, expression, LOSS).labels


@pytest.mark.parametrize("expression", [*TIMES_WORLD, *BY_WORLD, *BY_NEITHER])
def test_scaled_by_the_world_size(expression: str, tmp_path: Path) -> None:
    labels = value_of(tmp_path, expression, LOSS).labels & {"times-world", "divided-by-world"}
    expected = (
        {"times-world"} if expression in TIMES_WORLD else {"divided-by-world"} if expression in BY_WORLD else set()
    )
    assert labels == expected


def test_a_part_of_a_tensor_is_that_tensors(tmp_path: Path) -> None:
    for how in ("t[0] = rank", "t[0] += rank", "t[0].add_(rank)", "t[1:][0].add_(rank)", "t += rank", "t.add_(rank)"):
        assert value_of(tmp_path, "t", f"t = torch.zeros(3)\n{how}").varies


def test_a_mean_times_a_count_is_a_sum(tmp_path: Path) -> None:
    assert "times-count" in value_of(tmp_path, "loss * len(torch.zeros(4))", LOSS).labels
    assert "times-count" in value_of(tmp_path, "loss * torch.zeros(4).shape[0] * world", LOSS).labels
    assert "times-count" not in value_of(tmp_path, "loss * 4", LOSS).labels


DETACHED = ["loss.item()", "loss.detach()", "loss.data", "float(loss)", "loss > 1", "f'{loss}'", "torch.isfinite(loss)"]


KEEPS_ITS_GRAPH = [
    "loss.float()",
    "loss.sum()",
    "loss.round()",
    "torch.stack([loss, loss]).mean()",
    "loss.to('cpu')",
    "loss[None]",
    "-loss",
]


@pytest.mark.parametrize("expression", KEEPS_ITS_GRAPH)
def test_not_detached(expression: str, tmp_path: Path) -> None:
    labels = value_of(tmp_path, expression, LOSS).labels
    assert "graph" in labels
    assert any(label.startswith("forward:") for label in labels)


@pytest.mark.parametrize("expression", DETACHED)
def test_detached(expression: str, tmp_path: Path) -> None:
    labels = value_of(tmp_path, expression, LOSS).labels
    assert not [label for label in labels if label == "graph" or label.startswith(("forward:", "part:"))]


GRADIENTS = ["g", "g.clone()", "torch.cat([g.flatten()])", "torch.stack([g])", "g.data", "g / 2"]
OF_GRADIENTS = ["g.norm()", "torch.linalg.vector_norm(g)", "torch.stack([g.norm()])", "torch.isnan(g).any()", "g.sum()"]


@pytest.mark.parametrize("expression", [*GRADIENTS, *OF_GRADIENTS])
def test_a_number_about_gradients_is_no_gradient(expression: str, tmp_path: Path) -> None:
    labels = value_of(tmp_path, expression, "g = next(nn.Linear(2, 2).parameters()).grad").labels
    assert ("gradient" in labels) is (expression in GRADIENTS)


def test_names_of_one_calculation() -> None:
    assert named("Div") is named("div_") is named("true_divide") is named("__truediv__") is named("_foreach_div_")
    assert named("softmax") is None


ACCUMULATES = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(64, 2)[dist.get_rank()::2]
for step in range(64):
    loss = F.mse_loss(model(data[step % 32]), torch.zeros(1))
    BACKWARD
    if step % 4 == 3:
        AFTER
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""
NORMALISED = {
    "method": ("loss.div(4).backward()", "pass"),
    "in place": ("loss.mul_(0.25); loss.backward()", "pass"),
    "gradient": ("loss.backward(torch.tensor(0.25))", "pass"),
    "gradient by name": ("loss.backward(gradient=torch.tensor(0.25))", "pass"),
    "gradients": ("loss.backward()", "[p.grad.div_(4) for p in model.parameters()]"),
    "operator": ("loss.backward()", "for p in model.parameters():\n            p.grad /= 4"),
    "at once": ("loss.backward()", "torch._foreach_div_([p.grad for p in model.parameters()], 4)"),
}


@pytest.mark.parametrize("how", NORMALISED)
def test_normalised(how: str, tmp_path: Path) -> None:
    backward, after = NORMALISED[how]
    assert found_in(tmp_path, ACCUMULATES.replace("BACKWARD", backward).replace("AFTER", after)) == set()


@pytest.mark.parametrize("after", ["pass", "[p.grad.detach_() for p in model.parameters()]"])
def test_not_normalised(after: str, tmp_path: Path) -> None:
    text = ACCUMULATES.replace("BACKWARD", "loss.backward()").replace("AFTER", after)
    assert found_in(tmp_path, text) == {"accumulation-not-normalised"}
