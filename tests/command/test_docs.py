"""The pages of docs/ do what they say: their code runs, their commands print what stands under them.

How a page is followed, from top to bottom, in a folder of its own:

* A ``python`` or ``yaml`` block that begins with ``# name.py`` is written to that file.
* A ``diff`` block changes a file: the first names both (``--- plain.py``, ``+++ train.py``), those behind it go on with
  the second. Where the page later shows the whole file, that must be what the changes have made of it.
* Any other ``python`` block is run, all of a page in one process, as the cells of a notebook.
* Each ``$ command`` of a ``console`` block is run; it must succeed unless an error is shown.
* What stands under a command, or in a ``text`` block right behind a cell, must come out: see `alike`. A line ``...``
  stands for any lines.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from driving import DEADLINE_S, Started, script
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.agreement import check_data
from paceline.errors import PacelineError
from paceline.lanes import lanes_of
from paceline.team import Team, ThreadTeam
from paceline.tracked import Tracked

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md") if path.name not in ("README.md", "decisions.md"))
SURROUNDINGS = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "CUDA_VISIBLE_DEVICES": "",  # what the pages show has come out of a CPU
    "OMP_NUM_THREADS": "1",  # as torchrun sets it, so that scripts in plain torch do not fight for the cores
}
LONG = {"failover.md", "from-accelerate.md", "from-fabric.md", "memory.md"}
"""Pages that take minutes: with ``--long``. What they show has tests of its own, or stands on other pages too."""
CELLS = """
import json, sys
names = {"__name__": "__main__"}
for line in sys.stdin:
    cell = json.loads(line)
    exec(compile("\\n" * (cell["line"] - 1) + cell["source"], cell["page"], "exec"), names)
    print(end="\\0", flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block; ``line``: where its first line stands in the page."""

    language: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [Block(language=m[1], text=m[2], line=page.count("\n", 0, m.start(2)) + 1) for m in found]


class Reader:
    """Does what a page says, in ``folder``."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._cells = Cells(name, folder)
        self._changed: Path | None = None
        self._digests: Mapping[str, str] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._cells.close()

    def follow(self, page: str) -> None:
        """All blocks of the page, one after the other."""
        printed: str | None = None
        for block in blocks(page):
            place = f"{self._name}, line {block.line}"
            told, printed = printed, None
            match block.language:
                case "python" | "yaml" if name := re.match(r"# (\S+\.\w+)\n", block.text):
                    self._write(name[1], block.text, place)
                case "python":
                    printed = self._cells.run(block)
                case "text":
                    assert told is not None, f"{place}: nothing has printed this"
                    self._expect(block.text, told, place)
                case "diff":
                    self._change(block.text, place)
                case "console":
                    self._type(block.text, place)
                case language:
                    raise AssertionError(f"{place}: nobody runs a block in {language or 'no language'}")

    def _write(self, name: str, text: str, place: str) -> None:
        path = self._folder / name
        if path == self._changed:
            assert path.read_text() == text, f"{place}: the changes above give\n{path.read_text()}"
        path.write_text(text)

    def _change(self, text: str, place: str) -> None:
        lines = text.splitlines(keepends=True)
        if lines[0].startswith("--- "):
            old, new = (line.split()[1] for line in lines[:2])
            self._changed = self._folder / new
            self._changed.write_text((self._folder / old).read_text().replace(f"# {old}\n", f"# {new}\n"))
            lines = lines[2:]
        assert self._changed is not None, f"{place}: no file to change"
        self._changed.write_text(changed(self._changed.read_text(), lines, place))

    def _type(self, text: str, place: str) -> None:
        for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
            ended = self._start(command).wait()
            if "error: " in expected:
                assert ended.code, f"{place}: no error of $ {command}\n{ended.out}{ended.err}"
                self._expect(expected, ended.out + ended.err, place)
            else:
                ended.check()
                self._expect(expected, ended.out, place)

    def _start(self, command: str) -> Started:
        """As a shell would; without one where it has nothing to do but to start Python."""
        program, *words = shlex.split(command)
        started = {"paceline": ("-m", "paceline"), "python": (), "torchrun": ("-m", "torch.distributed.run")}
        if program not in started or set(command) & set("|&;<>$*"):
            return Started(["bash", "-c", command], self._folder, SURROUNDINGS)
        return script(*started[program], *words, cwd=self._folder, extra=SURROUNDINGS)

    def _expect(self, expected: str, found: str, place: str) -> None:
        digests = alike(expected.splitlines(), found.splitlines(), self._digests)
        assert digests is not None, f"{place}: expected\n{expected}\nfound\n{found}"
        self._digests = digests


class Cells:
    """One Python process for all cells of a page; started when there is one."""

    def __init__(self, page: str, folder: Path) -> None:
        self._page, self._folder, self._errors = page, folder, folder / "cells.err"
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, block: Block) -> str:
        """What the cell prints."""
        if self._process is None:
            with self._errors.open("wb") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, "-W", "error", "-c", CELLS],
                    cwd=self._folder,
                    env={**os.environ, **SURROUNDINGS},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
        assert self._process.stdin is not None and self._process.stdout is not None
        cell = {"source": block.text, "line": block.line, "page": self._page}
        deadline = threading.Timer(DEADLINE_S, self._process.kill)
        deadline.start()
        try:
            self._process.stdin.write(json.dumps(cell).encode() + b"\n")
            self._process.stdin.flush()
            printed = bytearray()
            while (byte := self._process.stdout.read(1)) not in (b"\0", b""):
                printed += byte
        finally:
            deadline.cancel()
            deadline.join()
        assert byte, f"{self._page}, the cell in line {block.line}:\n{printed.decode()}\n{self._errors.read_text()}"
        return printed.decode()

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=DEADLINE_S)


def changed(text: str, change: Sequence[str], place: str = "") -> str:
    """``text`` after a change in the manner of ``diff``."""
    old = "".join(line[1:] or "\n" for line in change if line[0] in " -\n")
    new = "".join(line[1:] or "\n" for line in change if line[0] in " +\n")
    assert text.count(old) == 1, f"{place}: these lines stand {text.count(old)} times in\n{text}"
    return text.replace(old, new)


TIMES = re.compile(r"[\d.]+[kM]? (?:samples|tokens)/s|eta \d+:\d\d|\d+\.\d+ s\b|(?<=[0-9a-f]{16}) +\d+\.\d\b")
WORDS = re.compile(r"\b[0-9a-f]{16,64}\b|\d+\.\d+(?:e[+-]?\d+)?|\d+|[^\s\d]+")


def alike(expected: Sequence[str], found: Sequence[str], digests: Mapping[str, str]) -> dict[str, str] | None:
    """Whether lines came out as the page has them: the digests of the page so far, with what they are here.

    Another processor rounds otherwise: numbers with a point may differ by 5 %, and a digest may be another, but equal
    ones stay equal and different ones different, over the whole page. Times are not compared.
    """
    if not expected:
        return None if found else dict(digests)
    if expected[0] == "...":
        rests = (alike(expected[1:], found[start:], digests) for start in range(len(found) + 1))
        return next((known for known in rests if known is not None), None)
    if not found or (known := alike_line(expected[0], found[0], digests)) is None:
        return None
    return alike(expected[1:], found[1:], known)


def alike_line(expected: str, found: str, digests: Mapping[str, str]) -> dict[str, str] | None:
    wanted, here = (WORDS.findall(TIMES.sub("(time)", line)) for line in (expected, found))
    known = dict(digests)
    if len(wanted) != len(here):
        return None
    for want, have in zip(wanted, here, strict=True):
        if re.fullmatch(r"[0-9a-f]{16,64}", want):
            same = len(want) == len(have) and known.setdefault(want, have) == have
        elif re.fullmatch(r"\d+\.\d.*", want) and re.fullmatch(r"\d+\.\d.*", have):
            same = math.isclose(float(want), float(have), rel_tol=0.05)
        else:
            same = want == have
        if not same:
            return None
    return known if len(set(known.values())) == len(known) else None


@pytest.mark.parametrize(
    "name", [pytest.param(page, marks=pytest.mark.long) if page in LONG else page for page in PAGES]
)
def test_a_page_does_what_it_says(name: str, tmp_path: Path) -> None:
    with Reader(name, tmp_path) as reader:
        reader.follow((DOCS / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "page",
    [
        "```python\nprint(1)\n```\n```text\n2\n```\n",
        "```python\nprint(1)\n```\n```text\n1\n...\n2\n```\n",
        "```python\n1 / 0\n```\n",
        "```text\n1\n```\n",
        "```console\n$ echo 1\n2\n```\n",
        "```console\n$ echo 1\n```\n",
        "```console\n$ exit 3\n```\n",
        "```console\n$ echo error: one\nerror: one\n```\n",
        "```console\n$ echo 0123456789abcde0; echo 0123456789abcdef\n0123456789abcdef\n0123456789abcdef\n```\n",
        "```console\n$ echo 0123456789abcdef; echo 0123456789abcdef\n0123456789abcde0\n0123456789abcdef\n```\n",
        "```console\n$ echo 0.50\n0.60\n```\n",
        "```python\n# a.py\n1\n```\n```diff\n--- a.py\n+++ b.py\n-2\n+3\n```\n",
        "```python\n# a.py\n1\n```\n```diff\n--- a.py\n+++ b.py\n-1\n+3\n```\n```python\n# b.py\n4\n```\n",
        "```\nnothing\n```\n",
    ],
)
def test_a_page_that_is_wrong_is_noticed(page: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError), Reader("page", tmp_path) as reader:
        reader.follow(page)


def test_the_index_has_every_page_and_links_lead_somewhere() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in DOCS.glob("*.md")} - {"README.md"} <= set(re.findall(r"\]\((\S+?)\)", index))
    for page in DOCS.glob("*.md"):
        for link in re.findall(r"\]\((\S+?)\)", page.read_text(encoding="utf-8")):
            file, _, anchor = link.partition("#")
            target = (page.parent / file) if file else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), f"{page.name}: {link}"


def anchors(page: str) -> set[str]:
    """Of the headings as GitHub makes them, and those that a page sets itself."""
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return made | set(re.findall(r'<a id="([^"]+)">', page))


# The API page.

API = (DOCS / "api.md").read_text(encoding="utf-8")
INLINE = "\n".join(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", API, flags=re.DOTALL | re.MULTILINE)))
NOT_FOR_USERS = {"step.run"}


def signature(call: Callable[..., Any]) -> str:
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(call).parameters.values()]
    return str(inspect.Signature([p for p in parameters if p.name != "self"]))


def calls() -> dict[str, str]:
    """What a user can call, with its parameters and their defaults; properties without."""
    found = {f"paceline.{call.__name__}": signature(call) for call in (paceline.Run, paceline.launch)}
    for name in paceline.memory.__all__:
        if inspect.isfunction(call := getattr(paceline.memory, name)) or call is paceline.memory.Peak:
            found[f"paceline.memory.{name}"] = signature(call)
    for name in paceline.metrics.__all__:
        if inspect.isfunction(call := getattr(paceline.metrics, name)):
            found[f"metrics.{name}"] = signature(call)
    for prefix, kind in (("run", paceline.Run), ("step", paceline.Step)):
        for name, member in vars(kind).items():
            if not name.startswith("_"):
                found[f"{prefix}.{name}"] = signature(member) if inspect.isfunction(member) else ""
    return {name: parameters for name, parameters in found.items() if name not in NOT_FOR_USERS}


@pytest.mark.parametrize(("name", "parameters"), calls().items(), ids=list(calls()))
def test_the_api_page_has_every_call_as_it_is(name: str, parameters: str) -> None:
    assert f"{name}{parameters}" in INLINE.splitlines()


@pytest.mark.parametrize("name", [*paceline.__all__, *paceline.metrics.__all__, *paceline.memory.__all__])
def test_the_api_page_has_every_public_name(name: str) -> None:
    assert re.search(rf"\b{name}\b", INLINE)


@pytest.mark.parametrize(
    "settings",
    [paceline.Recipe, paceline.Execution, paceline.Optimizer, paceline.Schedule, paceline.Done],
    ids=lambda settings: settings.__name__,
)
def test_the_api_page_has_every_field(settings: type) -> None:
    rows = re.findall(r"^\| (`.*?) \|", API, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {field.name for field in dataclasses.fields(settings)} <= names


# The errors it tells of, provoked.

DATA = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 2)
Train = Callable[[paceline.Step, nn.Module, torch.optim.Optimizer], None]


def loss_of(model: nn.Module, batch: Sequence[torch.Tensor], reduction: str = "sum") -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)


def good(step: paceline.Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for batch in step:
        step.backward(loss_of(model, batch), weight=len(batch[1]))
    step.update(optimizer)


def every(do: Callable[[paceline.Step, nn.Module, Sequence[torch.Tensor]], object]) -> Train:
    """A train step that does ``do`` with each micro-batch."""

    def train(step: paceline.Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for batch in step:
            do(step, model, batch)
        step.update(optimizer)

    return train


def updates_inside(step: paceline.Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for batch in step:
        step.backward(loss_of(model, batch), weight=len(batch[1]))
        step.update(optimizer)


def updates_itself(step: paceline.Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for batch in step:
        step.backward(loss_of(model, batch), weight=len(batch[1]))
    optimizer.step()


def never_updates(step: paceline.Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for batch in step:
        step.backward(loss_of(model, batch), weight=len(batch[1]))


def clips(step: paceline.Step, model: nn.Module, batch: Sequence[torch.Tensor]) -> None:
    step.backward(loss_of(model, batch), weight=1)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def twice(step: paceline.Step, model: nn.Module, batch: Sequence[torch.Tensor]) -> None:
    step.backward(loss_of(model, batch), weight=1)
    step.backward(loss_of(model, batch), weight=1)


def trains(
    train: Train = good,
    model: Callable[[], nn.Module] = lambda: nn.Linear(4, 2),
    data: Any = DATA,
    track: str = "model optimizer",
    lr: float = 0.1,
    run_dir: str | None = None,
    resume: Any = "never",
    also: Sequence[nn.Parameter] = (),
    **recipe: Any,
) -> Callable[[], object]:
    def body() -> None:
        how = paceline.Recipe(**{"batch": 16, "micro_batch": 4, "lanes": 4, "steps": 2, "device": "cpu", **recipe})
        with paceline.Run(how, paceline.Execution(run_dir=run_dir), resume=resume) as run:
            net = model()
            optimizer = torch.optim.SGD([*net.parameters(), *also], lr=lr)
            things = {"model": net, "optimizer": optimizer}
            run.track(**{name: things[name] for name in track.split()})
            list(run.steps(data, lambda step: train(step, net, optimizer)))

    return body


def in_two_workers(job: Callable[[Team], object]) -> Callable[[], object]:
    return lambda: ThreadTeam.run(2, job)


def other_model(team: Team) -> None:
    tracked = Tracked()
    tracked.add("model", nn.Linear(4, 2 + team.rank))
    tracked.begin(team, "call")


def in_order(*bodies: Callable[[], object]) -> Callable[[], object]:
    return lambda: [body() for body in bodies]


PROVOKED: list[Callable[[], object]] = [
    trains(every(lambda step, model, batch: step.backward(loss_of(model, batch)))),
    trains(every(lambda step, model, batch: step.backward(loss_of(model, batch, "none"), weight=1))),
    trains(every(lambda step, model, batch: step.backward(loss_of(model, batch).item(), weight=1))),  # type: ignore[arg-type]
    trains(every(lambda step, model, batch: loss_of(model, batch).backward())),
    trains(every(twice)),
    trains(every(lambda step, model, batch: None)),
    trains(updates_inside),
    trains(never_updates),
    trains(updates_itself),
    trains(every(clips)),
    trains(every(lambda step, model, batch: step.backward(loss_of(model, batch) * 0, weight=0))),
    trains(every(lambda step, model, batch: step.backward(loss_of(model, batch) * math.nan, weight=1))),
    trains(track=""),
    trains(track="model"),
    trains(also=list(nn.Linear(2, 2).parameters())),
    trains(model=lambda: nn.DataParallel(nn.Linear(4, 2))),
    trains(model=lambda: nn.Sequential(nn.Linear(4, 2), nn.SyncBatchNorm(2))),
    trains(model=lambda: nn.Embedding(4, 2, sparse=True)),
    in_two_workers(other_model),
    trains(model=lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), batch=4, micro_batch=1),
    trains(data=DataLoader(DATA)),
    in_two_workers(lambda team: check_data(team, {"samples": team.rank}, None, "", "call")),
    trains(batch=100),
    lambda: lanes_of(0, 12, lanes=8),
    trains(steps=None),
    in_order(trains(run_dir="runs/a"), trains(run_dir="runs/a")),
    in_order(trains(run_dir="runs/a"), trains(run_dir="runs/a", lr=0.2, resume="auto")),
]
"""In the order of the page's table; what is left of that stands in a console block above it."""


@pytest.mark.usefixtures("process_state")
def test_the_errors_of_the_api_page_are_those_that_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = re.findall(r"^\| `(.*?)` \|", API[API.index("| It says |") :], re.MULTILINE)
    shown = [block.text for block in blocks(API) if block.language == "console"]
    wrong = {}
    for number, (row, provoke) in enumerate(zip(rows, PROVOKED, strict=False)):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        with pytest.raises(PacelineError) as caught:
            provoke()
        if not str(caught.value).startswith(row):
            wrong[row] = str(caught.value)
    assert not wrong
    assert len(rows) > len(PROVOKED)
    for row in rows[len(PROVOKED) :]:
        assert any(row in text for text in shown), row
