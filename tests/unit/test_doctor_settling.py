"""What is told of all that both passes have found: each mistake once, by its cause; nothing independent is hidden."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from paceline.doctor.causes import BREAKS, EXPLAINS, MEETING
from paceline.doctor.examine import Limits, examine, settled
from paceline.doctor.findings import Finding, Obeyed
from paceline.doctor.lines import shown, statement_at
from paceline.doctor.rules import RULES, Severity

Seen = Literal["source", "run"]


def of(rule: str, seen: Seen = "source", line: int = 1, **more: Any) -> Finding:
    return Finding(**{"id": rule, "path": "train.py", "line": line, "message": "", "seen": seen, **more})


def told(*findings: Finding, **how: Any) -> list[tuple[str, int, Seen]]:
    return [(f.id, f.line, f.seen) for f in settled(findings, **how)]


# What hides what.


@pytest.mark.parametrize("cause", sorted(set(RULES) - MEETING - {"replicas-diverged"}))
@pytest.mark.parametrize(("seen", "other"), [("source", "run"), ("run", "source")])
def test_no_finding_of_one_pass_removes_one_of_the_other(cause: str, seen: Seen, other: Seen) -> None:
    consequences = sorted({*MEETING, *(row.of for row in EXPLAINS)} - {cause})
    findings = [of(cause, seen, broke_s=0.0 if seen == "run" else None), *(of(name, other) for name in consequences)]
    alone = {f.id for f in settled(findings[1:])}
    assert {f.id for f in settled(findings)} == {cause, *alone}


@pytest.mark.parametrize("cause", sorted(set(RULES) - MEETING - {"replicas-diverged"}))
def test_what_is_read_explains_nobody_who_is_missing(cause: str) -> None:
    findings = [of(cause), *(of(name, line=2) for name in MEETING)]
    assert {f.id for f in settled(findings)} == {cause, *MEETING}


def test_a_lesser_mistake_does_not_hide_a_hang() -> None:
    prefix, barrier = of("module-prefix-checkpoint", "run"), of("rank-conditional-collective", "run", 2)
    assert len(settled([prefix, barrier])) == 2


@pytest.mark.parametrize("consequence", sorted(MEETING))
def test_a_failure_explains_who_is_missing_from_then_on(consequence: str) -> None:
    failure = of("unused-parameters", "run", broke_s=5.0)
    for span, hidden in (((3.0, float("inf")), True), ((6.0, 7.0), True), (None, True), ((3.0, 4.0), False)):
        names = [f.id for f in settled([failure, of(consequence, "run", span=span)])]
        assert (consequence not in names) is hidden


def test_what_diverges_confirms_what_was_read_and_stands_alone_without_it() -> None:
    diverged = of("replicas-diverged", "run", evidence="up to 0.3", stands_in=True)
    bypassed = of("ddp-forward-bypassed", line=2, evidence="model.module(x)")
    (finding,) = settled([diverged, bypassed])
    assert (finding.id, finding.evidence) == ("ddp-forward-bypassed", "model.module(x); up to 0.3")
    assert told(diverged, bypassed, ignore=["ddp-forward-bypassed"]) == [("replicas-diverged", 1, "run")]
    assert told(diverged, bypassed, select=["replicas-diverged"]) == [("replicas-diverged", 1, "run")]
    assert told(diverged, bypassed, obeyed=[Obeyed(id=bypassed.id)]) == [("replicas-diverged", 1, "run")]
    assert len(settled([diverged, of("not-distributed", severity="advice")])) == 2
    known = of("replicas-diverged", "run", line=3, evidence="a learning rate of its own")
    assert len(settled([known, bypassed])) == 2  # it would stay when the other is mended


def test_each_explanation_is_of_rules_and_says_why() -> None:
    assert {*MEETING, *BREAKS} <= set(RULES)
    for row in EXPLAINS:
        assert {row.of, *row.by} <= set(RULES)
        assert row.of not in row.by and row.why


# Each mistake once, wherever it stands.

SOURCE = """\
import torch

torch.save(
    torch.ones(3),
    "all.pt",
)
for batch in (
    [1],
    [2],
):
    print(batch)
print("end"); print("of it")
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("train.py")
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(
    ("line", "lines"),
    [(1, (1, 2)), (2, (2, 3)), (4, (3, 7)), (7, (7, 11)), (10, (7, 11)), (11, (11, 12)), (99, (99, 100))],
)
def test_a_statement_has_its_lines_and_a_loop_its_head(source: Path, line: int, lines: tuple[int, int]) -> None:
    found = statement_at(str(source), line)
    assert found.start == lines[0] and line in found
    assert found.stop <= lines[1]


@pytest.mark.usefixtures("source")
def test_what_was_watched_takes_the_place_of_what_was_read_in_the_same_statement_only() -> None:
    read, elsewhere = of("save-on-all-ranks", line=3), of("save-on-all-ranks", line=11)
    watched = of("save-on-all-ranks", "run", 5)
    assert told(read, elsewhere, watched) == [(watched.id, 5, "run"), (watched.id, 11, "source")]


@pytest.mark.usefixtures("source")
def test_a_mistake_that_has_several_lines_is_told_once() -> None:
    """A loader is made at one, and looped over at another: reading may name either."""
    watched = of("iterable-not-sharded", "run", 11, also=(("train.py", 5),), severity="advice")
    (finding,) = settled([of("iterable-not-sharded", line=3), watched])
    assert (finding.line, finding.seen, finding.level, finding.evidence) == (11, "run", "error", "")
    for both in ([of("iterable-not-sharded", "run", 3), watched], [watched, of("iterable-not-sharded", "run", 3)]):
        assert len(settled(both)) == 2  # two that were seen are two


@pytest.mark.usefixtures("source")
def test_a_mistake_that_was_read_at_one_line_and_watched_at_another_is_told_once() -> None:
    """What was seen has the place, unless that only stands in for a line that a run does not see."""
    read = of("gather-without-grad", line=11, message="the loss uses it", evidence="loss")
    watched = of("gather-without-grad", "run", 3, message="no gradient", evidence="3 times", severity="warning")
    (finding,) = settled([read, watched])
    assert (finding.line, finding.seen, finding.level, finding.message) == (3, "run", "error", "no gradient")
    assert finding.evidence == "3 times; read at line 11: the loss uses it"
    (finding,) = settled([read, replace(watched, stands_in=True)])
    assert (finding.line, finding.seen, finding.level, finding.message) == (11, "run", "error", "the loss uses it")
    assert finding.evidence == "loss; 3 times"


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("seen", ["source", "run"])
def test_of_several_nobody_can_say_which_are_the_same(seen: Seen) -> None:
    read, watched = of("gather-without-grad", line=11), of("gather-without-grad", "run", 3)
    assert len(settled([read, watched, of("gather-without-grad", seen, 7)])) == 3
    assert len(settled([read, watched, of("gather-without-grad", line=4)])) == 2  # one of which was seen


@pytest.mark.parametrize(("stands_in", "times"), [(False, 2), (True, 1)])
def test_in_two_files_they_are_two_mistakes_unless_a_line_stands_in(stands_in: bool, times: int) -> None:
    read = of("model-differs-across-ranks", line=11)
    watched = of("model-differs-across-ranks", "run", 3, stands_in=stands_in, path="other.py")
    assert len(settled([read, watched])) == times


@pytest.mark.usefixtures("source")
def test_a_run_does_not_make_a_mistake_lesser() -> None:
    """A line that comes each epoch is printed once in a run of one."""
    read, watched = of("print-on-all-ranks", line=11), of("print-on-all-ranks", "run", 11, severity="advice")
    (finding,) = settled([read, watched])
    assert (finding.seen, finding.level) == ("run", "warning")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("severity", ["error", "warning", "advice"])
def test_a_finding_is_never_worse_than_its_rule(rule: str, severity: Severity) -> None:
    order = ("error", "warning", "advice")
    level = of(rule, severity=severity).level
    assert order.index(level) == max(order.index(severity), order.index(RULES[rule].severity))


@pytest.mark.parametrize(
    "rule", ["global-batch-grows", "rng-identical-across-ranks", "batchnorm-unsynced", "group-not-destroyed"]
)
def test_what_may_well_be_meant_is_advice(rule: str) -> None:
    assert RULES[rule].severity == "advice"


@pytest.mark.parametrize("script", ["train.py", "./train.py", "code/train.py", "../code/train.py", "link/train.py", ""])
def test_files_are_named_as_the_script_is(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is read and watched would not be at one place."""
    (tmp_path / "here" / "code").mkdir(parents=True)
    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("link").symlink_to(tmp_path / "code")
    path = Path(script) if script else tmp_path / "code" / "train.py"
    path.touch()
    for name in ("train.py", "helpers.py"):
        assert shown(str(path.resolve().parent / name), path) == str(path.with_name(name))
    assert shown("/usr/lib/other.py", path) == "/usr/lib/other.py"


# What a run has seen obeyed.


@pytest.mark.usefixtures("source")
def test_what_is_obeyed_is_dropped_there_and_nowhere_else() -> None:
    here, there = of("unused-parameters", line=4), of("unused-parameters", line=11)
    sure, maybe = (
        of("unused-parameters", line=5, confidence="certain"),
        of("unused-parameters", line=5, confidence="possible"),
    )
    seen = of("unused-parameters", "run", 3)
    rule = Obeyed(id="unused-parameters", path="train.py", line=3)
    assert told(here, there, obeyed=[rule]) == [(there.id, 11, "source")]
    for kept in (sure, maybe, seen):
        assert told(kept, obeyed=[rule]) == [(kept.id, kept.line, kept.seen)]
    assert told(here, there, obeyed=[Obeyed(id="unused-parameters")]) == []


# Comments.


@pytest.mark.parametrize("number", range(1, 12))
def test_a_comment_anywhere_in_a_statement_silences_it(source: Path, number: int) -> None:
    lines = SOURCE.splitlines()
    lines[number - 1] += "  # paceline: ignore[save-on-all-ranks, print-on-all-ranks]"
    source.write_text("\n".join(lines))
    findings = [of("save-on-all-ranks", line=3), of("print-on-all-ranks", line=11), of("print-on-all-ranks", line=7)]
    kept = {f.line for f in settled(findings)}
    silenced = {3} if 3 <= number <= 6 else {7} if 7 <= number <= 10 else {11} if number == 11 else set()
    assert kept == {3, 7, 11} - silenced


@pytest.mark.parametrize("line", [3, 7, 11])
def test_a_comment_at_any_line_of_a_mistake_silences_it(source: Path, line: int) -> None:
    """Else what is silenced where it was watched would come back where it was read."""
    lines = SOURCE.splitlines()
    lines[line - 1] += "  # paceline: ignore[gather-without-grad]"
    source.write_text("\n".join(lines))
    read, watched = of("gather-without-grad", line=11), of("gather-without-grad", "run", 3, also=(("train.py", 7),))
    assert told(read, watched) == []
    assert told(read, watched, of("gather-without-grad", "run", 12)) != []


@pytest.mark.parametrize(
    ("comment", "says"),
    [
        (
            "ignore[save-on-all-rank]",
            "there is no rule 'save-on-all-rank' to ignore; did you mean 'save-on-all-ranks'?",
        ),
        ("ignore[zzz]", "there is no rule 'zzz' to ignore; `paceline doctor --explain all` lists them"),
        ("ignore", "this comment names no rule to ignore: write `# paceline: ignore[ID]`"),
        ("ignore[]", "this comment names no rule to ignore: write `# paceline: ignore[ID]`"),
    ],
)
def test_a_comment_that_silences_nothing_is_told(source: Path, comment: str, says: str) -> None:
    source.write_text(SOURCE.replace('"all.pt",', f'"all.pt",  # paceline: {comment}'))
    assert f"train.py:5: {says}" in examine(source).notes


def test_a_comment_that_names_rules_is_no_note(source: Path) -> None:
    source.write_text(SOURCE.replace('"all.pt",', '"all.pt",  # paceline: ignore[save-on-all-ranks,uneven-inputs]'))
    assert examine(source).notes == ()


# Both passes as one.


def test_what_was_read_is_told_where_there_is_no_room_to_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.py"
    path.write_text(TWO_MISTAKES)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    seen = examine(path, limits=Limits())
    assert seen.sick
    assert seen.cannot is not None and "scratch folder" in seen.cannot


def test_two_mistakes_are_both_told(tmp_path: Path) -> None:
    """The lesser one does not take the barrier's place, by reading."""
    path = tmp_path / "train.py"
    path.write_text(TWO_MISTAKES)
    found = {(finding.id, finding.line) for finding in examine(path).findings if finding.level != "advice"}
    line = TWO_MISTAKES.splitlines().index("            dist.barrier()") + 1
    assert ("rank-conditional-collective", line) in found
    assert "module-prefix-checkpoint" in {name for name, _ in found}


TWO_MISTAKES = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if rank == 0:
            torch.save(model.state_dict(), "last.pt")
            dist.barrier()
    dist.barrier()
    plain = nn.Linear(8, 1)
    plain.load_state_dict(torch.load("last.pt", map_location="cpu"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
