"""`paceline doctor` as a user meets it: options, output, exit codes. What it finds is tested elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from driving import Ended, Started

from paceline.cli import main
from paceline.doctor.rules import RULES, explain

ROOT = Path(__file__).resolve().parents[2]

CLEAN = """\
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(args.steps):
    optimizer.zero_grad()
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
if rank == 0:
    torch.save(model.module.state_dict(), f"after-{args.steps}.pt")
dist.barrier()
dist.destroy_process_group()
"""
SICK = CLEAN.replace("if rank == 0:\n    torch.save", "if True:\n    torch.save").replace(
    "    optimizer.zero_grad()", "    print('step', step)\n    optimizer.zero_grad()"
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clean.py").write_text(CLEAN)
    (tmp_path / "sick.py").write_text(SICK)
    return tmp_path


def run(place: Path, *words: str) -> Ended:
    return Started([sys.executable, "-m", "paceline", "doctor", *words], place).wait()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a mistake is answered with."""
    assert main(["doctor", *words]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line.startswith("paceline: error: cannot ") and line.endswith((".", "?"))
    return line


def ids(out: str) -> set[str]:
    return {finding["id"] for finding in json.loads(out)["findings"]}


@pytest.mark.parametrize("words", [["--help"], ["--explain", "uneven-inputs"], ["--explain", "all"], ["--static"]])
def test_what_only_tells_and_reads_needs_no_torch(place: Path, words: list[str]) -> None:
    if words == ["--static"]:
        words = ["clean.py", "--static"]
    code = (
        "import sys\nfrom paceline.cli import main\n"
        f"try: main(['doctor', *{words!r}])\nexcept SystemExit: pass\n"
        "sys.exit(str({'torch', 'numpy', 'rich', 'yaml'} & set(sys.modules) or '') or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_a_rule_is_explained_by_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--explain", "uneven-inputs"]) == 0
    assert capsys.readouterr().out.strip() == explain("uneven-inputs").strip()


def test_all_rules_are_listed_each_on_a_line_of_its_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--explain", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(RULES)
    assert [line for line in lines if line and not line.startswith(" ")] == list(
        dict.fromkeys(rule.family for rule in RULES.values())
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], ["no script", "paceline doctor train.py"]),
        (["--static"], ["no script"]),
        (["missing.py"], ["no file missing.py"]),
        (["."], ["., which is no file"]),
        (["book.ipynb", "--static"], ["a notebook"]),
        (["clean.py", "--epochs", "3"], ["unknown --epochs", "behind `--`"]),
        (["clean.py", "extra"], ["unknown extra", "behind `--`"]),
        (["clean.py", "--statics"], ["--statics", "Did you mean '--static'?"]),
        (["clean.py", "--workers", "1"], ["--workers 1", "2 to 64"]),
        (["clean.py", "--workers", "100000"], ["--workers 100000", "2 to 64"]),
        (["clean.py", "--workers", "two"], ["--workers", "'two'"]),
        (["clean.py", "--steps", "0"], ["--steps 0", "1 to 1,000,000"]),
        (["clean.py", "--timeout", "nan"], ["--timeout nan", "1 to 86,400"]),
        (["clean.py", "--timeout", "inf"], ["--timeout inf", "1 to 86,400"]),
        (["clean.py", "--select", "uneven-input"], ["'uneven-input'", "Did you mean 'uneven-inputs'?"]),
        (["clean.py", "--select", ","], ["--select", "no id of a rule"]),
        (["clean.py", "--select", "uneven-inputs", "--ignore", "uneven-inputs"], ["at least one rule"]),
        (["clean.py", "--format", "yaml"], ["yaml"]),
        (["clean.py", "--static", "--select", "uneven-input"], ["'uneven-input'", "Did you mean 'uneven-inputs'?"]),
        (["clean.py", "--static", "--ignore", "uneven-inputs,x"], ["'x'", "--explain all"]),
        (["--explain", "set-epoch"], ["'set-epoch'", "Did you mean 'missing-set-epoch'?"]),
    ],
    ids=" ".join,
)
def test_options_that_make_no_sense_are_refused_before_anything_runs(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: list[str]
) -> None:
    line = refused(capsys, *words)
    assert [part for part in says if part not in line] == []


@pytest.mark.parametrize(
    "words",
    [
        ["missing.py", "--format", "json"],
        ["--format=json"],
        ["clean.py", "--workers", "two", "--format", "json"],
        ["clean.py", "--static", "--select", "uneven-input", "--format", "json"],
        ["clean.py", "--format", "json", "--unknown"],
        ["--explain", "set-epoch", "--format", "json"],
    ],
    ids=" ".join,
)
def test_programs_are_told_in_json_why_nothing_was_looked_at(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["doctor", *words]) == 2
    out, err = capsys.readouterr()
    (note,) = json.loads(out)["notes"]
    assert err == f"paceline: error: {note}\n"
    assert json.loads(out)["findings"] == []


def test_what_stands_behind_the_dashes_is_the_scripts(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "missing.py", "--", "--format", "json")


def test_rules_are_explained_to_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--explain", "uneven-inputs", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told.pop("page") == explain("uneven-inputs")
    assert main(["doctor", "--explain", "all", "--format", "json"]) == 0
    rules = json.loads(capsys.readouterr().out)["rules"]
    assert [rule["id"] for rule in rules] == list(RULES)
    assert told in rules and set(told) == {"id", "family", "severity", "title", "fix"}


def test_a_working_directory_that_was_removed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, gone = place / "clean.py", place / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        assert "working directory that was removed" in refused(capsys, str(script), "--static")
    finally:
        os.chdir(place)


def test_what_cannot_be_parsed_cannot_be_looked_at(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "broken.py").write_text("import torch\nfor epoch in\n")
    line = refused(capsys, "broken.py", "--static")
    assert "broken.py" in line and "2" in line
    assert main(["doctor", "broken.py", "--static", "--format", "json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["findings"] == [] and told["notes"]


def test_reading_runs_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "trap.py").write_text("import helper\nopen('sprung', 'w')\nraise SystemExit(9)\n")
    (place / "helper.py").write_text("open('sprung too', 'w')\n")
    assert main(["doctor", "trap.py", "--static"]) in (0, 1)
    assert {path.name for path in place.iterdir()} == {"trap.py", "helper.py", "clean.py", "sick.py"}


def test_findings_are_told_with_place_source_and_fix(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "sick.py", "--static"]) == 1
    out, err = capsys.readouterr()
    number = SICK.splitlines().index('    torch.save(model.module.state_dict(), f"after-{args.steps}.pt")') + 1
    assert f"sick.py:{number}: error: " in out
    assert "[save-on-all-ranks]" in out and "[print-on-all-ranks]" in out
    assert "    torch.save(model.module.state_dict()" in out and "  fix:  " in out
    assert out.rstrip().splitlines()[-1].startswith("1 error, 1 warning.")
    assert err == ""


def test_json_is_for_programs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "sick.py", "--static", "--format", "json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"findings", "notes"}
    for finding in told["findings"]:
        fields = {"id", "severity", "confidence", "path", "line", "message", "evidence", "fix", "seen"}
        assert set(finding) == fields
        assert finding["path"] == "sick.py" and finding["seen"] == "source"
    assert {finding["id"] for finding in told["findings"]} == {"save-on-all-ranks", "print-on-all-ranks"}


@pytest.mark.parametrize(
    ("words", "left", "code"),
    [
        (["--select", "print-on-all-ranks"], {"print-on-all-ranks"}, 1),
        (["--select", "uneven-inputs, rank-local-skip"], set(), 0),
        (["--ignore", "print-on-all-ranks"], {"save-on-all-ranks"}, 1),
        (["--ignore", "print-on-all-ranks,save-on-all-ranks"], set(), 0),
    ],
)
def test_rules_can_be_selected_and_ignored(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], left: set[str], code: int
) -> None:
    assert main(["doctor", "sick.py", "--static", "--format", "json", *words]) == code
    assert ids(capsys.readouterr().out) == left


def test_a_comment_silences_its_line_only(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SICK.replace("print('step', step)", "print('step', step)  # paceline: ignore[print-on-all-ranks]")
    (place / "sick.py").write_text(text)
    assert main(["doctor", "sick.py", "--static", "--format", "json"]) == 1
    assert ids(capsys.readouterr().out) == {"save-on-all-ranks"}


def test_clean_is_zero(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "clean.py", "--static"]) == 0
    assert capsys.readouterr().out == "Nothing found.\n"


def test_a_clean_script_runs_with_its_arguments_and_leaves_no_file(place: Path) -> None:
    before = set(place.iterdir())
    ended = run(place, "clean.py", "--timeout", "60", "--", "--steps", "2").check()
    assert ended.out == "Nothing found.\n" or "note: " in ended.out
    assert "running clean.py in 2 workers" in ended.err
    assert {path.name for path in set(place.iterdir()) - before} <= {"logs"}


def test_whoever_presses_ctrl_c_again_breaks_off_nothing_that_is_put_in_order() -> None:
    code = (
        "import signal\nfrom paceline.cli.doctor import _interrupted_once\n"
        "with _interrupted_once():\n    try:\n        signal.raise_signal(signal.SIGINT)\n"
        "    finally:\n        signal.raise_signal(signal.SIGINT)\n        print('in order')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "in order\n"


def test_a_folder_that_no_scratch_folder_can_stand_for_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.doctor.watching.scratch._ENTRIES", 1)
    assert main(["doctor", "clean.py"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "cannot run the script in a scratch folder: found more than 1 files in " in err.splitlines()[-1]


def test_in_place_files_stay_and_what_ranks_print_is_shown_if_asked_for(place: Path) -> None:
    ended = run(place, "sick.py", "--in-place", "--verbose", "--format", "json", "--", "--steps", "2").check(1)
    assert {"save-on-all-ranks", "print-on-all-ranks"} <= ids(ended.out)
    assert (place / "after-2.pt").is_file()
    for rank in (0, 1):
        assert f"paceline: rank {rank} printed, at last:\nstep 0\nstep 1\n" in ended.err


def test_the_pages_are_shipped() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["paceline"]
    shipped = {path for pattern in data for path in (ROOT / "src" / "paceline").glob(pattern)}
    assert {path.stem for path in shipped if path.suffix == ".md"} == set(RULES)


@pytest.mark.parametrize(
    ("first", "says"),
    [
        ("import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all'"),
        pytest.param("input()", "EOFError", marks=pytest.mark.long),
        pytest.param(
            "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--data', required=True)\n"
            "parser.parse_args()",
            "the following arguments are required: --data",
            marks=pytest.mark.long,
        ),
        pytest.param("import time\ntime.sleep(100)", "time was up before the first", marks=pytest.mark.long),
    ],
    ids=["import", "stdin", "arguments", "time"],
)
def test_a_script_that_cannot_be_run_is_not_clean(place: Path, first: str, says: str) -> None:
    (place / "clean.py").write_text(first + "\n" + CLEAN)
    ended = run(place, "clean.py", "--timeout", "15").check(2)
    assert ended.out == ""
    assert ended.err.splitlines()[-1].startswith("paceline: error: cannot look at clean.py: found ")
    assert says in ended.err.splitlines()[-1]


def test_what_reading_finds_counts_although_the_script_cannot_be_run(place: Path) -> None:
    (place / "sick.py").write_text("import not_there_at_all\n" + SICK)
    ended = run(place, "sick.py").check(1)
    assert "[save-on-all-ranks]" in ended.out
    assert re.search(r"^note: .* failed .*sick.py:1: ModuleNotFoundError: .*not_there_at_all", ended.out, re.M)
