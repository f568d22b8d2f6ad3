"""What a run proves of rules that a script obeys, and what that takes back of what was read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.doctor.watching.judging import judge
from paceline.doctor.watching.obeying import RULES_OBEYED
from paceline.doctor.watching.records import Stopped
from told import Told, run_of, two


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
