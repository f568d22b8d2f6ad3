"""`paceline verify` as a user runs it: equal where it must be, and where not, the first place that differs."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from driving import TINY, paceline, start, wait_for, write_tiny

from paceline.checkpoint import Store
from paceline.cli import main
from paceline.config import Recipe
from paceline.data.order import Plan
from paceline.events import read_events
from paceline.lanes import lanes_of
from paceline.parsing import parse

LEAKY = '''
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline.tasks import Task


class Leaky(Task):
    """What no law allows: the loss of one sample depends on the worker that sees it."""

    def __init__(self, sample: int):
        self.sample = sample

    def build_model(self):
        return nn.Linear(4, 1)

    def train_data(self):
        print("forked from", id(None))  # processes place it each elsewhere, and forked ones where it was
        x_BF = torch.arange(256.0).reshape(64, 4).sin()
        return TensorDataset(torch.arange(64), x_BF)

    def loss(self, model, batch):
        number_B, x_BF = batch
        loss = model(x_BF).square().sum()
        if (number_B == self.sample).any():
            loss = loss * (1 + 1e-6 * int(os.environ["RANK"]))
        return loss, len(x_BF)
'''

LEAKY_RUN = """
task: {class_path: leaky.Leaky}
recipe: {batch: 16, micro_batch: 1, lanes: 8, steps: 4}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, device: str) -> Path:
    """A working directory."""
    path = tmp_path_factory.mktemp("place")
    write_tiny(path, device)
    (path / "leaky.py").write_text(LEAKY)
    (path / "leaky.yaml").write_text(LEAKY_RUN.replace("{batch", f"{{device: {device}, batch"))
    return path


def proof(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((path / "proof.json").read_text())
    return read


def rows(out: str) -> dict[str, list[str]]:
    """The table: by workers, the digest, the seconds, the verdict, and with faults what they cost."""
    lines = out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("workers "))
    cells = [[cell.strip() for cell in line.split("  ") if cell] for line in lines[head + 1 :]]
    return {row[0]: row[1:] for row in cells if len(row) in (4, 5)}


@pytest.mark.long
def test_runs_that_are_stopped_and_resumed_are_equal_too(place: Path) -> None:
    """14 steps: an epoch and its short last step are among them."""
    words = ("verify", "tiny.yaml", "--workers", "1,2", "--steps", "14", "--interrupt", "--out", "out")
    ended = paceline(*words, cwd=place).check()
    told = proof(place / "out")
    assert (told["schema"], told["equal"], told["steps"]) == (1, True, 14)
    paths = [[1], [2], [1, 2, 1], [2, 1, 2]]
    assert [variation["workers"] for variation in told["variations"]] == paths
    assert len({tuple(variation["digests"]) for variation in told["variations"]}) == 1
    digests = told["variations"][0]["digests"]
    assert len(set(digests)) == 14 and all(variation["digest"] == digests[-1] for variation in told["variations"])
    assert all(variation["difference"] is None and variation["seconds"] > 0 for variation in told["variations"])

    table = rows(ended.out)
    assert list(table) == ["1", "2", "1 > 2 > 1", "2 > 1 > 2"]
    assert {row[0] for row in table.values()} == {digests[-1][:16]}
    assert [row[2] for row in table.values()] == ["-", "yes", "yes", "yes"]
    assert "equal: 4 runs, the same bits after each of 14 steps" in ended.out

    settings = parse([str(TINY)])
    samples = (told["identity"]["fields"]["data.train.tokens"] - 1) // settings.task.init_args["context"]
    assert Plan.of(settings.recipe, samples).steps_per_epoch <= 14
    assert told["identity"]["fields"]["recipe.steps"] == 20, "the schedule is the whole run's"
    assert set(told["machine"]) == {"cpu", "device", "paceline", "torch", "python"}
    starts = read_events(place / "out" / "2-1-2" / "events.jsonl", "start")
    assert [(event["workers"], event["resumed_from"]) for event in starts] == [(2, None), (1, 4), (2, 9)]


def test_a_difference_is_traced_to_its_step_and_lane(place: Path) -> None:
    """One sample costs more on worker 1: where that is seen the runs part, and not before. Both are forked from one
    template, and what they print stays with them."""
    step, lane = 2, 6
    assert lane in lanes_of(1, 2, 8)
    sample = int(Plan.of(Recipe(batch=16, micro_batch=1, lanes=8, steps=4), samples=64).lane(step, lane)[0][0])
    words = ("--workers", "1,2", "--task.sample", str(sample))
    ended = paceline("verify", "leaky.yaml", *words, cwd=place, anew=True).check(1)
    told = proof(place / "runs" / "leaky-verify")
    assert told["equal"] is False
    first = told["variations"][1]["difference"]
    assert (first["step"], first["kind"], first["name"], first["count"]) == (step + 1, "lane loss", f"lane {lane}", 1)
    assert float.fromhex(first["reference"]) != float.fromhex(first["found"])
    before, after = (variation["digests"] for variation in told["variations"])
    assert before[:step] == after[:step] and before[step] != after[step]
    assert f"step {step + 1}: lane {lane} (lane loss; 1 of 8 differ)" in ended.out
    kept = Path(next(line for line in ended.out.splitlines() if line.startswith("runs: "))[len("runs: ") :])
    assert (place / kept / "1" / "events.jsonl").exists()
    printed = [(place / kept / run).read_text().splitlines() for run in ("1.out", "2.out")]
    assert len({line for lines in printed for line in lines if line.startswith("forked from")}) == 1
    assert "forked from" in printed[0][0] and "forked from" not in ended.out


def test_allreduce_is_shown_to_differ_and_by_how_much(place: Path) -> None:
    words = ("--workers", "1,3", "--steps", "2", "--recipe.gradients", "allreduce", "--out", "allreduce")
    ended = paceline("verify", "tiny.yaml", *words, cwd=place).check(1)
    variation = proof(place / "allreduce")["variations"][1]
    assert (variation["difference"]["step"], variation["difference"]["kind"]) == (1, "tensor")
    one, three = (Store(place / "allreduce" / run / "checkpoints").load(None, only=["model"]) for run in ("1", "3"))
    assert one is not None and three is not None
    gaps = {name: (value - three.states["model"][name]).abs().max() for name, value in one.states["model"].items()}
    assert variation["weights"]["max_abs"] == pytest.approx(float(max(gaps.values())), rel=1e-3)
    assert 0 < variation["weights"]["relative"] < 1e-2
    assert f"apart ({variation['weights']['at']})" in ended.out and "gradients=allreduce" in ended.out


def test_workers_that_are_killed_change_nothing(place: Path) -> None:
    sentence = "kill worker=1 step=2; kill worker=0 step=4 at=update"
    words = ("--workers", "1,3", "--steps", "6", "--faults", f"{sentence};")
    ended = paceline("verify", "tiny.yaml", *words, "--out", "killed", cwd=place).check()
    told = proof(place / "killed")
    assert told["equal"] is True
    assert [(run["workers"], run["faults"]) for run in told["variations"]] == [
        ([1], None),
        ([3], None),
        ([3], sentence),
    ]
    assert len({tuple(run["digests"]) for run in told["variations"]}) == 1
    cost = told["variations"][2]["cost"]
    assert (cost["lost"], cost["restarts"]) == (2, 0) and 0 < cost["seconds"] < 30
    table = rows(ended.out)
    assert list(table) == ["1", "3", f"3, {sentence}"]
    assert table[f"3, {sentence}"][2:] == ["yes", f"2 lost, {cost['seconds']:.2f} s"]
    assert "not with the faults: workers 1; they need 2" in ended.out
    assert "equal: 3 runs, the same bits after each of 6 steps; every fault was met" in ended.out
    (start,) = read_events(place / "killed" / "3-faults" / "events.jsonl", "start")
    assert start["workers"] == 3


def test_a_fault_that_nobody_meets_is_an_error(place: Path) -> None:
    """Of two workers, lane 7 is not worker 0's."""
    sentence = "kill worker=0 step=2 lane=7"
    words = ("--workers", "2", "--task.sample", "1", "--execution.faults", sentence, "--out", "unmet")
    ended = paceline("verify", "leaky.yaml", *words, cwd=place).check(1)
    assert "found 'kill worker=0 step=2 lane=7' not met in 4 steps" in ended.error
    assert not (place / "unmet" / "proof.json").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "sentence", "lost", "restarts"),
    [
        ("1", "kill worker=0 step=3", 0, 1),
        ("2", "term worker=1 step=2; interrupt worker=0 step=4", 0, 2),
        ("3", "kill worker=2 step=2; kill worker=0 at=reform; crash worker=0 step=5 at=body", 3, 0),
        ("3", "kill worker=1 step=3; kill worker=2 at=join", 2, 0),
        ("2", "hang worker=1 step=3 lane=5; spin worker=0 step=5 at=exchange; stop worker=0 step=7", 3, 0),
        ("2", "kill worker=0 step=4 at=save; kill worker=1 step=6 at=evaluate", 2, 0),
    ],
)
def test_faults_of_every_kind_change_nothing(
    place: Path, tmp_path: Path, workers: str, sentence: str, lost: int, restarts: int
) -> None:
    often = ("--execution.checkpoint_every", "2", "--execution.evaluate_every", "3", "--execution.hang_after_s", "3")
    words = ("--workers", workers, "--steps", "8", "--faults", sentence, "--out", str(tmp_path / "out"))
    paceline("verify", "tiny.yaml", *words, *often, cwd=place).check()
    cost = proof(tmp_path / "out")["variations"][1]["cost"]
    assert (cost["lost"], cost["restarts"]) == (lost, restarts)


def test_a_sentence_that_cannot_be_read_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(place):
        assert main(["verify", "tiny.yaml", "--workers", "2", "--faults", "kil worker=1 step=3"]) == 2
        assert "Did you mean 'kill'?" in capsys.readouterr().err
        assert main(["verify", "tiny.yaml", "--workers", "2", "--faults"]) == 2
        assert "cannot read --faults: found nothing behind it" in capsys.readouterr().err
        assert main(["verify", "tiny.yaml", "--workers", "1,2", "--faults=kill worker=2 step=3"]) == 2
        assert "worker=2 in 'kill worker=2 step=3', and no such worker in this run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("precision", "compiled", "modes"),
    [
        ("fp32", "false", "all,selective"),
        *(
            pytest.param(precision, compiled, modes, marks=pytest.mark.long)
            for precision in ("fp32", "bf16")
            for compiled, modes in (("false", "all,selective,every:2,every:3"), ("true", "all,every:2"))
        ),
    ],
)
def test_no_way_to_recompute_changes_a_bit(place: Path, precision: str, compiled: str, modes: str) -> None:
    recipe = ("--recipe.precision", precision, "--recipe.compile", compiled)
    out = f"recompute-{precision}-{compiled}-{modes.count(',')}"
    words = ("--workers", "2", "--steps", "3", "--recompute", modes, *recipe, "--out", out)
    ended = paceline("verify", "tiny.yaml", *words, cwd=place).check()
    variations = proof(place / out)["variations"]
    assert [variation["recompute"] for variation in variations] == [None, *modes.split(",")]
    assert len({variation["digest"] for variation in variations}) == 1
    assert "2, recompute all" in ended.out


@pytest.mark.long
def test_lists_and_mappings_of_blocks_are_ways_to_recompute_too(place: Path) -> None:
    ways = ["every:2", ["blocks.0", "blocks.1"], {"blocks.*": "selective"}, ["blocks.1"]]
    text = 'every:2, [blocks.0,blocks.1],{"blocks.*": selective},[blocks.1]'
    words = ("--workers", "1", "--steps", "1", "--recompute", text, "--out", "recompute-named")
    ended = paceline("verify", "tiny.yaml", *words, cwd=place).check()
    variations = proof(place / "recompute-named")["variations"]
    assert [variation["recompute"] for variation in variations] == [None, *ways]
    assert len({variation["digest"] for variation in variations}) == 1
    assert "1, recompute [blocks.0, blocks.1]" in ended.out and "1, recompute {blocks.*: selective}" in ended.out
    own = (place / "recompute-named" / "1-recompute-way-3" / "config.yaml").read_text()
    assert "blocks.*: selective" in own, "it must have run as asked"


@pytest.mark.parametrize(
    ("text", "beats"),
    [
        ("all,[blocks.0", ["',' or ']'", "Write --recompute 'all,every:2,"]),
        ("all,,auto", ["cannot read --recompute"]),
        ("{*: full}", ["cannot read --recompute", "a name with * in quotes"]),
        ("all] [", ["cannot read --recompute"]),
        (" ", ["cannot read --recompute: found ' '"]),
        ("all,[]", ["found recompute=[]", "Use none"]),
        ("null", ["found recompute='null'", "Use none"]),
        ("[[a], b]", ["cannot use execution.recompute"]),
        ("{blocks.0: half}", ["keep, selective or full"]),
        ("all,[blocks.0],all", ["--recompute all twice"]),
        ("[blocks.0],[blocks.0]", ["--recompute [blocks.0] twice"]),
    ],
)
def test_a_list_of_ways_to_recompute_with_a_mistake_is_told(
    place: Path, capsys: pytest.CaptureFixture[str], text: str, beats: list[str]
) -> None:
    with contextlib.chdir(place):
        assert main(["verify", "tiny.yaml", "--workers", "1", "--recompute", text]) == 2
    said = capsys.readouterr().err
    assert [beat for beat in beats if beat not in said] == [], said


def test_ways_to_recompute_that_are_none_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(place):
        assert main(["verify", "tiny.yaml", "--workers", "2", "--recompute", "all,evry:2"]) == 2
        assert "Did you mean 'every:2'?" in capsys.readouterr().err
        assert main(["verify", "tiny.yaml", "--workers", "2", "--recompute", "auto"]) == 2
        assert "no execution.memory, and so nothing that must be recomputed" in capsys.readouterr().err


def test_a_run_that_fails_shows_its_error_and_gives_its_code(place: Path) -> None:
    words = ("--workers", "1,2", "--steps", "3", "--task.vocabulary", "300", "--task.data", "data/own")
    old = place / "runs" / "tiny-verify" / "proof.json"
    old.parent.mkdir(parents=True)
    old.write_text('{"equal": true}')
    ended = paceline("verify", "tiny.yaml", *words, cwd=place).check(2)
    assert "vocabulary=300, 257 in data/own" in ended.error
    assert rows(ended.out)["1"][2] == "failed" and "2" not in rows(ended.out)
    assert not old.exists(), "an old proof may not stand for this run"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_verify_leaves_nothing(place: Path, number: signal.Signals) -> None:
    home = place / "runs" / "stopped-verify"
    words = ("--workers", "1,2", "--task.sample", "1", "--recipe.steps", "100000", "--run-dir", "runs/stopped")
    running = start("verify", "leaky.yaml", *words, cwd=place)
    wait_for(lambda: any(home.glob("*/1/events.jsonl")), running)
    running.process.send_signal(number)
    ended = running.wait().check(128 + number)
    assert list(home.iterdir()) == [] and "Traceback" not in ended.err


@pytest.mark.long
@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_any_number_of_workers(place: Path, precision: str, compiled: str) -> None:
    """Dropout on, a short step on the way, every kind of division of 8 lanes."""
    recipe = ("--recipe.precision", precision, "--recipe.compile", compiled)
    out = f"any-{precision}-{compiled}"
    paceline("verify", "tiny.yaml", "--workers", "1,2,3,4,8", "--steps", "14", *recipe, "--out", out, cwd=place).check()
    assert len({variation["digest"] for variation in proof(place / out)["variations"]}) == 1


def test_a_directory_with_something_in_it_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "taken").mkdir()
    (place / "taken" / "proof.json").write_text("{}")
    with contextlib.chdir(place):
        assert main(["verify", "tiny.yaml", "--workers", "1,2", "--out", "taken"]) == 2
    assert "cannot use taken: found proof.json there" in capsys.readouterr().err
    assert (place / "taken" / "proof.json").read_text() == "{}"
