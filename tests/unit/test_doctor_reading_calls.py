# ruff: noqa: E501 - scripts as people write them
"""What is called where, and what it changes there: decorators, weights, locks, seeds, logs, generators."""

from __future__ import annotations

from pathlib import Path

import pytest

from reading_of import value_of, walked

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
