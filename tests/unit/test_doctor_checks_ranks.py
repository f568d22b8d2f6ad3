"""What a run concludes about models, devices, and where the ranks' ways part.

Each test holds a right way and the wrong one that it resembles, as the ranks would tell of them.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.doctor.watching import (
    checks_collectives,
    checks_launch,
    checks_models,
)
from paceline.doctor.watching.probe.gpus import _Devices
from paceline.doctor.watching.probe.recorder import Recorder
from told import Ranks, ids, run_of, two


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks.beside(tmp_path)


# --- models


FORWARDS = {
    "self.head(self.body(x))": True,
    "self.head(x if self.norm is None else self.norm(x))": True,
    "[layer(x) for layer in self.layers][-1]": True,
    "self.head(x) if x.mean() > 0 else self.tail(x)": False,
    "self.experts[int(x[0, 0])](x)": False,
    "self.head(self.pooled(x))": False,
}


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_model_that_may_leave_parts_out_is_not_told_that_it_never_does(ranks: Ranks, forward: str) -> None:
    ranks.path.write_text(
        "class Net:\n    def __init__(self, deep):\n        if deep:\n            self.layers = []\n"
        f"    def forward(self, x):\n        return {forward}\n"
        + (
            "    def pooled(self, x):\n        if x.sum() > 0:\n            return self.tail(x)\n"
            * ("pooled" in forward)
        )
    )
    ranks.tell("wrap", ddp=0, find_unused=True, static=False, forwards=[[str(ranks.path), 5]])
    for _ in range(20):
        ranks.tell("graph", ddp=0, unused=[], total=4)
    found = ranks.found(checks_models.find_unused_unneeded)
    assert ids(found) == ["find-unused-unneeded"] * FORWARDS[forward]


# --- devices


def test_who_chooses_a_device_of_its_own_by_whatever_name(ranks: Ranks) -> None:
    ranks.tell("device", {"index": 0}, {"index": 1}, how="to")
    assert ranks.found(checks_launch.cuda_device_not_set) == []


@pytest.mark.parametrize(("index", "how"), [(None, "to"), (0, "to"), (0, "set_device")])
def test_the_first_gpu_for_every_rank_is_a_mistake_by_whatever_name(ranks: Ranks, index: int | None, how: str) -> None:
    ranks.tell("device", index=index, how=how)
    assert ids(ranks.found(checks_launch.cuda_device_not_set)) == ["cuda-device-not-set"]


def test_a_device_without_a_number_is_the_one_that_was_chosen() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        devices = _Devices(Recorder(theirs, {}), local_rank=1)
        devices.tell("cuda")
        with devices.chosen(1):
            devices.tell("cuda")
        devices.tell(torch.device("cuda"))
        devices.choose("cuda:1")
        devices.tell(None)
        told = [json.loads(ours.recv(1 << 16))["facts"] for _ in range(5)]
    assert [facts["index"] for facts in told] == [None, 1, None, 1, 1]
    assert [facts["how"] for facts in told] == ["to", "to", "to", "set_device", "to"]


# --- meetings


@pytest.mark.parametrize(("skips", "ends"), [(None, False), (1, False), (1, True)])
def test_a_batch_without_a_forward_on_one_rank_is_a_step_left_out(ranks: Ranks, skips: int | None, ends: bool) -> None:
    """Not so the last one before a pass is left, for which there may be other reasons."""
    ranks.path.write_text("for x in loader:\n    if not len(x):\n        continue\n    loss(model(x)).backward()\n")
    ranks.loads(0)
    for number in range(3):
        ranks.tell("batch", loader=0, number=0, indices=[], rows=[])
        both: list[dict[str, Any] | None] = [{"grad": True}, None if number == skips else {"grad": True}]
        ranks.tell("forward", *both, lines=(4,), ddp=0, communicates=False).tell("backward", lines=(4,), roots=[])
        if ends and number == skips:
            break
    (*found,) = ranks.found(checks_collectives.meetings_missed)
    wrong = skips is not None and not ends
    assert [(finding.id, finding.line) for finding in found] == [("rank-local-skip", 2)] * wrong


def test_a_barrier_of_one_rank_that_another_meets_with_its_next_one(ranks: Ranks) -> None:
    """It is the first one of which only one rank's stands under its rank's condition, not the one that nobody meets."""
    ranks.path.write_text("if rank == 0:\n    dist.barrier()\ndist.barrier()\n")
    both: dict[str, Any] = {"op": "barrier", "ranks": [0, 1]}
    ranks.tell("init").tell("collective", both, None, lines=(2,)).tell("collective", None, both, lines=(3,))
    ranks.tell("collective", both, None, lines=(3,)).tell("end", None, {"code": 0})
    (finding,) = ranks.found(checks_collectives.meetings_missed)
    assert (finding.id, finding.line) == ("rank-conditional-collective", 2)
    assert "rank 1 is at barrier (train.py:3)" in finding.evidence


@pytest.mark.parametrize(("code", "fails", "wrong"), [(0, False, True), (1, True, False), (0, True, False)])
def test_who_has_failed_is_not_missing(ranks: Ranks, code: int, fails: bool, wrong: bool) -> None:
    """An exception of one rank is told as such: nobody has to ask why it does not come."""
    ranks.path.write_text("save(model)\ndist.barrier()\n")
    ranks.tell("init").tell("collective", None, {"op": "barrier"}, lines=(2,), ranks=[0, 1])
    if fails:
        ranks.tell("error", {"type": "OSError", "text": "no space left"}, None)
    ranks.tell("end", {"code": code, "initialized": False}, None)
    assert bool(ranks.found(checks_collectives.meetings_missed)) == wrong


@pytest.mark.parametrize("line", [3, 5])
def test_a_rank_that_goes_through_another_loop_leaves_out_no_step(tmp_path: Path, line: int) -> None:
    """Rank 0 trains a teacher first, which is no DDP; in one loop with the others it would have left out a step."""
    zero, one = two(tmp_path / "train.py")
    for own, where in ((zero, 3), (one, line)):
        own.tell("loader", where, loader=0, workers=0).tell("pass", where, loader=0, number=0)
        for _ in range(3):
            own.tell("batch", where, loader=0, number=0, indices=[], rows=[])
            if own is one:
                own.tell("forward", where, grad=True, ddp=0)
            own.tell("backward", where, roots=[], reached=[])
    run = run_of(zero, one, stopped="ended")
    found = checks_collectives._without_forward(run)
    assert [finding.id for finding in found or ()] == ["rank-local-skip"] * (line == 3)
