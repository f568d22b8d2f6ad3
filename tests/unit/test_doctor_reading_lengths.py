# ruff: noqa: E501 - scripts as people write them
"""Of what is known how many there are, in which order they come, and on what that depends."""

from __future__ import annotations

from pathlib import Path

import pytest

from reading_of import value_of, walked

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
