"""What a run comes to: silence means something, and whatever is missing, the rest is judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.doctor.causes import MEETING
from paceline.doctor.findings import Finding
from paceline.doctor.watching import checks_gradients
from paceline.doctor.watching.judging import judge, may_need_gpus
from paceline.doctor.watching.records import KINDS, Run, Stopped
from told import Told, run_of, two

# What could not be looked at.


def failed(told: Told, type_: str, text: str | None, line: int = 2) -> Told:
    told.tell("error", line, type=type_, text=text)
    told.account.code, told.account.ended_s = 1, 5.0
    return told


BEFORE: dict[str, tuple[Callable[[Told], object], Stopped, str | None]] = {
    "missing import": (
        lambda told: failed(told, "ModuleNotFoundError", "No module named 'x'"),
        "ended",
        "train.py:2: ModuleNotFoundError: No module named 'x'",
    ),
    "arguments": (
        lambda told: setattr(failed(told, "SystemExit", "2").account, "tail", "usage: train\nerror: --data"),
        "ended",
        "it left with exit code 2; its last line: error: --data",
    ),
    "no input": (
        lambda told: failed(told, "EOFError", "EOF when reading a line"),
        "failed",
        "EOFError: EOF when reading",
    ),
    "no GPU": (
        lambda told: failed(told, "RuntimeError", "no NVIDIA GPU"),
        "ended",
        "RuntimeError: no NVIDIA GPU",
    ),
    "a failure of which nothing was told": (lambda told: failed(told, "ValueError", None), "ended", "ValueError"),
    "a loader worker": (
        lambda told: failed(
            told,
            "ValueError",
            "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
            + 9 * '  File "/usr/lib/python3/site-packages/torch/utils/data/fetch.py", line 1, in fetch\n'
            + "ValueError: bad image\n",
        ),
        "ended",
        "ValueError: Caught ValueError in DataLoader worker process 0. ... ValueError: bad image",
    ),
    "time": (lambda told: told.tell("loader", loader=0), "time", "time was up before the first optimizer step"),
    "ranks of its own": (lambda told: told.tell("spawn", count=1), "spawned", "starts processes of its own"),
    "a hang": (lambda told: told.meets("barrier", 3, over=False), "hang", "no rank made any progress: rank 0"),
    "gone": (lambda told: setattr(told.account, "code", 0), "ended", "the ranks left by os._exit or the like"),
    "nothing at all": (lambda told: told.tell("end", code=0), "ended", "it did not train"),
    "nothing to step": (lambda told: told.tell("end", code=0), "ended", None),
}


def run_before(case: str, folder: Path) -> Run:
    does, stopped, _ = BEFORE[case]
    ranks = two(folder / "train.py")
    for one in ranks:
        if case == "nothing at all":
            one.account.records.clear()
        does(one)
    return run_of(*ranks, stopped=stopped)


@pytest.mark.parametrize("case", BEFORE)
def test_silence_means_nothing_where_nothing_could_be_seen(case: str, tmp_path: Path) -> None:
    verdict, says = judge(run_before(case, tmp_path)), BEFORE[case][2]
    if says is None:
        assert verdict.cannot is None
    else:
        assert verdict.cannot is not None and says in verdict.cannot
        assert verdict.cannot in verdict.notes


@pytest.mark.parametrize(
    ("case", "worth"),
    [("no GPU", True), ("nothing at all", True), ("missing import", False), ("a hang", False), ("gone", False)],
)
def test_what_may_need_gpus_is_worth_another_run(case: str, worth: bool, tmp_path: Path) -> None:
    assert may_need_gpus(run_before(case, tmp_path)) is worth


def test_of_a_bare_assertion_the_line_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("batch = 6\nassert batch % 4 == 0\n")
    zero, one = two(tmp_path / "train.py")
    verdict = judge(run_of(failed(zero, "AssertionError", None), failed(one, "AssertionError", None), stopped="ended"))
    assert verdict.cannot is not None and "train.py:2: AssertionError: assert batch % 4 == 0" in verdict.cannot


def test_a_hang_of_which_the_cause_is_told_was_seen(tmp_path: Path) -> None:
    zero, one = two(tmp_path / "train.py")
    zero.meets("barrier", 3, over=False)
    verdict = judge(run_of(zero, one.tell("end", code=0), stopped="hang"))
    assert {finding.id for finding in verdict.findings} & MEETING
    assert verdict.cannot is None


def test_a_failure_after_steps_is_no_clean_run_either(tmp_path: Path) -> None:
    ranks = two(tmp_path / "train.py")
    for one in ranks:
        failed(one.goes(3).tell("step", 3, optimizer=0, plain=False), "ValueError", "over")
    verdict = judge(run_of(*ranks, stopped="ended"))
    assert verdict.cannot is not None and "ValueError: over" in verdict.cannot
    assert verdict.cannot in verdict.notes


# Whatever is missing in the records, or wrong with a check.


@pytest.mark.parametrize("facts", [{}, {"cut": True}], ids=["none", "cut"])
@pytest.mark.parametrize("stopped", ["ended", "hang", "failed", "time", "steps", "spawned"])
def test_no_check_needs_facts_to_be_there(facts: dict[str, Any], stopped: Stopped, tmp_path: Path) -> None:
    """Each rule is judged or told not to be, and none keeps the others from being judged."""
    ranks = two(tmp_path / "train.py")
    for one in ranks:
        one.tell("begin")
        for kind in [*KINDS, *KINDS]:
            if kind not in ("done", "failed", "begin"):
                one.tell(kind, 3, **facts)
                one.tell(kind, 4, over=False, **facts)
        one.tell("replicated", 5)
    verdict = judge(run_of(*ranks, stopped=stopped))
    assert "legacy-data-parallel" in {finding.id for finding in verdict.findings}
    assert [note for note in verdict.notes if "Traceback" in note] == []
    if facts:
        assert any("too long to be kept whole" in note for note in verdict.notes)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"done", "failed"}))
def test_a_kind_without_facts_leaves_the_other_kinds_their_findings(kind: str, tmp_path: Path) -> None:
    ranks = two(tmp_path / "train.py")
    for one in ranks:
        one.tell("loader", 1, loader=0, sampler=None, size=8, iterable=False, drawn_by="RandomSampler", dataset="D")
        one.tell("tracker", 2, name="wandb.init", where=None).tell("replicated", 3)
        one.tell(kind, 4, cut=True)
    found = {finding.id for finding in judge(run_of(*ranks, stopped="ended")).findings}
    assert {"tracker-on-all-ranks", "legacy-data-parallel"} - found <= {
        {"tracker": "tracker-on-all-ranks", "replicated": "legacy-data-parallel"}.get(kind)
    }


def test_a_check_that_raises_is_a_note_with_its_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gradscaler_diverges(run: Any) -> Any:
        yield Finding(id="gradscaler-diverges", path="train.py", line=1, message="")
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(checks_gradients, "CHECKS", (gradscaler_diverges, *checks_gradients.CHECKS))
    ranks = two(tmp_path / "train.py")
    verdict = judge(run_of(*(one.tell("replicated", 3).tell("end", code=0) for one in ranks), stopped="ended"))
    assert [finding.id for finding in verdict.findings] == ["legacy-data-parallel", "gradscaler-diverges"]
    assert verdict.notes[1:] == ("rule gradscaler-diverges could not be judged: ZeroDivisionError: by nothing",)
