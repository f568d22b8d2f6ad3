# ruff: noqa: E501 - scripts as people write them
"""The static pass itself: what it reads, what it never does, and how it bears whatever it is given."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from paceline.doctor import reading
from paceline.doctor.reading import CANNOT, Read, read
from paceline.doctor.reading.flows import labels_of
from paceline.doctor.reading.program import Program
from paceline.doctor.reading.statements import Reader
from paceline.doctor.reading.values import LABELS
from paceline.errors import UsageError

CASES = Path(__file__).parents[3] / "shared" / "doctor_cases"
FOUND = """
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.barrier()
dist.destroy_process_group()
"""


def looked_at(folder: Path, text: str | bytes, **others: str) -> Read:
    """Reads a script, with other files beside it."""
    for name, content in others.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    script = folder / "train.py"
    script.write_bytes(text if isinstance(text, bytes) else text.encode())
    seen = read(script)
    assert not any(CANNOT in note for note in seen.notes)
    return seen


def ids(seen: Read) -> set[str]:
    return {finding.id for finding in seen.findings}


@pytest.mark.skipif(not CASES.is_dir(), reason="the cases lie beside the repository")
def test_the_cases() -> None:
    """Each wrong script is found, each right one is left alone."""
    missed, alarmed = [], []
    for script in sorted(CASES.glob("*.py")):
        expected = script.read_text().splitlines()[0].removeprefix("# expect:").strip()
        findings = read(script).findings
        if expected != "clean":
            missed += [script.name] if expected not in {finding.id for finding in findings} else []
        else:
            alarmed += [(script.name, finding.id) for finding in findings if finding.level != "advice"]
    assert missed == []
    assert alarmed == []


def test_a_finding_says_where(tmp_path: Path) -> None:
    (finding,) = looked_at(tmp_path, FOUND).findings
    assert (finding.id, finding.line, finding.path) == ("rank-conditional-collective", 5, str(tmp_path / "train.py"))
    assert "dist.barrier()" in finding.evidence
    assert finding.seen == "source"


def test_nothing_is_run_or_imported(tmp_path: Path) -> None:
    trap = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    seen = looked_at(
        tmp_path, trap + "import helper\nfrom package import part\n" + FOUND, helper=trap, package__part=trap
    )
    assert ids(seen) == {"rank-conditional-collective"}
    assert not (tmp_path / "ran").exists()
    assert not {"helper", "package"} & set(sys.modules)


# --- what it understands

SETUP = """
import os
import torch.distributed as dist
def setup():
    dist.init_process_group("gloo")
    return dist.get_rank()
def is_main(rank):
    return rank == 0
"""

MEANS_RANK_0 = {
    "import": "from utils import setup, is_main\nif is_main(setup()):\n    dist.barrier()",
    "import as": "import utils as u\nif u.is_main(u.setup()):\n    dist.barrier()",
    "star": "from utils import *\nif is_main(setup()):\n    dist.barrier()",
    "package": "from lib.ranks import setup\nif not setup():\n    dist.barrier()",
    "environment": "import os\ndist.init_process_group()\nif int(os.getenv('RANK', '0')) == 0:\n    dist.barrier()",
    "early return": "from utils import setup\ndef f():\n    if setup() != 0:\n        return\n    dist.barrier()\nf()",
    "lambda": "from utils import setup\nr = setup()\nmain = lambda: r == 0\nif main():\n    dist.barrier()",
    "attribute": "from utils import setup\nclass C:\n    def __init__(self):\n        self.main = setup() == 0\n"
    "    def go(self):\n        if self.main:\n            dist.barrier()\nC().go()",
    "property": "from utils import setup\nclass C:\n    def __init__(self):\n        self.rank = setup()\n    @property\n"
    "    def main(self):\n        return self.rank == 0\nc = C()\nif c.main:\n    dist.barrier()",
    "inherited": "from utils import setup\nclass B:\n    def __init__(self, rank):\n        self.rank = rank\nclass C(B):\n"
    "    def __init__(self):\n        super().__init__(setup())\nif C().rank == 0:\n    dist.barrier()",
    "dataclass": "from dataclasses import dataclass\nfrom utils import setup\n@dataclass\nclass E:\n    rank: int\n"
    "    world: int = 2\ne = E(setup())\nif e.rank == 0:\n    dist.barrier()",
    "dict": "from utils import setup\ncfg = {'rank': setup()}\nif cfg['rank'] == 0:\n    dist.barrier()",
    "namespace": "import argparse\nfrom utils import setup\np = argparse.ArgumentParser()\na = p.parse_args()\n"
    "a.rank = setup()\nif a.rank == 0:\n    dist.barrier()",
    "partial": "import functools\nfrom utils import setup\ndef f(rank, x):\n    if rank == 0:\n        dist.barrier()\n"
    "g = functools.partial(f, setup())\ng(1)",
    "closure": "from utils import setup\ndef outer():\n    rank = setup()\n    def inner():\n        if rank == 0:\n"
    "            dist.barrier()\n    inner()\nouter()",
    "walrus": "from utils import setup\nif (rank := setup()) == 0:\n    dist.barrier()",
    "conditional expression": "from utils import setup\ndist.barrier() if setup() == 0 else None",
    "match": "from utils import setup\nmatch setup():\n    case 0:\n        dist.barrier()\n    case _:\n        pass",
    "global": "from utils import setup\nRANK = None\ndef start():\n    global RANK\n    RANK = setup()\nstart()\n"
    "if RANK == 0:\n    dist.barrier()",
    "finally": "from utils import setup\nr = setup()\ntry:\n    pass\nfinally:\n    if r == 0:\n        dist.barrier()",
    "context manager": "import contextlib\nfrom utils import setup\n@contextlib.contextmanager\ndef first(r):\n"
    "    if r == 0:\n        yield\n        dist.barrier()\n    else:\n        yield\nwith first(setup()):\n    pass",
    "decorated": "import torch\nfrom utils import setup\n@torch.no_grad()\ndef f(r):\n    if r == 0:\n        dist.barrier()\n"
    "f(setup())",
    "record": "from torch.distributed.elastic.multiprocessing.errors import record\nfrom utils import setup\n@record\n"
    "def main():\n    if setup() == 0:\n        dist.barrier()\nif __name__ == '__main__':\n    main()",
    "handed over": "import fire\nfrom utils import setup\ndef main(x=1):\n    if setup() == 0:\n        dist.barrier()\n"
    "fire.Fire(main)",
    "spawned": "import torch.multiprocessing as mp\ndef work(rank, n):\n    dist.init_process_group('gloo', rank=rank, "
    "world_size=n)\n    if rank == 0:\n        dist.barrier()\nif __name__ == '__main__':\n    mp.spawn(work, (2,), 2)",
    "processes": "import torch.multiprocessing as mp\ndef work(rank, n):\n    dist.init_process_group('gloo', rank=rank, "
    "world_size=n)\n    if rank == 0:\n        dist.barrier()\nfor r in range(2):\n    mp.Process(target=work, args=(r, 2)).start()",
    "another name": "from torch import distributed as D\nD.init_process_group()\nif D.get_rank() == 0:\n    D.barrier()",
    "coroutine": "import asyncio\nfrom utils import setup\nasync def main():\n    if setup() == 0:\n        dist.barrier()\n"
    "asyncio.run(main())",
}


@pytest.mark.parametrize("how", MEANS_RANK_0)
def test_follows_the_rank(how: str, tmp_path: Path) -> None:
    """However it is asked for, a barrier on rank 0 alone is one."""
    text = "import torch.distributed as dist\n" + MEANS_RANK_0[how]
    assert "rank-conditional-collective" in ids(looked_at(tmp_path, text, utils=SETUP, lib__ranks=SETUP))


ON_EVERY_RANK = {
    "both arms": "if r == 0:\n    dist.barrier()\nelse:\n    dist.barrier()",
    "one after another": "if r != 0:\n    dist.barrier()\nprint(r)\nif r == 0:\n    dist.barrier()",
    "a group of its own": "g = dist.new_group([0])\nif r == 0:\n    dist.barrier(group=g)",
    "not a condition on the rank": "import os\nif os.path.exists('x'):\n    dist.barrier()",
    "always true": "if dist.get_world_size() > 1:\n    dist.barrier()",
    "raised": "if r not in (0, 1):\n    raise ValueError\ndist.barrier()",
    "sent": "import torch\nt = torch.zeros(1)\nif r == 0:\n    dist.send(t, 1)\nelse:\n    dist.recv(t, 0)",
    "reduced": "import torch\nt = torch.tensor(r)\ndist.all_reduce(t)\nif t.item() > 1:\n    dist.barrier()",
}


@pytest.mark.parametrize("how", ON_EVERY_RANK)
def test_is_silent_where_all_come(how: str, tmp_path: Path) -> None:
    text = SETUP + "r = setup()\n" + ON_EVERY_RANK[how] + "\ndist.destroy_process_group()\n"
    assert ids(looked_at(tmp_path, text)) == set()


def test_a_flag_that_sets_up_ranks_is_taken_for_set(tmp_path: Path) -> None:
    """And then for every other question of it."""
    text = """
import argparse, torch
import torch.distributed as dist
from torch import nn
p = argparse.ArgumentParser()
p.add_argument("--ddp", action="store_true")
a = p.parse_args()
net = nn.Linear(2, 2)
if a.ddp:
    dist.init_process_group("gloo")
    net = nn.parallel.DistributedDataParallel(net)
plain = net.module if a.ddp else net
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    plain(torch.zeros(2)).sum().backward(); opt.step(); opt.zero_grad()
if a.ddp:
    dist.destroy_process_group()
"""
    assert ids(looked_at(tmp_path, text)) == {"ddp-forward-bypassed"}


def test_every_label_is_explained(tmp_path: Path) -> None:
    """What went into a value is said in words that one table explains, and each of these is used."""
    source = "".join(path.read_text() for path in Path(reading.__file__).parent.glob("*.py") if path.stem != "values")
    assert [label for label in LABELS if f'"{label}"' not in source] == []
    for script in sorted(CASES.glob("*.py")):
        reader = Reader(Program(script))
        reader.walk()
        seen = {label for event in reader.trace.events for label in event.labels | labels_of(event.arguments.values())}
        assert {
            label for label in seen - set(LABELS) if not label.startswith(("forward:", "part:", "count-of-"))
        } == set()


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_this_projects_examples_are_right(script: Path) -> None:
    assert [finding for finding in read(script).findings if finding.level != "advice"] == []


# --- what it bears

BROKEN = {
    "syntax error": b"def f(:\n",
    "null byte": b"x = 1\0\n",
    "not text": b"\xff\xfe\x00x = 'a'\n",
    "unknown encoding": b"# -*- coding: nonsense -*-\n",
    "unfinished": b"x = (\n",
    "tabs and spaces": b"if 1:\n\tx = 1\n        y = 2\n",
    "nested too deeply": b"(" * 3000 + b")" * 3000,
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_not_python_is_told(how: str, tmp_path: Path) -> None:
    seen = looked_at(tmp_path, BROKEN[how])
    assert not seen.looked
    assert seen.findings == ()
    assert len(seen.notes) == 1
    assert str(tmp_path / "train.py") in seen.notes[0]


def test_a_broken_neighbour_is_a_note(tmp_path: Path) -> None:
    seen = looked_at(tmp_path, "import helper\nfrom helper import x\n" + FOUND, helper="def f(:\n")
    assert ids(seen) == {"rank-conditional-collective"}
    assert seen.looked
    assert any("helper.py" in note for note in seen.notes)


@pytest.mark.parametrize("name", ["missing.py", "."])
def test_no_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read a script"):
        read(tmp_path / name)


STRANGE: dict[str, str | bytes] = {
    "empty": "",
    "byte order mark": "\ufeff" + FOUND,
    "latin": "# coding: latin-1\n# \xe9\n".encode("latin-1") + FOUND.encode(),
    "carriage returns": FOUND.replace("\n", "\r\n"),
    "endless recursion": "def f(x):\n    return g(x) + f(x - 1)\ndef g(x):\n    return f(x)\nf(3)\n",
    "a class that is its own base": "class A(A):\n    pass\nA().x.y()\n",
    "a list that holds itself": "a = []\na.append(a)\nprint(a, *a, **{})\nfor b in a:\n    a = b\n",
    "modules that import each other": "import one\nimport two\none.f()\n",
    "stars": "def f(*a, **k):\n    return f(*a, **k)\nf(*[1, *[2]], **{'x': 1}, **dict(y=2))\na, *b = 1, 2, 3\n",
    "patterns": "match [1, {'a': 2}]:\n    case [int(x), {'a': y, **rest}] if x > 0:\n        pass\n    case (1 | 2) as z:\n"
    "        pass\n    case str() | None:\n        pass\n    case A(b=c):\n        pass\n",
    "generators": "def g():\n    x = yield\n    yield from g()\n    return x\nlist(g())\nfor x in g():\n    break\n"
    "async def a():\n    async with b() as c:\n        async for d in c:\n            yield d\n    [e async for e in c]\n",
    "exception groups": "try:\n    pass\nexcept* ValueError as e:\n    raise\n",
    "decorators": "@(lambda f: f)\n@x.y(1)[0]\ndef f(a, /, b=1, *, c: int = 2) -> None: ...\nf(1)\n",
    "huge numbers": "x = 10 ** 10 ** 10\ny = 'a' * 10 ** 12\nz = [0] * 10 ** 12\nw = 1 << 10 ** 9\nfor i in range(10 ** 30):\n    pass\n",
    "division by zero": "x = 1 / 0\ny = [][5]\nz = {}['a']\nint('x')\n'a' + 1\n",
    "shadowed names": "print = 3\nlen = dist = None\nlen(print)\ndist.barrier()\n",
    "deep attribute": "x" + ".y" * 2000 + "\n",
    "long sum": "x = " + " + ".join("a" for _ in range(4000)) + "\n",
    "long chain": "x" + ".f()" * 900 + "\n",
    "metaclass": "class M(type):\n    def __call__(c):\n        return c\nclass C(metaclass=M):\n    x = y = 1\nC()()\n",
    "exec": "exec(open('x').read())\neval('1')\n__import__('os').system('x')\nglobals()['a'] = 1\nlocals().update(b=2)\n",
    "del and with": "with open('a') as f, open('b') as (g, h):\n    del f, g[0], h.x\n",
    "nothing is known": "from nowhere import *\nimport no.thing as t\nfor a.b[c] in t:\n    a.b += c if d else e[f:g, ..., h]\n",
    "names of nobody": "from nowhere import *\nfor f in (api, unknown, function, back, parser, method, environment, name):\n    f(1)\n"
    "api(1)\nunknown(2)\nfunction(f, x=1)\nback()\nparser(a)\nenvironment('x', 1)\nsuper(1)\nlen()\nrange()\nisinstance()\n"
    "enumerate()\nzip()\nmap(f)\ngetattr(x)\nsetattr(x)\nnext()\nsorted()\nsum()\niter()\ntqdm.trange()\n",
    "torch without arguments": "import torch, torch.distributed as d, os, functools, copy, argparse\nfrom torch import nn\n"
    "for f in (d.all_reduce, d.broadcast, nn.Linear, nn.Sequential, nn.ModuleList, torch.save, torch.load, torch.randn):\n    f()\n"
    "nn.parallel.DistributedDataParallel()\ntorch.utils.data.DataLoader()\ntorch.utils.data.random_split()\ncopy.deepcopy()\n"
    "os.environ.get()\nos.environ[1]\nos.environ.update()\nfunctools.partial()\ntorch.multiprocessing.spawn()\nd.init_process_group()\n"
    "argparse.ArgumentParser().add_argument()\ntorch.optim.SGD().step()\nnn.Module().register_buffer()\nnn.Linear(1, 1).apply()\n"
    "torch.zeros(3).chunk()\ntorch.zeros(3).split(0)\ntorch.zeros(()).size()\ntorch.utils.data.DistributedSampler().set_epoch()\n",
    "type statements": "x: int\ny: 'T' = 1\nglobal z\nz = lambda *a, k=1, **kw: (yield)\n",
}


@pytest.mark.parametrize("how", STRANGE)
def test_any_syntax_is_borne(how: str, tmp_path: Path) -> None:
    """With torch's names around it or not."""
    others = {"one": "import two\ndef f():\n    return two.g()\n", "two": "import one\ndef g():\n    return one.f()\n"}
    text = STRANGE[how]
    assert looked_at(tmp_path, text, **others).looked
    if isinstance(text, str) and "global" not in text:
        assert looked_at(tmp_path, text.lstrip("\ufeff") + "\n" + FOUND.replace("\r", ""), **others).looked


def test_its_own_source_is_borne(tmp_path: Path) -> None:
    """Real code of all kinds: the standard library's largest modules."""
    folder = Path(os.__file__).parent
    for name in ("argparse", "typing", "inspect", "asyncio/base_events", "dataclasses", "unittest/mock"):
        assert looked_at(tmp_path, (folder / f"{name}.py").read_text()).looked


def test_ten_thousand_lines(tmp_path: Path) -> None:
    body = "\n".join(
        f"def f{i}(x, model, n={i}):\n    for a in range(n):\n        for b in range(a):\n            x = model(x) + f{i - 1}(x, model)\n"
        f"    if x.sum() > {i}:\n        return x\n    return f{i // 2}(x, model)"
        for i in range(1, 1500)
    )
    began = time.process_time()
    seen = looked_at(tmp_path, f"def f0(x, model): return x\n{body}\nf1499(1, print)\n" + FOUND)
    assert time.process_time() - began < 10
    assert seen.looked
    assert seen.findings or any("read in part" in note for note in seen.notes)
