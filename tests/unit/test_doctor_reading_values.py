# ruff: noqa: E501 - scripts as people write them
"""What the static pass knows of values: how labels go over, what arithmetic means, what is bounded, what is imported."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from paceline.doctor.reading import read
from paceline.doctor.reading.flows import labels_of
from paceline.doctor.reading.flows import tested as of_a_test
from paceline.doctor.reading.machine import MAX_STEPS
from paceline.doctor.reading.meaning import named
from paceline.doctor.reading.program import Program
from paceline.doctor.reading.statements import Reader
from paceline.doctor.reading.trace import Trace
from paceline.doctor.reading.values import FACTORS, NATURES, Known, Value, combined

START = """
import argparse, math, operator, os, random
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--deep", action="store_true")
args = parser.parse_args()
args.rank = rank
"""


def walked(folder: Path, text: str) -> Reader:
    script = folder / "train.py"
    script.write_text(START + text)
    reader = Reader(Program(script))
    reader.walk()
    return reader


def value_of(folder: Path, expression: str, before: str = "") -> Value:
    return walked(folder, f"{before}\nx = {expression}\n").program.main.names["x"]


def found_in(folder: Path, text: str) -> set[str]:
    script = folder / "train.py"
    script.write_text(text)
    seen = read(script)
    assert seen.notes == ()
    return {finding.id for finding in seen.findings if finding.level != "advice"}


# --- what goes over into something that is made of a value

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


# --- arithmetic, whoever writes it

LOSS = "model = nn.Linear(2, 1)\nloss = F.mse_loss(model(torch.zeros(4, 2)), torch.zeros(4, 1))\n"
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


# --- what the lengths and orders of things are made of

LENGTHS = {
    "torch.linspace(-2, 2, 7).unsqueeze(1)": 7,
    "torch.sin(3 * torch.zeros(5)).flatten(1)": 5,
    "torch.zeros(5, 2).sum(1).clamp(0, 1).sqrt()": 5,
    "torch.arange(0, 10)": 10,
    "torch.arange(4)": 4,
    "torch.arange(0, 10, 3)": 4,
    "torch.randint(1, 9, (6, 2))": 6,
    "torch.zeros(5, 2)": 5,
    "Rows()": 12,
    "DistributedSampler(Rows())": 6,
    "DataLoader(Rows(), batch_size=5)": 3,
    "DataLoader(Rows(), batch_sampler=torch.utils.data.BatchSampler(DistributedSampler(Rows()), 4, drop_last=True))": 1,
}
ROWS = """
class Rows(Dataset):
    def __init__(self):
        self.ids = torch.arange(12)
        self.kinds = list({"a", "b"})
        self.endings = {".png", ".jpg"}
    def __len__(self):
        return self.ids.shape[0]
    def __getitem__(self, i):
        return self.ids[i]
class Names(Rows):
    def __getitem__(self, i):
        return self.kinds[i]
"""


@pytest.mark.parametrize("expression", LENGTHS)
def test_lengths(expression: str, tmp_path: Path) -> None:
    length = value_of(tmp_path, expression, ROWS).length
    assert length is not None
    assert length.only == LENGTHS[expression]


@pytest.mark.parametrize(
    "expression",
    ["torch.ones('abc')", "torch.zeros(2.5)", "DataLoader(Rows(), batch_size=0.5)", "torch.arange(0, 1, 0.1)"],
)
def test_what_is_no_length(expression: str, tmp_path: Path) -> None:
    assert value_of(tmp_path, expression, ROWS).length is None


def test_what_pathlib_writes_is_saved(tmp_path: Path) -> None:
    (event,) = walked(tmp_path, "from pathlib import Path\n(Path('out') / 'm.json').write_text('x')").trace.of("save")
    assert event.arguments["f"].only == "out/m.json"


ORDERED = {
    "{'a', 'b'}": False,
    "'a' in {'a', 'b'}": False,
    "sorted({'a', 'b'})": False,
    "list({1, 2})": False,
    "list({'a', 'b'})": True,
    "[n for n in {'a', 'b'}]": True,
    "{n: 0 for n in set(unknown)}.values()": True,
    "sorted(n for n in {'a', 'b'})": False,
    "Rows()": False,
    "Names()": True,
}


@pytest.mark.parametrize("expression", ORDERED)
def test_the_order_of_a_set(expression: str, tmp_path: Path) -> None:
    assert ("hash-order" in value_of(tmp_path, expression, ROWS).labels) is ORDERED[expression]


def test_one_of_a_ragged_batch_has_a_length_of_its_own(tmp_path: Path) -> None:
    before = "for images, targets in DataLoader(unknown, sampler=DistributedSampler(unknown)):\n    "
    sizes = value_of(tmp_path, "counts", before + "counts = torch.tensor([len(t) for t in targets]).sum()")
    whole = value_of(tmp_path, "count", before + "count = len(targets)")
    assert sizes.varies
    assert not whole.varies


CUT = "order = torch.tensor([t for doc in unknown[rank::world] for t in doc])\n"


RAGGED = {
    "[w for text in texts for w in text]": True,
    "[w for text in texts for w in text.split()]": True,
    "[doc for doc in docs if doc.sum() > 0]": True,
    "[doc for doc in docs]": False,
    "[doc for doc in docs if doc is not None]": False,
    "[row for doc in torch.stack(docs) for row in doc]": False,
    "[p for m in nn.Sequential(nn.Linear(2, 2)).modules() for p in m.parameters()]": False,
    "[p.grad for p in nn.Linear(2, 2).parameters() if p.grad is not None]": False,
}


@pytest.mark.parametrize("expression", RAGGED)
def test_what_has_a_length_of_its_own(expression: str, tmp_path: Path) -> None:
    held = "texts = unknown[rank::world]\ndocs = [torch.tensor(text) for text in texts]\n"
    assert ("own-size" in value_of(tmp_path, expression, held).labels) is RAGGED[expression]


def test_what_is_cut_alike_is_as_long_everywhere(tmp_path: Path) -> None:
    agreed = CUT + "n = torch.tensor(len(order))\ndist.all_reduce(n)\n"
    assert value_of(tmp_path, "len(order)", CUT).varies
    assert value_of(tmp_path, "len(order[: len(order) // 4])", CUT).varies
    assert not value_of(tmp_path, "len(order[:n])", agreed).labels & {"own-size"}
    assert not value_of(tmp_path, "len(order[torch.randperm(8)])", CUT).labels & {"own-size"}


@pytest.mark.parametrize(
    "expression", ["os.path.exists(args.width)", "os.path.isfile('x')", "Path('x').exists()", "unknown().is_dir()"]
)
def test_whether_there_is_a_file(expression: str, tmp_path: Path) -> None:
    assert "exists" in value_of(tmp_path, expression, "from pathlib import Path").labels


def test_cores_and_less(tmp_path: Path) -> None:
    assert "cores" in value_of(tmp_path, "max(1, os.cpu_count() - 1)").labels
    for limited in ("min(8, os.cpu_count())", "min([os.cpu_count() // 2, args.width])"):
        assert "cores" not in value_of(tmp_path, limited).labels


COUNTED = {
    "range(9)": (0, 1),
    "range(1, 9)": (1, 2),
    "range(2, 9, 3)": (2, 5),
    "enumerate(unknown)": (0, 1),
    "enumerate(unknown, 1)": (1, 2),
    "enumerate(unknown, start=5)": (5, 6),
}


@pytest.mark.parametrize("over", COUNTED)
def test_where_a_counter_starts(over: str, tmp_path: Path) -> None:
    target = "i, _" if over.startswith("enumerate") else "i"
    known = value_of(tmp_path, "i", f"for {target} in {over}:\n    i").known
    assert known is not None
    assert (known.at(0, 0), known.at(1, 1)) == COUNTED[over]


def test_pieces_of_what_a_rank_holds(tmp_path: Path) -> None:
    """However they are gone through, how many there are depends on the rank's own samples."""
    pieces = f"{CUT}class Pieces:\n    def __init__(self, rows):\n        self.rows = rows\n    def __iter__(self):\n        yield from self.rows.split(4)\n"
    for over in ("order.split(4)", "Pieces(order)", "enumerate(Pieces(order))", "range(0, len(order), 4)"):
        (event,) = walked(tmp_path, f"{pieces}for piece in {over}:\n    dist.barrier()\n").trace.of("collective")
        assert any(
            loop.count is not None and "own-size" in loop.count.labels and loop.count.varies for loop in event.loops
        )


# --- what is called where

CALLED = {
    "chosen": "log = print if rank == 0 else (lambda *a: None)\nlog('x')",
    "in an arm": "if rank == 0:\n    def log(x):\n        print(x)\nelse:\n    def log(x):\n        pass\nlog('x')",
    "decorated": "from pytorch_lightning.utilities import rank_zero_only\n@rank_zero_only\ndef log(x):\n    print(x)\nlog('x')",
    "a method": "from lib import rank_zero_only\nclass Logger:\n    @rank_zero_only\n    def log(self, x):\n        print(x)\nLogger().log('x')",
    "wrapped": "import functools\ndef main_only(f):\n    @functools.wraps(f)\n    def inner(*a):\n        if rank == 0:\n            return f(*a)\n    return inner\n@main_only\ndef log(x):\n    print(x)\nlog('x')",
    "replaced": "import builtins\nif rank != 0:\n    builtins.print = lambda *a: None\nprint('x')",
}


@pytest.mark.parametrize("how", CALLED)
def test_who_calls(how: str, tmp_path: Path) -> None:
    events = list(walked(tmp_path, CALLED[how]).trace.of("print"))
    assert [event.ranks for event in events] == [{0}]
    assert not events[0].everywhere


TOLD = [
    "logging.info('%s', rank)",
    "logging.getLogger(__name__).warning('x', rank)",
    "log.error(rank)",
    "logger.info('{}', rank)",
]


WRITTEN = {
    "nn.init.normal_(net.weight)": True,
    "net.weight.data.uniform_(-1, 1)": True,
    "net.weight[3] = torch.randn(2)": True,
    "net.weight.data += torch.randn(2)": True,
    "net.weight[3].normal_()": True,
    "[p.add_(torch.randn(2)) for p in net.parameters()]": True,
    "nn.init.zeros_(net.weight)": False,
    "net.weight[3] = 0.0": False,
    "net.weight.data.mul_(0.5)": False,
    "net.bias.data.normal_(generator=torch.Generator().manual_seed(0))": False,
}


@pytest.mark.parametrize("how", WRITTEN)
def test_what_changes_weights(how: str, tmp_path: Path) -> None:
    """By hand, with numbers that each rank draws for itself or not; the model is not another one for that."""
    reader = walked(tmp_path, f"net = nn.Linear(2, 9)\ntorch.manual_seed(rank)\n{how}\n")
    (event,) = reader.trace.of("weights")
    assert event.subject.fields["owner"].kind == "module"
    assert event.arguments["value"].varies is WRITTEN[how]
    assert not reader.program.main.names["net"].varies


def test_a_copy_has_parts_of_its_own(tmp_path: Path) -> None:
    names = walked(
        tmp_path,
        "import copy\nnet = nn.Sequential(nn.Linear(2, 2))\nweight = net[0].weight\ntwin = copy.deepcopy(net)\nalias = copy.copy(net)\n",
    ).program.main.names
    net, twin, alias = names["net"], names["twin"], names["alias"]
    assert twin.fields["0"] is not net.fields["0"]
    assert twin.fields["0"].fields["weight"].fields["owner"] is twin.fields["0"]
    assert alias.fields["0"] is net.fields["0"]


def test_what_is_made_is_not_changed_by_that(tmp_path: Path) -> None:
    """What its maker does to others while it is made is told."""
    maker = "class Maker:\n    def __init__(self, net):\n        self.net = net\n        net.head = nn.Linear(2, 2)\n        net.head.weight.requires_grad = False\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.head = nn.Linear(2, 2)\nMaker(Net())\n"
    events = list(walked(tmp_path, maker).trace.of("store"))
    assert [event.name for event in events] == ["head", "requires_grad"]


def test_levels_of_logging(tmp_path: Path) -> None:
    for how in ("logging.basicConfig(level=logging.INFO if rank == 0 else 0)", "logging.getLogger().setLevel(rank)"):
        (event,) = walked(tmp_path, f"import logging\n{how}").trace.of("logging")
        assert event.arguments["level"].varies


def test_under_a_lock_of_its_own(tmp_path: Path) -> None:
    lock = "import contextlib\n@contextlib.contextmanager\ndef file_lock():\n    yield\n"
    (event,) = walked(tmp_path, f"{lock}with file_lock():\n    dist.barrier()\n").trace.of("collective")
    assert [context.name for context in event.within] == ["file_lock()"]


def test_a_disk_of_its_own(tmp_path: Path) -> None:
    for folder in ("tempfile.gettempdir()", "os.environ.get('LOCAL_SCRATCH', '/x')", "os.getenv('TMPDIR')"):
        assert "own-disk" in value_of(tmp_path, f"os.path.join({folder}, 'x')", "import tempfile").labels


@pytest.mark.parametrize("call", TOLD)
def test_what_is_logged(call: str, tmp_path: Path) -> None:
    before = "import logging\nfrom loguru import logger\nlog = logging.getLogger()\n"
    (event,) = walked(tmp_path, before + call).trace.of("log")
    assert any(value.varies for value in event.arguments.values())


def test_what_a_text_calls(tmp_path: Path) -> None:
    meter = "class Meter:\n    def __str__(self):\n        dist.barrier()\n        return 'x'\n"
    for text in ("f'{Meter()}'", "str(Meter())", "print(Meter())"):
        assert walked(tmp_path, f"{meter}{text}").trace.any("collective")


def test_a_seed_that_somebody_else_sets_is_unknown(tmp_path: Path) -> None:
    assert "rng" in value_of(tmp_path, "torch.randn(2)").labels
    assert "rng" not in value_of(tmp_path, "torch.randn(2)", "from somewhere import set_seed\nset_seed(42)").labels


def test_a_changed_environment_is_told(tmp_path: Path) -> None:
    changes = (
        "os.environ['A'] = '1'",
        "os.environ.update(A='1')",
        "os.environ.update({'A': '1'})",
        "os.environ.update({}, A='1')",
    )
    for how in changes:
        (event,) = walked(tmp_path, how).trace.of("environment")
        assert event.name == "A"
    assert not walked(tmp_path, "os.environ.setdefault('A', '1')").trace.any("environment")


def test_replaced_output_is_told(tmp_path: Path) -> None:
    for how in ("import sys\nsys.stdout = open(os.devnull, 'w')", "import builtins\nbuiltins.print = unknown"):
        assert walked(tmp_path, how).trace.any("stdout")


def test_a_generator_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """However often a loop asks it for more: only an endless one goes through its loader again and again."""
    once = "def rows(loader):\n    for row in loader:\n        yield row\n"
    endless = "def rows(loader):\n    while True:\n        for row in loader:\n            yield row\n"
    use = "it = rows(DataLoader(unknown))\nfor step in range(9):\n    row = next(it)\n"
    for text, loops in ((once, 0), (endless, 1)):
        for event in walked(tmp_path, text + use).trace.of("iterate"):
            assert (event.name, len(event.loops)) == ("drawn", loops)


def test_a_buffer_under_an_open_condition_may_not_be_there(tmp_path: Path) -> None:
    net = "class Net(nn.Module):\n    def __init__(self, old):\n        super().__init__()\n        if old:\n            self.register_buffer('mask', torch.ones(2))\n"
    assert "maybe" in value_of(tmp_path, "Net(args.deep).mask", net).labels
    assert "mask" not in value_of(tmp_path, "Net(not hasattr(F, 'relu'))", net).fields


# --- imports

BARRIER = "import torch.distributed as dist\ndef wait(rank):\n    if rank == 0:\n        dist.barrier()\n"
SETUP = "import torch.distributed as dist\ndist.init_process_group('gloo')\nwait(dist.get_rank())\ndist.destroy_process_group()\n"
FROM_ELSEWHERE = {
    "parent of the file": "import os, sys\nsys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))\nfrom lib.ranks import wait\n",
    "joined": "import os, sys\nsys.path.append(os.path.join(os.path.dirname(__file__), '..'))\nfrom lib.ranks import wait\n",
    "pathlib": "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).resolve().parents[1]))\nfrom lib.ranks import wait\n",
    "parent": "import sys\nfrom pathlib import Path\nROOT = Path(__file__).resolve().parent.parent\nsys.path.append(str(ROOT / 'lib'))\nfrom ranks import wait\n",
}


@pytest.mark.parametrize("how", FROM_ELSEWHERE)
def test_imports_by_a_changed_path(how: str, tmp_path: Path) -> None:
    for name, text in {"lib/ranks.py": BARRIER, "tools/train.py": FROM_ELSEWHERE[how] + SETUP}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (finding,) = read(tmp_path / "tools/train.py").findings
    assert finding.id == "rank-conditional-collective"
    assert Path(finding.path).name == "ranks.py"


def test_imports_of_a_package_that_the_script_is_in(tmp_path: Path) -> None:
    """It is started by ``python -m project.tools.train``."""
    files = {
        "project/__init__.py": "",
        "project/ranks.py": BARRIER,
        "project/tools/__init__.py": "",
        "project/tools/relative.py": f"from ..ranks import wait\n{SETUP}",
        "project/tools/absolute.py": f"from project.ranks import wait\n{SETUP}",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("relative", "absolute"):
        (finding,) = read(tmp_path / f"project/tools/{name}.py").findings
        assert finding.id == "rank-conditional-collective"


def test_imports_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``python -m tools.train``: files are named as the user names the script."""
    for name, text in {"lib/ranks.py": BARRIER, "tools/train.py": f"from lib.ranks import wait\n{SETUP}"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read(tmp_path / "tools/train.py").findings == ()
    monkeypatch.chdir(tmp_path)
    (finding,) = read(Path("tools/train.py")).findings
    assert (finding.id, finding.path) == ("rank-conditional-collective", "lib/ranks.py")


STARRED = """
from math import *
from torch.distributed import *
from torch.nn.parallel import *
init_process_group("gloo")
if get_rank() == 0:
    barrier()
destroy_process_group()
"""


def test_everything_from_torch(tmp_path: Path) -> None:
    assert found_in(tmp_path, STARRED) == {"rank-conditional-collective"}


# --- what is bounded: a script may hold anything

GROWS = {
    "squares": "x = 3\n" + "x = x * x\n" * 40,
    "powers": "x = 3\nfor i in range(9):\n    x = x ** 31\n",
    "texts": "s = 'ab'\n" + "s = s + s\n" * 60,
    "replaced texts": "s = 'a' * 4000\n" + "s = s.replace('a', s)\n" * 30,
    "wide texts": "s = '{:>3000000000}'.format('x')\nt = '{:{}}'.format('x', 3000000000)\nu = '%3000000000d' % 1\n",
    "padded texts": "s = 'x'.zfill(3000000000) + 'x'.ljust(3000000000) + f'{1:>3000000000}'\n",
    "lists": "a = [1, 2]\n" + "a = a + a\na = [*a, *a]\na.extend(a)\na += a\n" * 30,
    "tuples": "a = (rank, 2)\nb = (rank, 2)\n"
    + "a, b = (a, a), (b, b)\n" * 40
    + "print(a == b, f'{a}')\nc = a if args.deep else b\n",
    "dicts": "d = {}\n" + "d = {'a': d, 'b': d}\n" * 60 + "unknown(d)\n",
    "objects": "class A:\n    def __init__(self, o):\n        self.a = self.b = o\na = A(1)\n"
    + "a = A(a)\n" * 60
    + "unknown(a)\n",
    "conditions": "a, b = args.width, args.deep\n"
    + "a = (a and b) or (b and a)\n" * 40
    + "if a:\n    dist.barrier()\n",
    "iterators": "z = [1]\n" + "z = zip(z, z)\n" * 40 + "for a in z:\n    pass\n",
    "modules": "m = nn.Sequential(nn.Linear(2, 2))\n" + "m = nn.Sequential(m, m)\n" * 40 + "m(torch.zeros(2))\n",
    "functions": "def f0(x):\n    return x\n"
    + "".join(f"def f{i}(x):\n    return f{i - 1}(f{i - 1}(x))\n" for i in range(1, 30))
    + "f29(1)\n",
    "counts": "x, y = list(range(10**9)), len(range(10**30))\nz = 1 << 10**9\nw = 10 ** 10**9\n",
}


CALLED_WRONGLY = [
    "range()",
    "range(*[])",
    "range(*unknown)",
    "enumerate()",
    "zip()",
    "min()",
    "min([])",
    "len()",
    "torch.div(1)",
    "loss.div()",
    "next()",
    "sorted()",
    "str()",
    "print()",
    "getattr(1)",
]


@pytest.mark.parametrize("call", CALLED_WRONGLY)
def test_what_is_called_wrongly_is_borne(call: str, tmp_path: Path) -> None:
    found_in(tmp_path, f"{START}{LOSS}for i in {call}:\n    dist.barrier()\nx = [i for i in {call}]\n")


@pytest.mark.parametrize("how", GROWS)
def test_what_grows_is_bounded(how: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(START + GROWS[how])
    began = time.process_time()
    assert read(script).looked
    assert time.process_time() - began < 5


def test_a_module_that_keeps_its_parent(tmp_path: Path) -> None:
    net = """
class Child(nn.Module):
    def __init__(self, parent):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.parents = [parent]
    def forward(self, x):
        return self.fc(x)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        for i in range(30):
            setattr(self, f"child{i}", Child(self))
        CHILDREN
    def forward(self, x):
        return self.c0(x)
model = nn.parallel.DistributedDataParallel(Net())
model(torch.zeros(2)).sum().backward()
""".replace("CHILDREN", "; ".join(f"self.c{i} = Child(self)" for i in range(12)))
    script = tmp_path / "train.py"
    script.write_text(START + net)
    began = time.process_time()
    assert read(script).looked
    assert time.process_time() - began < 3


def test_numbers_and_texts_are_bounded() -> None:
    assert combined(lambda a, b: a * b, Known((2**40,)), Known((2**40,))) is None
    assert combined(lambda a, b: a + b, Known(("x" * 4000,)), Known(("y" * 4000,))) is None
    deep: tuple[object, ...] = (1,)
    for _ in range(40):
        deep = (deep, deep)
    assert combined(str, Known((deep,))) is None


def test_time_is_bounded(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("x = 1\n" * 5000)
    reader = Reader(Program(script))
    reader.until_s = time.monotonic() - 1
    reader.walk()
    assert reader.steps_left <= 0  # and it says so: "read in part"
    assert len(reader.program.main.names) <= 3
    late = Trace(until_s=time.monotonic() - 1)
    with pytest.raises(TimeoutError):
        late.any("step")


def test_an_ordinary_script_is_read_to_its_end(tmp_path: Path) -> None:
    reader = walked(tmp_path, "for i in range(1000):\n    loss = unknown(i)\nlast = 1\n")
    assert reader.program.main.names["last"].only == 1
    assert reader.steps_left > MAX_STEPS * 0.99


def test_nothing_of_the_reader_is_left_behind(tmp_path: Path) -> None:
    before = sys.getrecursionlimit(), Path.cwd(), list(sys.path)
    found_in(tmp_path, "import sys\nsys.path.insert(0, '/nowhere')\n")
    assert (sys.getrecursionlimit(), Path.cwd(), list(sys.path)) == before
