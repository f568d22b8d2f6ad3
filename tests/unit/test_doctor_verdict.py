"""What the doctor tells of all that it has found: nothing independent is hidden, and silence means something."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from paceline.doctor.causes import BREAKS, EXPLAINS, MEETING
from paceline.doctor.examine import Limits, examine, settled
from paceline.doctor.findings import Finding, Obeyed
from paceline.doctor.lines import shown, statement_at
from paceline.doctor.rules import RULES, Severity
from paceline.doctor.watching import checks_gradients, probe
from paceline.doctor.watching.judging import judge
from paceline.doctor.watching.obeying import RULES_OBEYED
from paceline.doctor.watching.records import KEPT_BYTES, KINDS, LASTING, Account, Stopped, pack
from told import Told, run_of, two

Seen = Literal["source", "run"]


def of(rule: str, seen: Seen = "source", line: int = 1, **more: Any) -> Finding:
    return Finding(id=rule, path="train.py", line=line, message="", seen=seen, **more)


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
    diverged = of("replicas-diverged", "run", evidence="up to 0.3")
    bypassed = of("ddp-forward-bypassed", line=2, evidence="model.module(x)")
    (finding,) = settled([diverged, bypassed])
    assert (finding.id, finding.evidence) == ("ddp-forward-bypassed", "model.module(x); up to 0.3")
    assert told(diverged, bypassed, ignore=["ddp-forward-bypassed"]) == [("replicas-diverged", 1, "run")]
    assert told(diverged, bypassed, select=["replicas-diverged"]) == [("replicas-diverged", 1, "run")]
    assert told(diverged, bypassed, obeyed=[Obeyed(id=bypassed.id)]) == [("replicas-diverged", 1, "run")]
    assert len(settled([diverged, of("not-distributed", severity="advice")])) == 2


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
    assert (finding.line, finding.seen, finding.level) == (11, "run", "error")
    assert len(settled([of("iterable-not-sharded", line=7), watched])) == 2
    for both in ([of("iterable-not-sharded", "run", 3), watched], [watched, of("iterable-not-sharded", "run", 3)]):
        assert len(settled(both)) == 2  # two that were seen are two


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
        lambda told: failed(told, "RuntimeError", "no NVIDIA driver"),
        "ended",
        "RuntimeError: no NVIDIA driver",
    ),
    "a failure of which nothing was told": (lambda told: failed(told, "ValueError", None), "ended", "ValueError"),
    "time": (lambda told: told.tell("loader", loader=0), "time", "time was up before the first optimizer step"),
    "ranks of its own": (lambda told: told.tell("spawn", count=1), "spawned", "starts processes of its own"),
    "a hang": (lambda told: told.meets("barrier", 3, over=False), "hang", "no rank got on any more: rank 0 stands at"),
    "gone": (lambda told: setattr(told.account, "code", 0), "ended", "the ranks left by os._exit or the like"),
    "nothing to step": (lambda told: told.tell("end", code=0), "ended", None),
}


@pytest.mark.parametrize("case", BEFORE)
def test_silence_means_nothing_where_nothing_could_be_seen(case: str, tmp_path: Path) -> None:
    does, stopped, says = BEFORE[case]
    ranks = two(tmp_path / "train.py")
    for one in ranks:
        does(one)
    verdict = judge(run_of(*ranks, stopped=stopped))
    if says is None:
        assert verdict.cannot is None
    else:
        assert verdict.cannot is not None and says in verdict.cannot
        assert verdict.cannot in verdict.notes


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


def test_what_was_read_is_told_where_there_is_no_room_to_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.py"
    path.write_text(TWO_MISTAKES)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    seen = examine(path, limits=Limits())
    assert seen.sick
    assert seen.cannot is not None and "scratch folder" in seen.cannot


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
        assert any("came without facts" in note for note in verdict.notes)


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
        yield of("gradscaler-diverges", "run")
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(checks_gradients, "CHECKS", (gradscaler_diverges, *checks_gradients.CHECKS))
    ranks = two(tmp_path / "train.py")
    verdict = judge(run_of(*(one.tell("replicated", 3).tell("end", code=0) for one in ranks), stopped="ended"))
    assert [finding.id for finding in verdict.findings] == ["legacy-data-parallel", "gradscaler-diverges"]
    assert verdict.notes[1:] == ("rule gradscaler-diverges could not be judged: ZeroDivisionError: by nothing",)


# Rules that a run has seen obeyed.


def obeyed(*ranks: Told, stopped: Stopped = "ended") -> set[tuple[str, int | None]]:
    return {(rule.id, rule.line) for rule in judge(run_of(*ranks, stopped=stopped)).obeyed}


def wraps(told: Told, **facts: Any) -> Told:
    return told.tell(
        "wrap", 2, **{"ddp": 0, "find_unused": False, "static": False, "names": ["w"], "shapes": [[2]], **facts}
    )


def gives(told: Told, number: int, indices: list[int], rows: list[str]) -> Told:
    told.tell("pass", 4, loader=0, number=number)
    told.tell("batch", 4, loader=0, number=number, indices=indices, rows=rows)
    return told.tell("backward", 5, reached=[], roots=[]).tell("pass-end", 4, loader=0, number=number)


def steps(told: Told, times: int = 4, **facts: Any) -> Told:
    for number in range(times):
        told.tell("forward", 5, ddp=0, grad=True, sync=True, communicates=True)
        told.tell("backward", 5, roots=[], reached=[[0, "synced"]])
        told.tell(
            "step", 6, optimizer=0, plain=True, values=["a"], grads=["g"], **{k: v(number) for k, v in facts.items()}
        )
    return told


def ends(told: Told) -> Told:
    told.account.code, told.account.ended_s = 0, 9.0
    return told.tell("end", code=0)


def graphs(told: Told, *unused: list[str]) -> None:
    for names in unused:
        told.tell("graph", 5, ddp=0, unused=names)


def goes_back(told: Told, times: int, *, by: float, of: float | None = 4.0) -> Told:
    for _ in range(times):
        told.tell("backward", 9, roots=[[["DivBackward0", by], ["MseLossBackward0", of]]])
    return told.tell("step", 10)


def samples(first: int, count: int = 10, by: int = 1) -> tuple[list[int], list[str]]:
    numbers = list(range(first, first + count * by, by))
    return numbers, [f"row {number}" for number in numbers]


def loads(told: Told, sampler: int | None = 0, size: int = 100) -> Told:
    return told.tell("loader", 3, loader=0, sampler=sampler, size=size, drawn_by="RandomSampler")


# By rule: what obeys it, what does not, or shows nothing; each is done to rank 0 and 1.
Does = Callable[[Told, int], object]
SHOWN: dict[str, tuple[Does, list[Does]]] = {
    "sampler-seed-differs": (
        lambda t, r: t.tell("sampler", 1, sampler=0, seed=3),
        [lambda t, r: t.tell("sampler", 1, sampler=0, seed=r), lambda t, r: t.tell("sampler", 1, cut=True)],
    ),
    "random-split-differs": (
        lambda t, r: t.tell("subset", 1, digest="d"),
        [lambda t, r: t.tell("subset", 1, digest=f"{r}"), lambda t, r: t.tell("subset", 1, digest="d" if r else None)],
    ),
    "missing-set-epoch": (
        lambda t, r: gives(gives(loads(t), 0, *samples(0)), 1, *samples(5)),
        [
            lambda t, r: gives(gives(loads(t), 0, *samples(0)), 1, *samples(0)),
            lambda t, r: gives(loads(t), 0, *samples(0)),
        ],
    ),
    "dataset-order-differs": (
        lambda t, r: gives(loads(t.tell("sampler", 1, sampler=0)), 0, *samples(r)),
        [
            lambda t, r: gives(loads(t.tell("sampler", 1, sampler=0)), 0, *samples(20 * r)),
            lambda t, r: gives(loads(t.tell("sampler", 1, sampler=0)), 0, samples(0)[0], samples(r)[1]),
        ],
    ),
    "no-distributed-sampler": (
        lambda t, r: gives(loads(t, None), 0, samples(0)[0], samples(20 * r)[1]),
        [
            lambda t, r: gives(loads(t, None), 0, *samples(0)),
            lambda t, r: gives(loads(t, None, size=10_000), 0, *samples(20 * r)),  # by chance
            lambda t, r: gives(loads(t.tell("draw", where="fetch"), None), 0, samples(0)[0], samples(20 * r)[1]),
        ],
    ),
    "model-differs-across-ranks": (
        lambda t, r: wraps(t),
        [lambda t, r: wraps(t, shapes=[[2 + r]]), lambda t, r: t.tell("wrap", 2, cut=True)],
    ),
    "replicas-start-different": (
        lambda t, r: steps(t),
        [
            lambda t, r: t.tell("step", 6, optimizer=0, plain=True, values=[f"{r}"]),
            lambda t, r: steps(t.tell("optimizer", 1, optimizer=1)),  # which has not stepped yet
        ],
    ),
    "rank-dependent-graph": (
        lambda t, r: graphs(t, [], ["a"], []),
        [lambda t, r: graphs(t, [], [], []), lambda t, r: graphs(t, [], ["a"] * r, ["a"])],
    ),
    "unused-parameters": (
        lambda t, r: steps(wraps(t)),
        [
            lambda t, r: steps(wraps(t), 1),
            lambda t, r: steps(wraps(t, find_unused=True)),
            lambda t, r: wraps(t, cut=True),
        ],
    ),
    "rank-conditional-collective": (
        lambda t, r: ends(t.meets("broadcast", 6 if r else 7)),
        [
            lambda t, r: ends(t if r else t.meets("broadcast", 7)),
            lambda t, r: ends(t.meets("broadcast", 6) if r else t.meets("all_reduce", 7)),
            lambda t, r: t.meets("broadcast", 6 if r else 7),  # and was ended then
        ],
    ),
    "rank-conditional-ddp-forward": (
        lambda t, r: r or t.tell("forward", 7, ddp=0, grad=False, communicates=False),
        [
            lambda t, r: r or t.tell("forward", 7, ddp=0, grad=False, communicates=True),
            lambda t, r: r or t.tell("forward", 7, ddp=0, grad=True, communicates=False),
            lambda t, r: r or t.tell("forward", 7, cut=True),
        ],
    ),
    "buffers-not-synced": (
        lambda t, r: steps(wraps(t), buffers=lambda n: {"b": f"{n}"}),
        [
            lambda t, r: steps(wraps(t), buffers=lambda n: {"b": f"{n} {r}"}),
            lambda t, r: steps(wraps(t), buffers=lambda n: {}),
        ],
    ),
    "redundant-grad-allreduce": (
        lambda t, r: t.meets("all_reduce", 8),
        [
            lambda t, r: t.tell("collective", 8, op="all_reduce", shape=[3], ranks=[0, 1]),
            lambda t, r: t.tell("collective", 8, op="all_reduce", shape=[1], ranks=[0, 1], grads="ddp"),
        ],
    ),
    "accumulation-not-normalised": (
        lambda t, r: goes_back(t, 2, by=2.0),
        [
            lambda t, r: goes_back(t, 2, by=7.0),
            lambda t, r: goes_back(t, 1, by=2.0),
            lambda t, r: goes_back(t, 2, by=2.0, of=None),  # a sum over two samples
        ],
    ),
}


def test_each_rule_that_a_run_may_show_obeyed_is_shown_here() -> None:
    assert [check.__name__.replace("_", "-") for check in RULES_OBEYED] == list(SHOWN)


@pytest.mark.parametrize("rule", SHOWN)
def test_only_what_a_run_has_exercised_is_obeyed(rule: str, tmp_path: Path) -> None:
    obeys, others = SHOWN[rule]
    for number, does in enumerate((obeys, *others)):
        ranks = two(tmp_path / "train.py")
        for rank, one in enumerate(ranks):
            does(one, rank)
        assert (rule in {name for name, _ in obeyed(*ranks)}) is (number == 0), number


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


# An account takes whatever it is told.


def message(numbered: int, kind: str, *, aside: bool = False, **facts: Any) -> bytes:
    common = {"places": [], "syncs": 0, "at_s": 1.0, "child": None, "aside": aside}
    return pack({"kind": kind, "number": numbered, "facts": facts, **common})


def ended(number: int) -> bytes:
    return pack({"kind": "done", "of": number, "facts": {}, "at_s": 2.0, "child": None, "aside": False})


def test_an_account_is_bounded_and_says_what_it_left_out(tmp_path: Path) -> None:
    accounts = []
    for rank in (0, 1):
        account = Account(rank=rank)
        batch = message(1, "batch", loader=0, number=0, rows=["x" * 50_000], indices=[1])
        kept = KEPT_BYTES // len(batch)
        for _ in range(kept + 10):
            account.take(batch)
        account.take(message(2, "collective", op="barrier"))
        account.take(message(3, "end", code=0))
        accounts.append(account)
        assert len(account.records) == kept + 1
        assert (account.told["batch"], account.dropped) == (kept + 10, 11)
        waiting = account.waiting()
        assert waiting is not None and waiting["op"] == "barrier"
    run = run_of(stopped="time")
    run.accounts = accounts
    assert any(note.startswith("the ranks told more than is kept: 22 records") for note in judge(run).notes)


def test_taking_a_message_costs_the_same_however_many_came_before() -> None:
    account = Account(rank=0)

    def elapsed_s(count: int) -> float:
        began_s = time.perf_counter()
        for number in range(count):
            account.take(message(number, "forward"))
            account.take(ended(number))
            account.waiting()
        return time.perf_counter() - began_s

    first_s, later_s = elapsed_s(500), min(elapsed_s(500) for _ in range(4))
    assert later_s < 5 * first_s


def test_what_another_thread_does_is_no_waiting_of_the_rank() -> None:
    account = Account(rank=0)
    account.take(message(1, "collective", op="barrier"))
    moves = account.moves
    account.take(message(2, "sleep", aside=True, seconds=1.0))
    assert account.moves == moves
    waiting = account.waiting()
    assert waiting is not None and waiting.kind == "collective"


def test_whatever_the_probe_tells_the_end_of_is_kept_until_then() -> None:
    """Of kinds that are not in `LASTING` the end would be lost."""
    ends = set()
    for file in set(Path(probe.__file__ or "").parent.glob("[!h]*.py")):  # hooking.py shows one that is not there
        for function in re.split(r"^    ?(?=def )|^(?=def )", file.read_text(), flags=re.M):
            if re.search(r"\.done\(", function):
                ends |= set(re.findall(r"number = (?:call\.)?recorder\.tell\(\s*\"([\w-]+)\"", function))
    assert {"collective", "step", "no-sync"} <= ends | {"step"}
    assert ends <= LASTING


# Both passes as one.


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
