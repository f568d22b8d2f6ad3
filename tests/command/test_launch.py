"""`paceline launch` and `paceline.launch`: scripts, modules and functions in several workers, as a user starts them."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from driving import paceline, start, torchrun, wait_for
from driving import script as run_script

from paceline.cli import main

SCRIPT = """
import os, sys
rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
print(f"{rank}/{size}", sys.argv[1:], __name__, sys.path[0] == os.path.dirname(os.path.abspath(__file__)), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "there.py").write_text(SCRIPT)
    return tmp_path / "there.py"


@pytest.mark.parametrize(
    ("words", "workers", "arguments"),
    [
        (["-n", "2", "there.py", "--lr", "3", "-n", "x"], 2, ["--lr", "3", "-n", "x"]),
        (["there.py", "-n", "2", "--", "-n", "7"], 2, ["-n", "7"]),
        (["--workers=1", "there.py", "a", "--", "b"], 1, ["a", "--", "b"]),
        (["-n", "1", "-m", "there", "a"], 1, ["a"]),
    ],
)
def test_a_script_and_its_arguments(script: Path, words: list[str], workers: int, arguments: list[str]) -> None:
    ended = paceline("launch", *words, cwd=script.parent, anew=words[0] == "-n" and workers == 2).check()
    lines = sorted(ended.out.splitlines())
    assert lines == [f"{rank}/{workers} {arguments} __main__ True" for rank in range(workers)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "found no script, need the path of a Python script"),
        (["-n", "2"], "found no script"),
        (["missing.py"], "found no file missing.py"),
        (["-n"], "cannot read -n: found nothing behind it"),
        (["-n", "0", "x.py"], "cannot read -n: found '0'"),
        (["--worker", "2", "x.py"], "Did you mean '--workers'?"),
        (["there.py", "-n", "many"], "cannot read -n: found 'many'"),
    ],
)
def test_a_command_line_that_cannot_be_read(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    monkeypatch.chdir(script.parent)
    assert main(["launch", *words]) == 2
    err = capsys.readouterr().err
    assert says in err and err.startswith("paceline: error: ") and "Traceback" not in err


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("sys.exit(3)", 1, "ended: found exit code 3 without a reason"),
        ("sys.exit('no data')", 1, "no data"),
        ("sys.exit()", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("os.kill(os.getpid(), 9)", 1, "was killed: found SIGKILL"),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_how_a_script_ends(tmp_path: Path, line: str, code: int, says: str) -> None:
    (tmp_path / "ends.py").write_text(f"import os, sys\nif os.environ['RANK'] == '0':\n    {line}\n")
    ended = paceline("launch", "-n", "2", "ends.py", cwd=tmp_path).check(code)
    assert says in ended.err
    assert ended.err.count("Traceback") == (1 if "Zero" in says else 0)


def test_a_traceback_begins_at_the_script(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("def f():\n    raise ValueError('here')\n\nf()\n")
    ended = paceline("launch", "-n", "1", "ends.py", cwd=tmp_path).check(1)
    assert ended.err == (
        "paceline: worker 0 failed:\n"
        "Traceback (most recent call last):\n"
        '  File "ends.py", line 4, in <module>\n    f()\n'
        "  File \"ends.py\", line 2, in f\n    raise ValueError('here')\n"
        "ValueError: here\n"
    )


def test_ctrl_c_ends_all_workers(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import os, pathlib, time\npathlib.Path(os.environ['RANK']).touch()\nwhile True: time.sleep(0.1)\n"
    )
    started = start("launch", "-n", "2", "waits.py", cwd=tmp_path)
    wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), started)
    started.process.send_signal(signal.SIGINT)
    ended = started.wait().check(130)
    assert "Traceback" not in ended.err


LAUNCHES = """
import paceline, threading, torch

class Point:
    def __init__(self, x): self.x = x

offset = 5

def work(a, point):
    run = paceline.Run(paceline.Recipe(steps=1))
    return Point(a + offset + point.x + run.rank), run.gather(run.rank), torch.full((2,), float(run.rank))

found = paceline.launch(work, 10, Point(100), workers=2)
points, ranks, tensors = zip(*found)
print([type(point) is Point and point.x for point in points], list(ranks), tensors[1].tolist())
print(paceline.launch(lambda: "as it comes", workers=1))

def refused(*args, **kwargs):
    try:
        paceline.launch(*args, **kwargs)
    except paceline.PacelineError as error:
        print(type(error).__name__, str(error).splitlines()[0], "|", str(error).splitlines()[-1])

def fail():
    raise ValueError("a mistake")

refused(fail, workers=1)
refused(lambda: (x for x in []), workers=1)
refused(print, threading.Lock(), workers=1)
refused(print, workers=0)
refused(lambda: paceline.launch(print, workers=1), workers=1)
"""


def test_a_function_from_python(tmp_path: Path) -> None:
    """As from a notebook: the code has no file, its functions and classes can only travel by value."""
    lines = run_script("-c", LAUNCHES, cwd=tmp_path).wait().check().out.splitlines()
    assert lines[:2] == ["[115, 116] [[0, 1], [0, 1]] [1.0, 1.0]", "['as it comes']"]
    said = lines[2:]
    assert said[0] == "WorkerError paceline: worker 0 failed: | ValueError: a mistake"
    assert said[1].startswith("WorkerError paceline: error: cannot hand back what <lambda> returns: found generator:")
    assert said[2].startswith("UsageError cannot hand print to the workers: found TypeError:")
    assert said[3].startswith("UsageError cannot launch workers: found workers=0, need a whole number >= 1")
    assert said[4].startswith("WorkerError paceline: error: cannot launch workers: found a process that is a worker")
    assert len(said) == 5


def test_an_error_that_nobody_catches_is_told_once_and_ends_the_process(tmp_path: Path) -> None:
    """Under torchrun there is no supervisor of ours: each worker says what it met and leaves at once."""
    (tmp_path / "parts.py").write_text(
        "import paceline\nrun = paceline.Run(paceline.Recipe(steps=1))\nif run.is_main:\n    run.gather(1)\n"
    )
    begun = time.monotonic()
    ended = torchrun(2, "parts.py", cwd=tmp_path).wait().check(1)
    assert time.monotonic() - begun < 60
    told = [line for line in ended.err.splitlines() if line.startswith("paceline: worker ")]
    assert 1 <= len(told) == len(set(told)) <= 2  # torchrun may end the second before it has spoken
    for line in told:
        assert "error: the workers have parted" in line
        assert "worker 0 in run.gather (parts.py:4), worker 1 in the end of the run" in line


def test_a_worker_that_hears_no_ctrl_c_is_not_waited_for(tmp_path: Path) -> None:
    """As one that is in the middle of joining a team whose other worker has gone."""
    (tmp_path / "waits.py").write_text(
        "import os, pathlib, signal, time\n"
        "if os.environ['RANK'] == '1': signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "pathlib.Path(os.environ['RANK']).touch()\nwhile True: time.sleep(0.1)\n"
    )
    started = start("launch", "-n", "2", "waits.py", cwd=tmp_path)
    wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), started)
    started.process.send_signal(signal.SIGINT)
    assert "Traceback" not in started.wait().check(130).err


def test_a_forked_child_has_no_part_in_the_end_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(
        "import os, sys, paceline\nrun = paceline.Run(paceline.Recipe(steps=1))\nrun.sum(1)\n"
        "pid = os.fork()\nif pid == 0: sys.exit(0)\nos.waitpid(pid, 0)\nprint('on we go')\n"
    )
    assert run_script("forks.py", cwd=tmp_path).wait().check().out == "on we go\n"
