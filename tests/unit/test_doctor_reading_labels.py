"""What becomes of labels in something that is made of a value: what differs between ranks, and what is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.doctor.reading.flows import labels_of
from paceline.doctor.reading.flows import tested as of_a_test
from paceline.doctor.reading.values import FACTORS, NATURES, Value
from reading_of import value_of

CONFIG = """
import dataclasses
@dataclasses.dataclass
class Settings:
    seed: int = 0
    width: int = 8
class Numbers(Dataset):
    def __init__(self, given):
        self.given = given
settings = unknown()
settings["rank"] = rank
import somewhere
from somewhere import IS_CHIEF
class Config(dict):
    def __getattr__(self, name):
        return self[name]
class Trainer:
    def __init__(self, rank, model):
        self.rank, self.model = rank, model
"""
DIFFERS = [
    "rank",
    "rank * 2 + 1",
    "str(rank)",
    "f'cuda:{rank}'",
    "torch.tensor(rank).T",
    "torch.full((2,), rank).sum().item()",
    "torch.device('cuda', rank)",
    "unknown(rank)",
    "args.rank",
    "vars(args)['rank']",
    "Config(vars(args)).rank",
    "Trainer(rank, None).rank",
    "dataclasses.replace(Settings(), seed=rank).seed",
    "Numbers(rank)",
    "len(unknown()[rank::world])",
    "Numbers(unknown()[rank::world])",
    "[0, rank][1]",
    "rank == 0",
    "'a' if rank == 0 else 'b'",
    "(1 if rank == 0 else None) is None",
    "{k.lower(): os.environ[k] for k in ('RANK', 'WORLD_SIZE')}['rank']",
]
UNKNOWN_WHETHER = [
    "unknown(vars(args)).width",
    "unknown(args).width",
    "unknown({'rank': rank, 'width': 8})['width']",
    "unknown(rank).width",
    "unknown(rank).width()",
    "Trainer(rank, None).other",
    "settings",
    "Numbers(settings)",
    "Numbers(settings if rank == 0 else unknown())",
    "unknown.is_main_process()",
    "unknown().is_global_zero",
    "unknown().is_master()",
    "somewhere.is_rank_0",
    "unknown().process_index",
    "IS_CHIEF",
    "unknown(Trainer(rank, None))",
]
SAME = [
    "world",
    "args.width",
    "vars(args)['width']",
    "Config(vars(args)).width",
    "Config(vars(args)).deep",
    "dict(rank=rank, width=8)['width']",
    "dataclasses.replace(Settings(), seed=rank).width",
    "[rank, 1][1]",
    "{k.lower(): os.environ[k] for k in ('RANK', 'WORLD_SIZE')}['world_size']",
    "nn.Linear(2, 2)",
    "nn.Linear(2, 2) is None",
    "(nn.Linear(2, 2) if args.deep else None) is not None",
    "(torch.randn(2) if args.deep else None) is None",
    "nn.Parameter(torch.randn(3))",
    "unknown().domain",
    "torch.zeros(2, device=torch.device('cuda', rank))",
    "torch.zeros(2, device=f'cuda:{rank}')",
    "torch.zeros(2).to(rank)",
    "torch.load('x.pt', map_location=f'cuda:{rank}')['step']",
    "unknown('x', device=f'cuda:{rank}')",
    "nn.parallel.DistributedDataParallel(nn.Linear(2, 2), device_ids=[rank])",
    "unknown().remaining()",
    "len(DistributedSampler(unknown, world, rank))",
    "len(DataLoader(unknown, 8, sampler=DistributedSampler(unknown, num_replicas=world, rank=rank)))",
    "torch.ones(2).to(torch.randn(2).dtype)",
]


@pytest.mark.parametrize("expression", DIFFERS)
def test_differs(expression: str, tmp_path: Path) -> None:
    assert value_of(tmp_path, expression, CONFIG).varies


@pytest.mark.parametrize("expression", UNKNOWN_WHETHER)
def test_a_part_of_what_differs_in_part_is_unknown(expression: str, tmp_path: Path) -> None:
    value = value_of(tmp_path, expression, CONFIG)
    assert value.may_vary
    assert not value.varies


@pytest.mark.parametrize("expression", SAME)
def test_is_the_same(expression: str, tmp_path: Path) -> None:
    assert not value_of(tmp_path, expression, f"{CONFIG}torch.manual_seed(rank)").may_vary


def test_every_label_has_one_nature() -> None:
    labels = [label for nature in NATURES.values() for label in nature]
    assert len(labels) == len(set(labels))


def test_what_is_said_of_an_object_alone_stays_there() -> None:
    for label in (*NATURES["own"], *FACTORS):
        assert labels_of([Value("list", frozenset({label}))]) == frozenset()


def test_a_truth_has_no_gradient() -> None:
    labels = frozenset({"graph", "forward:3", "part:9", "mean", "gradient", "data", "shard"})
    assert of_a_test([Value("tensor", labels)]) == {"data", "shard"}
