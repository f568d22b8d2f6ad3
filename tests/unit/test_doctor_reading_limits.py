"""What is bounded: a script may hold anything, of any length."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from paceline.doctor.reading import machine, read
from paceline.doctor.reading.machine import MAX_STEPS
from paceline.doctor.reading.program import Program
from paceline.doctor.reading.statements import Reader
from paceline.doctor.reading.trace import Trace
from paceline.doctor.reading.values import Known, combined
from reading_of import LOSS, START, found_in, walked

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
    "[setattr(loss, 'item', loss.item), loss.item()]",
    "[setattr(model, 'state_dict', model.state_dict), model.state_dict()]",
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
    reader.until_s = time.thread_time() - 1
    reader.walk()
    assert reader.steps_left <= 0  # and it says so: "read in part"
    assert len(reader.program.main.names) <= 3
    late = Trace(until_s=time.thread_time() - 1)
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


MISSING = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.zeros(64, 4))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for (x,) in loader:
        optimizer.zero_grad()
        (model(x).mean() * dist.get_world_size()).backward()
        optimizer.step()
"""


def test_what_is_missing_is_told_only_where_all_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may stand in what was not read."""
    (tmp_path / "train.py").write_text(MISSING + "x = 1\n" * 3000)
    whole = read(tmp_path / "train.py")
    assert {"missing-set-epoch", "group-not-destroyed"} <= {finding.id for finding in whole.findings}
    assert whole.notes == ()
    monkeypatch.setattr(machine, "MAX_STEPS", 2000)
    part = read(tmp_path / "train.py")
    assert not {"missing-set-epoch", "group-not-destroyed"} & {finding.id for finding in part.findings}
    assert any("read in part" in note for note in part.notes)


def test_loops_in_loops_are_gone_round_a_few_times(tmp_path: Path) -> None:
    def steps(depth: int) -> int:
        loops = "\n".join("    " * level + f"for i{level} in range(unknown()):" for level in range(depth))
        body = "\n".join("    " * depth + f"n{k} = n{k} + unknown(n{k})" for k in range(50))
        start = "\n".join(f"n{k} = 0" for k in range(50))
        reader = walked(tmp_path, f"{start}\n{loops}\n{body}\n")
        return machine.MAX_STEPS - reader.steps_left

    assert steps(8) < 6 * steps(1)  # it would be 256 times as many


def test_a_long_script_is_read_to_its_end_all_the_same(tmp_path: Path) -> None:
    """Functions that call each other twice, sixteen deep: too much to read as often as it is called."""
    body = "\n".join(
        f"def f{i}(x):\n    for a in x:\n        x = f{i - 1}(x) + f{i - 1}(a)\n    return x" for i in range(1, 17)
    )
    (tmp_path / "train.py").write_text(f"def f0(x):\n    return x + 1\n{body}\nf16(unknown())\n{MISSING}")
    began = time.process_time()
    seen = read(tmp_path / "train.py")
    assert time.process_time() - began < 10
    assert {finding.id for finding in seen.findings if finding.level == "error"} == {"loss-scaled-by-world-size"}
    assert any("read in part" in note for note in seen.notes)
