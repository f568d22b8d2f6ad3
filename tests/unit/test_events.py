"""The run log survives what a run may not: torn lines, full disks, failing sinks."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError
from paceline.events import EventLog, read_events


class Recorder:
    def __init__(self, *, fails: bool = False) -> None:
        self.events: list[Mapping[str, Any]] = []
        self.closed = 0
        self.fails = fails

    def event(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)
        if self.fails:
            raise RuntimeError("no connection")

    def close(self) -> None:
        self.closed += 1
        if self.fails:
            raise RuntimeError("no connection")


def test_events_are_on_disk_before_close(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    log = EventLog(path)
    log.emit("start", workers=2)
    log.emit("step", step=1, loss=2.5, lanes=["0a", "0b"])
    assert [event["event"] for event in read_events(path)] == ["start", "step"]
    (step,) = read_events(path, "step")
    assert step["loss"] == 2.5 and step["lanes"] == ["0a", "0b"] and step["time"] > 1e9
    log.close()
    log.close()


def test_a_log_is_continued_and_a_torn_line_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "step", "step": 1}\n{"event": "step", "st')
    assert [event["step"] for event in read_events(path)] == [1]
    log = EventLog(path)
    log.emit("step", step=2)
    log.close()
    assert [event["step"] for event in read_events(path)] == [1, 2]
    assert path.read_bytes().count(b"\n") == 2


def test_a_torn_line_longer_than_a_block_is_found(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "a"}\n' + b"x" * 200_000)
    EventLog(path).close()
    assert path.read_bytes() == b'{"event": "a"}\n'
    path.write_bytes(b"x" * 200_000)
    EventLog(path).close()
    assert path.read_bytes() == b""


def test_the_file_is_json_even_with_a_loss_that_is_not(tmp_path: Path) -> None:
    sink = Recorder()
    log = EventLog(tmp_path / "events.jsonl", [sink])
    log.emit("step", loss=math.nan, nested={"worst": [math.inf, -math.inf, 1.0]})
    log.close()
    text = (tmp_path / "events.jsonl").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    event = json.loads(text, parse_constant=refuse)
    assert math.isnan(float(event["loss"])) and event["nested"]["worst"] == ["inf", "-inf", 1.0]
    assert math.isnan(sink.events[0]["loss"])


def test_a_failing_sink_is_dropped_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = Recorder(fails=True), Recorder()
    log = EventLog(None, [bad, good])
    for step in range(3):
        log.emit("step", step=step)
    log.close()
    assert len(bad.events) == 1 and len(good.events) == 3
    assert (bad.closed, good.closed) == (0, 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert "Recorder" in line and "no connection" in line


def test_a_sink_that_fails_to_close_does_not_hold_back_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = Recorder(fails=True), Recorder()
    EventLog(None, [good, bad]).close()
    assert (bad.closed, good.closed) == (1, 1)
    assert "switched off" in capsys.readouterr().err


def test_a_full_disk_leaves_whole_lines_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.emit("step", step=1)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:5]))  # what a full disk does first
        log.emit("step", step=2)
        log.emit("step", step=3)
    log.emit("step", step=4)
    log.close()
    assert [event["step"] for event in read_events(path)] == [1, 4]
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("line", [b"not json", b"[1]"])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "a"}\n' + line + b'\n{"event": "b"}\n')
    with pytest.raises(DataError, match="line 2"):
        read_events(path)


def test_a_missing_log_is_an_error_in_four_beats(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_events(tmp_path / "events.jsonl")


def shared(tmp_path: Path) -> tuple[EventLog, EventLog]:
    """Those of worker 0 and of another, of one run."""
    return EventLog(tmp_path / "log"), EventLog(tmp_path / "log", active=False)


def test_who_takes_over_adds_only_what_worker_0_had_not_written(tmp_path: Path) -> None:
    first, second = shared(tmp_path)
    for step in (1, 2, 3):
        if step < 3:  # it dies before it writes the third
            first.emit("step", step=step)
        second.emit("step", step=step)
    assert [event["step"] for event in read_events(tmp_path / "log")] == [1, 2]
    second.take_over()
    second.take_over()
    second.emit("step", step=4)
    assert [event["step"] for event in read_events(tmp_path / "log")] == [1, 2, 3, 4]
    first.close()
    second.close()


def test_who_takes_over_cuts_a_torn_line_off(tmp_path: Path) -> None:
    first, second = shared(tmp_path)
    first.emit("step", step=1)
    first.close()
    with (tmp_path / "log").open("ab") as file:
        file.write(b'{"event": "st')
    second.emit("step", step=2)
    second.take_over()
    assert [event["step"] for event in read_events(tmp_path / "log")] == [1, 2]
    second.close()


def test_who_came_later_does_not_repeat_what_was_before_it(tmp_path: Path) -> None:
    first, second = shared(tmp_path)
    second.emit("start", workers=2)
    second.forget()
    first.emit("step", step=1)
    second.emit("step", step=1)
    second.take_over()
    assert [event["event"] for event in read_events(tmp_path / "log")] == ["step"]
    first.close()
    second.close()


def test_sinks_hear_nothing_before_their_log_takes_over(tmp_path: Path) -> None:
    heard: list[Any] = []

    class Hearing:
        def event(self, event: Mapping[str, Any]) -> None:
            heard.append(event["step"])

        def close(self) -> None:
            """Nothing is held."""

    log = EventLog(None, [Hearing()], active=False)
    log.emit("step", step=1)
    assert heard == []
    log.take_over()
    log.emit("step", step=2)
    assert heard == [1, 2]
    log.close()
