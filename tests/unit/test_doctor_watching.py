"""The run pass, as far as it is pure: what it concludes from records, reads around lines, and how hooks behave."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.doctor.rules import RULES
from paceline.doctor.watching.following import patience_s
from paceline.doctor.watching.judging import judge
from paceline.doctor.watching.launching import names_gpus
from paceline.doctor.watching.probe.gpus import _Devices
from paceline.doctor.watching.probe.hooking import Call, Hooked, install
from paceline.doctor.watching.probe.recorder import Recorder
from paceline.doctor.watching.records import BOUND_BYTES, Account, Place, Run, pack
from paceline.doctor.watching.scratch import Scratch
from paceline.doctor.watching.sources import conditions, loops_around
from told import Told, ids, run_of, seen, two

SCRIPT = """
import torch.distributed as dist
chief = dist.get_rank() == 0
for epoch in range(8):
    step(epoch)
    if chief:
        dist.all_reduce(shown)
    if worse > 3:
        break
    if not fine:
        continue
    if loss > 1:
        dist.all_gather(parts, loss)
    step(epoch)
dist.barrier()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def test_a_collective_of_one_rank_is_named_with_its_condition(script: Path) -> None:
    zero, one = two(script)
    zero.goes(5).meets("all_reduce", 7, over=False)
    one.goes(5).goes(5, over=False)
    (finding,) = seen(zero, one)
    assert (finding.id, finding.line) == ("rank-conditional-collective", 7)
    assert "if chief" in finding.message
    assert "rank 1 is at backward (train.py:5)" in finding.evidence


def test_a_collective_that_depends_on_data_is_another_mistake(script: Path) -> None:
    zero, one = two(script)
    zero.goes(5).meets("all_gather", 13, over=False)
    one.goes(5).goes(14, over=False)
    assert ids(seen(zero, one)) == ["data-dependent-collective"]


def test_who_leaves_a_loop_by_break_has_stopped_early(script: Path) -> None:
    zero, one = two(script)
    zero.goes(5).goes(5).goes(5, over=False)
    one.goes(5).goes(5).meets("barrier", 15, over=False)
    (finding,) = seen(zero, one)
    assert (finding.id, finding.line) == ("rank-local-early-stop", 9)
    assert "rank 1 leaves the loop at `if worse > 3`" in finding.message


def test_who_leaves_a_loop_that_has_no_break_had_fewer_batches(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("for batch in batches:\n    step(batch)\ndist.barrier()\n")
    zero, one = two(script)
    zero.goes(2).goes(2).goes(2, over=False)
    one.goes(2).goes(2).meets("barrier", 3, over=False)
    (finding,) = seen(zero, one)
    assert (finding.id, finding.line) == ("uneven-inputs", 1)
    assert "rank 1 had 2 batches, rank 0 at least 3" in finding.evidence


def mid_pass(tmp_path: Path) -> tuple[Told, Told]:
    """Two ranks in the middle of a pass; of one more is not heard."""
    script = tmp_path / "train.py"
    script.write_text("for batch in loader:\n    step(batch)\n")
    zero, one = two(script)
    for told, batches in ((zero, 3), (one, 2)):
        told.tell("loader", 1, loader=0).tell("pass", 1, loader=0, number=0)
        for batch in range(batches):
            told.tell("batch", 1, loader=0, indices=[], rows=[]).goes(2, over=batch < 2)
    return zero, one


def test_who_ends_in_the_middle_of_a_pass_has_stopped_early(tmp_path: Path) -> None:
    zero, one = mid_pass(tmp_path)
    one.account.code, one.account.ended_s = 0, 20.0
    (finding,) = seen(zero, one)
    assert (finding.id, finding.line) == ("rank-local-early-stop", 1)
    assert "rank 1 ends in the middle of this loop" in finding.message


def test_who_waits_for_something_else_in_the_middle_of_a_pass_is_told_with_its_line(tmp_path: Path) -> None:
    zero, one = mid_pass(tmp_path)
    one.account.stands = "train.py:7"
    verdict = judge(run_of(zero, one))
    assert verdict.findings == ()
    assert verdict.cannot is not None and "rank 1 stands at train.py:7" in verdict.cannot


@pytest.mark.parametrize("steps", [0, 3])
def test_a_run_in_which_a_rank_fails_is_not_clean_at_whatever_step(steps: int, script: Path) -> None:
    zero, one = two(script)
    for told in (zero, one):
        for _ in range(steps):
            told.goes(5).tell("step", 6, **step(["a"], ["b"]))
    one.account.code, one.account.ended_s = -11, 50.0
    verdict = judge(run_of(zero, one, stopped="failed"))
    assert verdict.findings == ()
    assert verdict.cannot == "rank 1 failed first: killed by signal 11"


def test_a_run_without_a_step_says_so(script: Path) -> None:
    zero, one = (told.tell("end", code=0) for told in two(script))
    (note,) = judge(run_of(zero, one, stopped="ended")).notes
    assert note.startswith("no optimizer step was seen")


def test_a_player_that_learns_through_the_other_ones_module_bypasses_nothing(script: Path) -> None:
    """Its own gradients are reduced, the other one's are thrown away."""
    ranks = two(script)
    for told in ranks:
        told.tell("forward", 5, grad=True, communicates=False, ddp=0, training=True, batch=4)
        told.goes(5).tell("step", 6, **step(["a"], ["b"]))
        told.tell("around", 7, ddp=1, module="Linear", training=True)
        told.tell("backward", 7, roots=[], reached=[[0, "synced"], [1, None]]).tell("step", 8, **step(["a"], ["b"]))
    assert ids(seen(*ranks, stopped="ended")) == []


def test_who_leaves_the_loop_around_whole_passes_has_stopped_early(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "for epoch in epochs:\n    for batch in loader:\n        step(batch)\n"
        "    if plateau:\n        break\ndist.barrier()\n"
    )
    ranks = two(script)
    for told, epochs in zip(ranks, (2, 1), strict=True):
        told.tell("loader", 1, loader=0)
        for epoch in range(epochs):
            told.tell("pass", 2, loader=0, number=epoch)
            for _ in range(2 if epoch < 1 else 1):
                told.tell("batch", 2, loader=0, indices=[], rows=[])
                told.goes(3, over=epoch < 1)
            if epoch < 1:
                told.tell("pass-end", 2, loader=0)
    ranks[1].meets("barrier", 6, over=False)
    (finding,) = seen(*ranks)
    assert (finding.id, finding.line) == ("rank-local-early-stop", 5)


ORDERED = {
    "another order": ([(0, "a"), (2, "b"), (4, "c")], [(1, "a"), (3, "b"), (5, "e")], True),
    "other samples": ([(0, "a"), (2, "b"), (4, "c")], [(1, "d"), (3, "e"), (5, "f")], False),
    "equal samples": (
        [(0, "a"), (2, "a"), *((n, f"row {n}") for n in range(4, 40, 2))],
        [*((n, f"row {n}") for n in range(4, 32, 4)), (1, "a"), *((n, f"row {n - 1}") for n in (5, 9, 13))],
        False,
    ),
    "the same numbers": ([(0, "a"), (1, "b"), (2, "c")], [(0, "a"), (1, "b"), (3, "c")], False),
    "the same numbers in another order": ([(0, "a"), (1, "b"), (2, "c")], [(0, "b"), (1, "c"), (2, "a")], True),
}


@pytest.mark.parametrize("case", ORDERED)
def test_samples_that_come_to_two_ranks_under_other_numbers(case: str, script: Path) -> None:
    *held, differs = ORDERED[case]
    ranks = two(script)
    for told, rows in zip(ranks, held, strict=True):
        told.tell("sampler", 1, sampler=0, seed=0, shuffle=True, size=40)
        told.tell("loader", 2, loader=0, sampler=0).tell("pass", 4, loader=0, number=0)
        numbers, contents = zip(*rows, strict=True)
        told.tell("batch", 4, loader=0, indices=list(numbers), rows=list(contents))
    assert ("dataset-order-differs" in ids(seen(*ranks, stopped="ended"))) is differs


def test_a_rank_that_goes_forward_twice_has_skipped(script: Path) -> None:
    zero, one = two(script)
    zero.goes(5).goes(5)
    one.goes(5).tell("forward", 5, grad=True, communicates=False, ddp=0).goes(5)
    assert ids(seen(zero, one)) == ["rank-local-skip"]


def test_ranks_that_do_the_same_give_no_finding(script: Path) -> None:
    zero, one = two(script)
    for told in (zero, one):
        told.goes(5).meets("all_reduce", 7).meets("barrier", 15).tell("end", code=0, initialized=False)
    assert ids(seen(zero, one, stopped="ended")) == []


def test_what_is_cut_off_by_a_limit_is_no_parting(script: Path) -> None:
    zero, one = two(script)
    zero.goes(5).goes(5)
    one.goes(5)
    assert ids(seen(zero, one, stopped="steps")) == []


def step(values: list[str], grads: list[str], **facts: Any) -> dict[str, Any]:
    return {
        "optimizer": 0,
        "plain": True,
        "values": values,
        "grads": grads,
        "changed": [],
        "unheld": [],
        "sample": [[float(len(value)) for value in values]],
        "grad_sample": [[0.0]],
        "names": ["weight"],
        "in_ddp": [True],
        "alike": [True],
        **facts,
    }


def test_weights_that_differ_are_explained_once(script: Path) -> None:
    zero, one = two(script)
    zero.tell("optimizer", 3).goes(5).tell("step", 6, **step(["a"], ["g"]))
    one.tell("optimizer", 3).goes(5).tell("step", 6, **step(["bb"], ["g"]))
    (finding,) = seen(zero, one, stopped="ended")
    assert finding.id == "replicas-start-different"
    assert "differ by up to 1" in finding.evidence


def test_weights_that_come_apart_for_no_other_reason_have_diverged(script: Path) -> None:
    zero, one = two(script)
    for told, values in ((zero, ("a", "b")), (one, ("a", "cc"))):
        for value in values:
            told.goes(5).tell("step", 6, **step([value], ["g"]))
    assert ids(seen(zero, one, stopped="ended")) == ["replicas-diverged"]


def test_a_step_on_held_gradients_explains_what_comes_of_it(script: Path) -> None:
    zero, one = two(script)
    for told, values in ((zero, ("a", "b")), (one, ("a", "cc"))):
        for value in values:
            told.goes(5, synced="held").tell("step", 6, **step([value], [value]))
    assert ids(seen(zero, one, stopped="ended")) == ["unsynced-optimizer-step"]


def test_who_fell_silent_is_the_culprit_not_who_lost_the_connection(script: Path) -> None:
    zero, one = two(script)
    zero.tell("error", 15, type="RuntimeError", text="Connection closed by peer [127.0.0.1]:1")
    zero.account.code, zero.account.ended_s = 1, 5.0
    one.account.code, one.account.ended_s = -9, 6.0
    run = Run(accounts=[zero.account, one.account], stopped="ended")
    (note,) = judge(run).notes
    assert note.startswith("rank 1 failed first: killed by signal 9 (SIGKILL), as the kernel does when memory runs out")


def test_who_lost_a_connection_has_not_failed_alike(script: Path) -> None:
    zero, one = two(script)
    one.tell("error", 15, type="RuntimeError", text="DataLoader worker (pid 7) is killed by signal: Killed")
    zero.tell("error", 15, type="RuntimeError", text="Connection closed by peer [127.0.0.1]:1")
    one.account.code, one.account.ended_s = 1, 5.0
    zero.account.code, zero.account.ended_s = 1, 6.0
    (note,) = judge(Run(accounts=[zero.account, one.account], stopped="ended")).notes
    assert note.startswith("rank 1 failed first at ") and "DataLoader worker" in note


def test_every_check_names_a_rule() -> None:
    """Whatever a check can find is in the table of rules."""
    import re

    folder = Path(sys.modules[judge.__module__].__file__ or "").parent
    named = {
        name
        for file in folder.glob("checks_*.py")
        for name in re.findall(r'^ +"([a-z0-9]+(?:-[a-z0-9]+)+)",$', file.read_text(), re.MULTILINE)
    }
    assert len(named) > 40
    assert named <= set(RULES)


def test_conditions_and_loops_around_a_line(script: Path) -> None:
    inside, behind = Place(str(script), 7), Place(str(script), 13)
    run = run_of(*two(script))
    assert [(asked.line, asked.text, asked.of_rank) for asked in conditions(run, [inside])] == [(6, "chief", True)]
    assert [(asked.line, asked.text, asked.of_rank) for asked in conditions(run, [behind])] == [(12, "loss > 1", False)]
    (loop,) = loops_around([inside])
    assert (loop.line, loop.exits, loop.skips) == (4, ((9, "worse > 3"),), ((11, "not fine"),))
    assert loops_around([Place(str(script), 15)]) == []


def test_gpus_are_looked_for_in_imported_files_too(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text("from helpers import device\n")
    assert not names_gpus(script)
    (tmp_path / "helpers.py").write_text("device = 'cuda'\n")
    assert names_gpus(script)


def test_a_record_is_over_when_its_end_is_told() -> None:
    account = Account(rank=0)
    common = {"at_s": 1.0, "child": None}
    account.take(
        pack({"kind": "collective", "number": 1, "places": [], "syncs": 0, "facts": {"op": "barrier"}, **common})
    )
    assert account.waiting() is account.records[0]
    account.take(pack({"kind": "done", "of": 1, "facts": {"more": 2}, **common}))
    assert account.waiting() is None
    assert account.records[0].facts == {"op": "barrier", "more": 2}


def doing(rank: int, kind: str, **facts: Any) -> Account:
    """A rank that has begun something, and is still at it."""
    account = Account(rank=rank)
    account.take(
        pack({"kind": kind, "number": 1, "places": [], "syncs": 0, "facts": facts, "at_s": 1.0, "child": None})
    )
    return account


def test_who_sleeps_a_while_is_waited_for_and_who_sleeps_for_ever_is_not() -> None:
    meets = doing(0, "collective", op="barrier")
    met = patience_s([meets, doing(1, "collective", op="barrier")])
    elsewhere = patience_s([meets, doing(1, "step")])
    assert met < elsewhere
    assert patience_s([meets, doing(1, "sleep", seconds=30)]) == elsewhere + 30
    assert patience_s([meets, doing(1, "sleep", seconds=1e6)]) == elsewhere


def test_what_refuses_the_cpu_refuses_it_until_a_gpu_is_named(heard: tuple[Recorder, socket.socket]) -> None:
    """A script that uses the CPU by itself is answered as torch would."""
    devices = _Devices(heard[0], 0)
    norm = devices.if_used(lambda: "stands in", else_call=lambda: "refuses")
    assert norm() == "refuses"
    devices.tell("cuda:0")
    assert norm() == "stands in"


def test_a_message_is_bounded() -> None:
    long = pack({"kind": "batch", "facts": {"rows": ["x" * 16] * BOUND_BYTES}})
    assert len(long) < BOUND_BYTES
    assert json.loads(long)["facts"] == {"cut": True}


@pytest.fixture
def heard() -> Iterator[tuple[Recorder, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        yield Recorder(theirs, {}), ours


def messages(link: socket.socket) -> list[dict[str, Any]]:
    found = []
    while True:
        try:
            found.append(json.loads(link.recv(1 << 18)))
        except BlockingIOError:
            return found


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("a_library")

    def double(x: int, *, by: int = 2) -> int:
        if x < 0:
            raise ValueError("negative")
        return x * by

    def outer(x: int) -> int:
        result: int = module.__dict__["double"](x)
        return result

    module.__dict__.update(double=double, outer=outer)
    monkeypatch.setitem(sys.modules, "a_library", module)
    return module


def noted(call: Call) -> Generator[None, Any, None]:
    number = call.recorder.tell("print", by=call["by"])
    result = yield
    call.recorder.done(number, failed=call.error is not None, result=result)


def test_a_hook_tells_and_the_function_does_what_it_did(
    heard: tuple[Recorder, socket.socket], library: ModuleType
) -> None:
    recorder, link = heard
    install(recorder, [Hooked("a_library", "double", noted)])
    assert library.double(3) == 6
    assert library.double.__name__ == "double"
    begun, done = messages(link)
    assert begun["facts"] == {"by": 2}
    assert done["facts"] == {"result": 6}
    with pytest.raises(ValueError, match="negative"):
        library.double(-1)
    assert [message["kind"] for message in messages(link)] == ["print", "failed"]


def test_a_hook_that_fails_is_not_noticed(heard: tuple[Recorder, socket.socket], library: ModuleType) -> None:
    def broken(call: Call) -> Generator[None, Any, None]:
        raise RuntimeError("broken hook")
        yield

    recorder, link = heard
    install(recorder, [Hooked("a_library", "double", broken), Hooked("a_library", "nothing", broken)])
    assert library.double(3) == 6
    assert [message["facts"]["text"] for message in messages(link)] == ["RuntimeError: broken hook"]


def test_calls_inside_of_hooked_calls_are_the_librarys_own(
    heard: tuple[Recorder, socket.socket], library: ModuleType
) -> None:
    recorder, link = heard
    install(recorder, [Hooked("a_library", name, noted, scope="double") for name in ("double", "outer")])
    assert library.outer(3) == 6
    assert len(messages(link)) == 2  # begun and done
    library.double(3)
    assert len(messages(link)) == 2


def test_what_a_script_writes_stays_in_the_scratch_folder(tmp_path: Path) -> None:
    project, home = tmp_path / "project", tmp_path / "home"
    (project / "runs").mkdir(parents=True)
    home.mkdir()
    (project / "train.py").write_text("print(1)\n")
    (project / "large.bin").write_bytes(bytes(300_000))
    scratch = Scratch(home, in_place=False)
    scratch.place(project, project / "runs")
    inside = scratch.within(project / "runs")
    assert inside.is_dir()
    assert inside.is_relative_to(home)
    (inside / "new.pt").write_text("new")
    scratch.within(project / "train.py").write_text("changed")
    assert scratch.within(project / "large.bin").is_symlink()
    assert (project / "train.py").read_text() == "print(1)\n"
    assert list((project / "runs").iterdir()) == []
    assert list(scratch.moved.values()) == [str(project)]


def test_no_folder_of_the_users_is_ever_linked(tmp_path: Path) -> None:
    """However many files lie before it, what is written into a folder is not written into the original."""
    project = tmp_path / "project"
    (project / "data").mkdir(parents=True)
    (project / "outputs" / "run").mkdir(parents=True)
    for number in range(5100):
        (project / "data" / str(number)).touch()
    scratch = Scratch(home=tmp_path / "home", in_place=False)
    scratch.place(project)
    run = scratch.within(project / "outputs" / "run")
    (run / "last.pt").write_text("new")
    assert not list((project / "outputs" / "run").iterdir())
