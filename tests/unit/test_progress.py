"""What a person sees of a run, on a terminal and in a log file; and scalars that TensorBoard can read."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.events import EventLog
from paceline.progress import Progress, TensorBoard, bytes_progress

STEP: dict[str, Any] = {
    "step": 20,
    "steps": 100,
    "epoch": 0,
    "loss": 2.5,
    "grad_norm": 1.25,
    "lr": 1e-3,
    "skipped": False,
    "tokens_per_s": 12_345.0,
    "samples": 64,
}
START: dict[str, Any] = {
    "workers": 2,
    "lanes": 8,
    "batch": 256,
    "micro_batch": 32,
    "device": "cpu",
    "parameters": 1_048_576,
    "resumed_from": None,
}
SCALING: dict[str, Any] = {"rule": "linear", "lr": 4e-3, "base_lr": 1e-3, "batch": 256, "base_batch": 64}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, *events: tuple[str, dict[str, Any]]) -> str:
    log = EventLog(None, [Progress(stream)])
    for kind, fields in events:
        log.emit(kind, **fields)
    log.close()
    return stream.getvalue()


def test_plain_lines() -> None:
    text = show(
        io.StringIO(),
        ("passed_over", {"what": "step-00000040", "why": "a [red] hash"}),
        ("start", START | {"resumed_from": 10}),
        ("step", STEP),
        ("step", STEP | {"step": 30, "bits_per_byte": 3.6067, "skipped": True, "loss": math.nan, "grad_norm": None}),
        ("evaluate", {"step": 30, "seconds": 0.51, "loss": 2.25, "bits_per_byte": 3.246}),
        ("checkpoint", {"step": 30, "seconds": 0.12, "path": "runs/x/step-00000030"}),
        ("checkpoint", {"step": 40, "error": "cannot write: [no space]"}),
        ("digest", {"step": 40, "digest": "x", "lanes": [], "tensors": {}}),
        ("end", {"status": "done", "step": 100, "digest": "abc"}),
    )
    lines = text.splitlines()
    assert lines[0] == "passed over step-00000040: a [red] hash"
    batch = "batch 256 = 8 lanes x 1 micro-step x 32"
    assert lines[1] == f"2 workers drive 8 lanes on cpu, {batch}, 1.05M parameters; goes on from step 10"
    assert lines[2].startswith("step 20/100  loss 2.5000  12.3k tokens/s  lr 1.00e-03  grad norm 1.250  eta 0:")
    assert lines[3].startswith("step 30/100  loss nan  3.607 bits/byte  12.3k tokens/s  lr 1.00e-03  update skipped")
    assert lines[4] == "step 30  held-out  loss 2.2500  bits per byte 3.2460  (0.5 s)"
    assert lines[5] == "step 30  saved runs/x/step-00000030 (0.1 s)"
    assert lines[6] == "step 40  not saved: cannot write: [no space]"
    assert lines[7:] == ["done at step 100, digest abc"]
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"workers": 8}, "8 workers drive 8 lanes on cpu, batch 256 = 8 lanes x 1 micro-step x 32, "),
        ({"workers": 1, "lanes": 1}, "1 worker drives 1 lane on cpu, batch 256 = 1 lane x 8 micro-steps x 32, "),
    ],
)
def test_the_batch_of_a_step_is_told_whoever_drives_the_lanes(changes: dict[str, Any], line: str) -> None:
    assert show(io.StringIO(), ("start", START | changes)).startswith(line)


def test_a_log_that_does_not_say_its_batch_can_be_shown() -> None:
    start = {name: value for name, value in START.items() if name not in ("batch", "micro_batch")}
    assert show(io.StringIO(), ("start", start)) == "2 workers drive 8 lanes on cpu, 1.05M parameters\n"


def test_a_scaled_learning_rate_is_told() -> None:
    text = show(
        io.StringIO(), ("lr_scaling", SCALING), ("lr_scaling", SCALING | {"rule": "sqrt", "lr": 2e-3}), ("start", START)
    )
    assert text.splitlines()[:2] == [
        "lr 4.00e-03 = 1.00e-03 x 256/64 (linear)",
        "lr 2.00e-03 = 1.00e-03 x sqrt(256/64)",
    ]


def test_speed_is_in_tokens_or_in_samples() -> None:
    samples = {name: value for name, value in STEP.items() if name != "tokens_per_s"} | {"samples_per_s": 950.0}
    tokens_line, samples_line = show(io.StringIO(), ("step", STEP), ("step", samples)).splitlines()
    assert "  12.3k tokens/s  " in tokens_line and "samples/s" not in tokens_line
    assert "  950 samples/s  " in samples_line and "tokens/s" not in samples_line


def test_a_long_line_is_not_broken_in_a_log() -> None:
    path = "runs/" + "x" * 300
    assert path in show(io.StringIO(), ("checkpoint", {"step": 1, "seconds": 0.1, "path": path}))


def test_eta_counts_this_start_only() -> None:
    progress = Progress(stream := io.StringIO())
    progress.event({"event": "start", "time": 100.0, **START, "resumed_from": 50})
    progress.event({"event": "step", "time": 110.0, **STEP, "step": 60})
    assert "eta 0:40" in stream.getvalue()  # a second a step, 40 to go
    progress.close()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


def test_a_terminal_gets_a_bar_and_its_cursor_back(terminal: Terminal) -> None:
    stdout = sys.stdout
    text = show(terminal, ("start", START), ("step", STEP), ("step", STEP | {"step": 100}), ("end", _end()))
    assert "20/100" in text and "100/100" in text and "━" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert text.rindex("\x1b[?25h") < text.index("done at step 100")
    assert sys.stdout is stdout


def test_a_terminal_is_given_back_when_a_run_breaks_off(terminal: Terminal) -> None:
    text = show(terminal, ("start", START), ("step", STEP))
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def _end() -> dict[str, Any]:
    return {"status": "done", "step": 100, "digest": "abc"}


def test_bytes_progress_in_a_log_and_on_a_terminal(terminal: Terminal) -> None:
    for stream in (io.StringIO(), terminal):
        with bytes_progress("preparing", stream) as tell:
            for done in range(101):
                tell(done * 1_000_000, 100_000_000)
        text = stream.getvalue()
        assert ("━" in text) == (stream is terminal)
        if stream is not terminal:
            assert len(text.splitlines()) == 10
            assert text.endswith("preparing: 100.0 of 100.0 MB\n")


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    log = EventLog(None, [TensorBoard(tmp_path)])
    log.emit("start", **START)
    log.emit("step", **STEP)
    log.emit("evaluate", step=20, seconds=0.5, loss=2.25)
    log.close()
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(tmp_path))
    read.Reload()
    assert set(read.Tags()["scalars"]) == {
        "train/epoch",
        "train/loss",
        "train/grad_norm",
        "train/lr",
        "train/tokens_per_s",
        "held_out/loss",
    }
    assert [(point.step, point.value) for point in read.Scalars("held_out/loss")] == [(20, 2.25)]


def test_a_missing_tensorboard_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # what `import` takes for missing
    log = EventLog(None, [TensorBoard(tmp_path)])
    log.emit("step", **STEP)
    log.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert "paceline[tensorboard]" in line


def test_a_directory_that_tensorboard_cannot_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    log = EventLog(None, [TensorBoard(tmp_path / "file" / "below")])
    log.emit("step", **STEP)
    log.close()
    assert len(capsys.readouterr().err.splitlines()) == 1
