"""`paceline doctor --compare` over real scripts: two ranks beside one worker that is given their samples."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from driving import Ended, Started

from paceline.doctor.watching import Limits
from paceline.doctor.watching.comparing import compare
from paceline.doctor.watching.comparison import Comparison
from paceline.doctor.watching.explaining import proven

SCRIPT = """
import random
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Data(Dataset):
    def __init__(self):
        drawn = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(96, 8, generator=drawn), torch.randn(96, 1, generator=drawn)
    def __len__(self):
        return 96
    def __getitem__(self, i):
        return self.x[i], self.y[i]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.norm = nn.Identity()
    def forward(self, x):
        return self.last(F.relu(self.norm(self.first(x))))

def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    data = Data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""

CHANCE = [
    ("return self.x[i], self.y[i]", "return self.x[i] + random.random() + 0.1 * torch.randn(8), self.y[i]"),
    ("self.norm = nn.Identity()", "self.norm = nn.Dropout(0.5)"),
    ("    torch.manual_seed(0)\n", ""),
    ("sampler = DistributedSampler(data)", "sampler = DistributedSampler(data) if world > 1 else None"),
    (
        "batch_size=8, sampler=sampler",
        "batch_size=16 // world, sampler=sampler, shuffle=sampler is None, num_workers=1",
    ),
    ("sampler.set_epoch(epoch)", "sampler and sampler.set_epoch(epoch)"),
    ("lr=0.01", "lr=0.01 * world"),
]
"""Dropout, drawn augmentation, no seed, a sampler and a batch size that follow the number of ranks, a scaled rate."""

ACCUMULATES = [
    ("for x, y in loader:", "for number, (x, y) in enumerate(loader):"),
    ("            optimizer.zero_grad()\n", "            loss = loss / 2\n"),
    ("            optimizer.step()", "            if number % 2:\n                step(optimizer)"),
    ("def main():", "def step(optimizer):\n    optimizer.step()\n    optimizer.zero_grad()\n\ndef main():"),
]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def written(*changes: tuple[str, str]) -> Path:
    source = SCRIPT
    for before, after in changes:
        assert before in source
        source = source.replace(before, after)
    path = Path("train.py")
    path.write_text(source)
    return path


def line_of(path: Path, text: str) -> int:
    return next(n for n, line in enumerate(path.read_text().splitlines(), 1) if text in line)


def of(*changes: tuple[str, str]) -> Comparison:
    return compare(written(*changes), [], Limits(timeout_s=400))


@pytest.mark.parametrize(
    "changes", [pytest.param(CHANCE, id="chance"), pytest.param(ACCUMULATES, id="accumulates", marks=pytest.mark.long)]
)
def test_a_right_script_computes_the_same(changes: list[tuple[str, str]]) -> None:
    told = of(*changes)
    assert told.equal is True, told.why
    assert told.steps > 0
    assert told.gradient["difference"] < 1e-4
    assert all(several == pytest.approx(one, rel=1e-5) for several, one in told.loss)
    assert not told.broken


@pytest.mark.long
def test_a_loss_times_the_number_of_ranks() -> None:
    told = of(("loss.backward()", "(loss * world).backward()"))
    (found,) = proven(told, [])
    assert (found.id, found.line) == ("loss-scaled-by-world-size", line_of(Path("train.py"), "backward"))
    assert "the gradient of step 1 is 2.00 times" in found.evidence


@pytest.mark.long
def test_a_batch_norm_is_proven_to_be_the_reason() -> None:
    told = of(("nn.Identity()", "nn.BatchNorm1d(16)"))
    (found,) = proven(told, [])
    assert (found.id, found.line, found.level) == (
        "batchnorm-unsynced",
        line_of(Path("train.py"), "DDP(Net())"),
        "advice",
    )
    assert "with the batch norms' running statistics gradients of 3 steps differ by" in found.evidence


@pytest.mark.long
def test_means_over_unequal_rows() -> None:
    told = of(("loss = F.mse_loss(model(x), y)", "own = y[:, 0] > 0; loss = F.mse_loss(model(x)[own], y[own])"))
    assert [found.id for found in proven(told, [])] == ["unequal-weight-average"]


@pytest.mark.long
def test_means_over_the_tokens_of_padded_samples() -> None:
    told = of(
        ("return self.x[i], self.y[i]", "return self.x[i][: 1 + i % 8], self.y[i]"),
        (
            "sampler=sampler)",
            "sampler=sampler, collate_fn=lambda rows: (nn.utils.rnn.pad_sequence([x for x, _ in rows], True),"
            " nn.utils.rnn.pad_sequence([x.sign() for x, _ in rows], True)))",
        ),
        ("self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)", "self.all = nn.Linear(1, 1)"),
        ("return self.last(F.relu(self.norm(self.first(x))))", "return self.all(x[..., None])[..., 0]"),
        ("loss = F.mse_loss(model(x), y)", "loss = (model(x) - y)[y != 0].square().mean()"),
    )
    assert [found.id for found in proven(told, [])] == ["unequal-weight-average"], told.why


@pytest.mark.long
def test_a_bypassed_wrapper() -> None:
    told = of(("model(x)", "model.module(x)"))
    assert told.equal is False
    assert "another one on each rank" in told.why
    assert "their mean is that of one worker" in told.why
    assert told.shown[0].ids[0] == "ddp-forward-bypassed"


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([("sampler=sampler", "shuffle=True")], "all ranks went through the same 8 samples"),
        ([("torch.manual_seed(0)", "torch.seed()")], "set a seed"),
        (
            [("y in loader:\n", "y in loader:\n            x = x + 0.1 * torch.randn_like(x)\n")],
            "drawn at random in each step",
        ),
        ([("y in loader:\n", "y in loader:\n            y = y + 0.1 * torch.randn_like(y)\n")], "random numbers"),
        ([("    torch.manual_seed(0)", "    assert world > 1, 'alone'")], "AssertionError: alone"),
        ([("F.mse_loss(model(x), y)", "F.mse_loss(model(x), y, reduction='sum') / 8")], "fixed number, 8"),
    ],
    ids=["no sampler", "no seed", "noise", "labels", "needs two", "fixed size"],
)
def test_what_cannot_be_compared_is_said(changes: list[tuple[str, str]], why: str) -> None:
    told = of(*changes)
    assert told.equal is None
    assert why in told.why
    assert not told.broken


def doctor(*words: str) -> Ended:
    """The command, over the script that was written."""
    command = [sys.executable, "-m", "paceline", "doctor", "train.py", "--compare", "--timeout", "200", *words]
    return Started(command, Path.cwd()).wait()


def test_the_command_tells_it_beside_the_findings() -> None:
    written(("loss.backward()", "(loss * world).backward()"))
    ended = doctor("--format", "json")
    assert ended.code == 1
    told = json.loads(ended.out)
    comparison = told["comparison"]
    assert comparison["equal"] is False
    assert comparison["gradient"]["ratio"] == pytest.approx(2.0, rel=1e-5)
    assert comparison["why"].endswith("[loss-scaled-by-world-size]")
    ((several, one),) = comparison["loss"]
    assert several == pytest.approx(2 * one, rel=1e-5)
    (found,) = [found for found in told["findings"] if found["id"] == "loss-scaled-by-world-size"]
    assert "the gradient of step 1 is 2.00 times that of one worker" in found["evidence"]


@pytest.mark.long
def test_a_difference_that_nothing_explains_is_a_plain_statement() -> None:
    written(("F.mse_loss(model(x), y)", "F.mse_loss(model(x), y, reduction='sum')"))
    ended = doctor("--ignore", "global-batch-grows")
    assert ended.code == 1
    assert "compared with one worker: NOT the same: the gradient of step 1 is 0.50 times" in ended.out
    assert ended.out.rstrip().endswith("Nothing found that explains it.")


def test_comparing_what_is_only_read_is_refused() -> None:
    written()
    ended = doctor("--static")
    assert ended.code == 2
    assert "--static together with --compare" in ended.err
