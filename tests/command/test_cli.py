"""The command line as a user meets it before anything is trained: help, mistakes, exit codes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from paceline.cli import main, running, tools
from paceline.parsing import dump, parse

COMMANDS = ["train", "prepare", "sample", "verify", "order", "doctor", "completion"]


def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, **options)  # type: ignore[call-overload,no-any-return]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a mistake is answered with."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("paceline: error: cannot ") and line.endswith((".", "?"))
    return line


def test_help_imports_nothing_heavy() -> None:
    """So that it is there at once."""
    code = (
        "import sys; from paceline.cli import main; main(['--help']); "
        "heavy = {'torch', 'numpy', 'jsonargparse', 'rich', 'yaml', 'asyncio'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    assert [name for name in COMMANDS if f"  {name}" not in found.stdout] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main([command, "--help"])
    except SystemExit as end:  # argparse
        code = end.code
    assert code == 0
    assert capsys.readouterr().out.startswith(f"usage: paceline {command}")


def test_train_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--help"])
    out = capsys.readouterr().out
    for name in ("--recipe.batch (default 64)", "--recipe.optimizer.lr", "--execution.workers (default auto)"):
        assert name in out


def test_as_a_module_and_its_version() -> None:
    found = run("--version")
    assert found.returncode == 0 and re.fullmatch(r"paceline \d+\.\d+\.\d+\n", found.stdout)


def test_no_command_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("usage: paceline")


@pytest.mark.parametrize(
    ("words", "beats"),
    [
        (["trian"], ["`paceline trian`", "'train'"]),
        (["train", "--resume", "mast"], ["mast", "'must'"]),
        (["train", "--resume=mast"], ["mast", "'must'"]),
        (["train", "--recipe.step", "3"], ["recipe.step", "'steps'"]),
        (["train", "nowhere.yaml"], ["nowhere.yaml", "no such file"]),
        (["verify"], ["--workers 1,2,3"]),
        (["verify", "--workers"], ["nothing behind it"]),
        (["verify", "--workers", "1,x"], ["'x'", "whole numbers"]),
        (["verify", "--workers", "1,0"], ["'0'"]),
        (["verify", "--workers", "1,99"], ["workers=99"]),
        (["verify", "--workers", "1,2", "--steps", "-1"], ["'-1'"]),
        (["verify", "--workers", "1,2", "--recipe.step", "1"], ["'steps'"]),
        (["order"], ["--samples"]),
        (["order", "--samples", "x"], ["'x'"]),
        (["order", "--samples", "0"], ["--samples 0", "at least 1"]),
        (["order", "--samples", "3", "--lane", "2"], ["unknown --lane", "'--lanes'"]),
        (["order", "--samples", "3", "--order", "random"], ["random"]),
        (["prepare"], ["SRC", "--out"]),
        (["prepare", "a", "--out", "b", "--limit", "3 apples"], ["'3 apples'", "20MB"]),
        (["prepare", "a", "--out", "b", "--tokeniser", "bytes"], ["'--tokenizer'"]),
        (["sample"], ["RUN"]),
        (["sample", "a", "b"], ["unknown b"]),
        (["sample", "nowhere"], ["nowhere"]),
        (["completion", "fish"], ["fish"]),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], beats: list[str]) -> None:
    line = refused(capsys, *words)
    assert [beat for beat in beats if beat not in line] == [], line


def test_a_missing_source_is_no_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refused(capsys, "prepare", str(tmp_path / "nothing"), "--out", str(tmp_path / "out"))
    assert str(tmp_path / "nothing") in line


def test_an_existing_run_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    line = refused(capsys, "train", "--run-dir", str(tmp_path))
    assert "--resume" in line and "--run-dir" in line
    assert "no checkpoint" in refused(capsys, "train", "--run-dir", str(tmp_path), "--resume", "must")


@pytest.mark.parametrize(
    ("words", "resume"),
    [
        ([], "never"),
        (["--resume"], "auto"),
        (["--resume", "auto"], "auto"),
        (["--resume=must", "-n", "2"], "must"),
        (["--resume", "--recipe.seed", "1"], "auto"),
        (["--resume", "never", "-n2"], "never"),
    ],
)
def test_the_three_ways_to_resume(words: list[str], resume: str) -> None:
    assert running._read_train(words)[1] == resume


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_restarted_launch_resumes(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    assert running._read_train([])[1] == "auto"
    assert running._read_train(["--resume", "never"])[1] == "never"
    monkeypatch.setenv(variable, "0")
    assert running._read_train([])[1] == "never"


def test_a_configuration_behind_a_bare_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run.yaml", "mine"):
        Path(name).write_text(dump(parse([])))
        settings, resume, _ = running._read_train(["--resume", name])
        assert (str(settings.config_path), resume) == (name, "auto")


def test_print_config_is_a_whole_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", "--print_config", "-n", "3", "--recipe.optimizer.lr", "2e-5"]) == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["execution"]["workers"] == 3
    (tmp_path / "x.yaml").write_text(text)
    assert parse([str(tmp_path / "x.yaml")]) == parse(["-n", "3", "--recipe.optimizer.lr", "2e-5"])


def test_order_shows_the_lanes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["order", "--samples", "10", "--lanes", "3"]) == 0
    assert capsys.readouterr().out == "lane 0: [0, 3, 6, 9]\nlane 1: [1, 4, 7]\nlane 2: [2, 5, 8]\n"


def test_prepare_tells_what_it_wrote(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 1000)
    words = ["prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--limit", "4KB", "--processes", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "vocabulary 257, uint16" in out and "train:" in out and "tokens" in out


def test_a_reader_that_has_seen_enough() -> None:
    command = f"{sys.executable} -m paceline order --samples 2000000 --lanes 64 | head -c 10"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert found.stdout == "lane 0: [0" and found.stderr == ""


def test_ctrl_c_is_130_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(tools, "order", interrupt)
    assert main(["order"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_worker_of_nobody_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "RANK" in refused(capsys, "train")


def test_a_failure_of_the_user_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    found = run("train", "--task.class_path", "broken.Task", cwd=tmp_path)
    assert found.returncode == 1 and "ZeroDivisionError" in found.stderr


@pytest.mark.parametrize(
    ("typed", "found"), [("tr", "train"), ("train --recipe.optimizer.f", "--recipe.optimizer.fused")]
)
def test_bash_completes(typed: str, found: str) -> None:
    words = ["paceline", *typed.split()]
    script = (
        f"source <({sys.executable} -m paceline completion bash)\n"
        f"COMP_WORDS=({' '.join(words)}) COMP_CWORD={len(words) - 1}\n_paceline\n"
        'echo "${COMPREPLY[@]}"'
    )
    got = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (got.stdout.strip(), got.stderr) == (found, "")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_takes_the_completion() -> None:
    script = f"source <({sys.executable} -m paceline completion zsh)"
    got = subprocess.run(["zsh", "-f", "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (got.returncode, got.stderr) == (0, "")


def test_sizes() -> None:
    assert [tools._size(text) for text in ("20MB", "1.5 KiB", "7", "2e3", "1g")] == [20_000_000, 1536, 7, 2000, 10**9]
