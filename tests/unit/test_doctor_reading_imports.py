# ruff: noqa: E501 - scripts as people write them
"""Which files the static pass reads besides the script, and what names stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.doctor.reading import read
from reading_of import found_in

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


def test_a_place_is_named_with_the_file_that_it_is_in(tmp_path: Path) -> None:
    """The condition stands in one file, what it keeps a rank from in another."""
    (tmp_path / "steps.py").write_text("def backward(loss):\n    loss.backward()\n")
    script = tmp_path / "train.py"
    script.write_text(
        "from steps import backward\nimport torch, torch.distributed as dist\nfrom torch import nn\n"
        "from torch.utils.data import DataLoader, DistributedSampler, TensorDataset\ndist.init_process_group('gloo')\n"
        "data = TensorDataset(torch.zeros(64, 4))\nsampler = DistributedSampler(data)\n"
        "model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))\n"
        "for (x,) in DataLoader(data, sampler=sampler):\n    loss = model(x).mean()\n"
        "    if loss.item() < 1:\n        backward(loss)\ndist.destroy_process_group()\n"
    )
    (finding,) = (finding for finding in read(script).findings if finding.level == "error")
    assert (finding.id, finding.path, finding.line) == ("rank-local-skip", str(script), 11)
