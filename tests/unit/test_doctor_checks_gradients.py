"""What a run concludes about losses, gradients and weights.

Each test holds a right way and the wrong one that it resembles, as the ranks would tell of them.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.doctor.watching import (
    checks_gradients,
    checks_replicas,
)
from paceline.doctor.watching.probe import communication, optimizers, training
from paceline.doctor.watching.probe.hooking import Call
from paceline.doctor.watching.probe.recorder import Recorder
from paceline.doctor.watching.records import WEIGHTED
from told import Ranks, ids


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks.beside(tmp_path)


def micro_batches(ranks: Ranks, *, onto: bool = True, lines: Sequence[Sequence[int]] = ((5,), (5,))) -> None:
    """Two batches of a loader before each step."""
    ranks.loads(0)
    for _ in range(3):
        ranks.goes(loader=0, lines=lines[0]).goes(loader=0, lines=lines[1], onto=onto).steps()


ACCUMULATES: dict[str, tuple[Callable[[Ranks], object], bool]] = {
    "micro-batches": (micro_batches, True),
    "micro-batches, the last one elsewhere": (lambda ranks: micro_batches(ranks, lines=((5,), (3,))), True),
    "micro-batches, through a helper": (lambda ranks: micro_batches(ranks, lines=((2, 5), (2, 5))), True),
    "zeroed between": (lambda ranks: micro_batches(ranks, onto=False), False),
    "two losses of a batch": (
        lambda ranks: [
            ranks.loads(0),
            *(ranks.goes(loader=0).goes(onto=True).steps() for _ in range(3)),
        ],
        False,
    ),
    "a batch of each of two loaders": (
        lambda ranks: [
            ranks.loads(0, 1),
            *(ranks.goes(loader=0).goes(loader=1, onto=True).steps() for _ in range(3)),
        ],
        False,
    ),
    "samples of its own": (
        lambda ranks: [ranks.goes(input=f"{n}").goes(input=f"{n}'", onto=True).steps() for n in range(3)],
        True,
    ),
    "losses of the same samples": (
        lambda ranks: [ranks.goes(input=f"{n}").goes(input=f"{n}", onto=True).steps() for n in range(3)],
        False,
    ),
    "real and made up, by a helper": (
        lambda ranks: [
            ranks.goes(input="real", lines=(2, 4)).goes(input="fake", lines=(2, 5), onto=True).steps() for _ in range(3)
        ],
        False,
    ),
    "divided in the gradients": (
        lambda ranks: [
            ranks.loads(0),
            *(ranks.goes(loader=0).goes(loader=0, onto=True).steps(touched=True) for _ in range(3)),
        ],
        False,
    ),
}


@pytest.mark.parametrize("case", ACCUMULATES)
def test_gradients_are_accumulated_only_over_samples_of_their_own(ranks: Ranks, case: str) -> None:
    told, wrong = ACCUMULATES[case]
    told(ranks)
    found = ranks.found(checks_gradients.accumulation_not_normalised)
    assert ids(found) == ["accumulation-not-normalised"] * wrong


@pytest.mark.parametrize(
    ("divisor", "rule"),
    [
        ([], "accumulation-not-normalised"),
        ([["DivBackward0", 2]], None),
        ([["DivBackward0", 3]], None),
        ([["DivBackward0", 4]], "loss-scaled-by-world-size"),
        ([["MulBackward0", 0.5]], None),
        ([["gradient", None]], None),
        (None, None),
    ],
)
def test_what_the_losses_of_two_micro_batches_were_divided_by(
    ranks: Ranks, divisor: list[list[Any]] | None, rule: str | None
) -> None:
    """``None``: they are sums."""
    ranks.loads(0)
    roots = [[*divisor, ["MeanBackward0", 4.0]]] if divisor is not None else [[["MseLossBackward0", None]]]
    for _ in range(3):
        ranks.goes(loader=0, roots=roots).goes(loader=0, roots=roots, onto=True).steps()
    checks = checks_gradients.accumulation_not_normalised, checks_gradients.loss_scaled_by_world_size
    assert [finding.id for check in checks for finding in ranks.found(check)] == ([rule] if rule else [])


@pytest.mark.parametrize(("alike", "wrong"), [([True, True], True), ([True, False], False), (None, False)])
def test_only_weights_that_are_to_be_equal_are_compared(ranks: Ranks, alike: list[bool] | None, wrong: bool) -> None:
    ranks.tell("init")
    for own, other in (("b", "c"), ("d", "e")):
        told = {"alike": alike, "names": ["body", "head"], "sample": [[0.0], [1.0]], "grads": ["g", "g"]}
        ranks.goes().steps({"values": ["a", own]}, {"values": ["a", other]}, **told)
    found = ranks.found(checks_replicas.replicas_start_different) + ranks.found(checks_replicas.replicas_diverged)
    assert ids(found) == ["replicas-start-different", "replicas-diverged"] * wrong
    if wrong:
        assert found[1].evidence.endswith(", in head")


@pytest.mark.parametrize(
    ("copied", "touched", "wrong"), [(False, False, True), (True, True, True), (True, False, False)]
)
def test_a_copy_of_gradients_that_is_not_put_back_is_for_show(
    ranks: Ranks, copied: bool, touched: bool, wrong: bool
) -> None:
    ranks.goes().tell("collective", op="all_reduce", ranks=[0, 1], grads="ddp", copied=copied).steps(touched=touched)
    assert ids(ranks.found(checks_gradients.redundant_grad_allreduce)) == ["redundant-grad-allreduce"] * wrong


@pytest.mark.parametrize("joined", [True, False])
def test_steps_of_ranks_with_uneven_inputs_are_not_compared_by_number(ranks: Ranks, joined: bool) -> None:
    """Rank 0 has one batch an epoch, rank 1 two, and in between it is in the context that covers for the other."""
    ranks.tell("init")
    for values in (("a", "a"), (None, "b"), ("c", "c"), (None, "d")):
        if joined and values[0] is not None:
            ranks.tell("join")
        for rank, value in enumerate(values):
            own: list[dict[str, Any] | None] = [None, None]
            own[rank] = {"values": [value]} if value is not None else None
            ranks.steps(*own, alike=[True])
    assert ids(ranks.found(checks_replicas.replicas_diverged)) == ["replicas-diverged"] * (not joined)


@pytest.mark.parametrize(("loads", "rule"), [(None, "replicas-diverged"), ((0,), "resume-on-one-rank")])
def test_a_state_that_one_rank_loads_later_in_the_run_is_the_cause(
    ranks: Ranks, loads: tuple[int, ...] | None, rule: str
) -> None:
    ranks.tell("init").goes().steps(alike=[True])
    if loads is not None:
        own: list[dict[str, Any] | None] = [{"whole": True} if rank in loads else None for rank in (0, 1)]
        ranks.tell("load-state", *own, lines=(3,), ddp=0, lost=False)
    ranks.goes().steps({"values": ["b"]}, {"values": ["c"]})
    checks = checks_replicas.resume_on_one_rank, checks_replicas.replicas_start_different
    found = [finding for check in checks for finding in ranks.found(check)]
    assert ids(found or ranks.found(checks_replicas.replicas_diverged)) == [rule]


@pytest.mark.parametrize(("then", "wrong"), [("a synced backward", True), ("by hand", True), ("nothing", False)])
def test_clipping_is_too_early_if_gradients_are_reduced_afterwards(ranks: Ranks, then: str, wrong: bool) -> None:
    """If they never are, it is the step that is wrong."""
    ranks.goes(reached=[[0, "held"]]).tell("clip", {"norm": 1.0}, {"norm": 2.0})
    if then == "a synced backward":
        ranks.goes(onto=True)
    elif then == "by hand":
        ranks.tell("collective", op="all_reduce", ranks=[0, 1], grads="plain", copied=False)
    ranks.steps()
    assert ids(ranks.found(checks_gradients.clip_before_sync)) == ["clip-before-sync"] * wrong


def test_a_loss_is_told_by_its_last_functions() -> None:
    scores, classes = torch.rand(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    loss = torch.nn.functional.mse_loss(scores, torch.zeros(4, 3))
    assert training._root(loss, weighted=False) == [["MseLossBackward0", 12.0]]
    assert training._root(loss / 2, weighted=False) == [["DivBackward0", 2.0], ["MseLossBackward0", 12.0]]
    assert training._root(loss, weighted=True)[0] == ["gradient", None]
    crossed = torch.nn.functional.cross_entropy
    weights = torch.tensor([0.1, 0.2, 0.3])
    losses = {
        12.0: torch.nn.functional.binary_cross_entropy(scores, torch.ones(4, 3)),
        3.0: crossed(scores, torch.tensor([0, 1, 2, -100])),  # of so many tokens
        0.7: crossed(scores, classes, weight=weights),
        None: crossed(scores, classes, reduction="sum"),
    }
    told = [training._root(one, weighted=False)[0] for one in losses.values()]
    assert [value for _, value in told] == pytest.approx(list(losses))
    assert [name.endswith(WEIGHTED) for name, _ in told] == [False, False, True, False]


@pytest.mark.parametrize(("name", "wrong"), [("NllLossBackward0", True), (f"NllLossBackward0{WEIGHTED}", False)])
def test_weights_of_classes_are_no_counts_of_samples(ranks: Ranks, name: str, wrong: bool) -> None:
    ranks.tell("backward", *({"roots": [[[name, n]]]} for n in (6.0, 2.0)), reached=[[0, "synced"]])
    assert ids(ranks.found(checks_gradients.unequal_weight_average)) == ["unequal-weight-average"] * wrong


def test_gradients_are_known_flattened_and_scaled_too() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers._number(optimizer)
    model(torch.randn(4, 3)).mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    for tensor, copied in ((gradients[0], False), (gradients[0].clone(), True), (flat / 2, True), (flat[6:], True)):
        told = optimizers.reduced(tensor)
        assert told == ("plain", copied)
    for tensor in (torch.zeros(1), torch.randn(6), flat[1:-1], torch.randn(len(flat)), torch.tensor([1, 2])):
        assert optimizers.reduced(tensor) is None


def test_what_a_rank_brings_to_a_sum_is_told_until_it_steps() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers._number(optimizer)
    model(torch.tensor([[1.0, 3.0]])).sum().backward()
    parameters = list(model.parameters())
    assert optimizers._own(parameters) is None  # nobody has reduced them
    for times, parameter in enumerate(parameters, 1):
        assert parameter.grad is not None
        optimizers.reduced(parameter.grad)
        parameter.grad.mul_(2)  # as if another rank had the same
        optimizers.reduced(parameter.grad)  # what is reduced once more was somebody else's, too
        assert times < 2 or optimizers._own(parameters) == [[1.0, 3.0], [1.0]]
    assert optimizers._own(parameters) is None


def test_what_is_gathered_for_a_metric_is_in_no_product() -> None:
    features = torch.nn.Linear(4, 3)(torch.randn(5, 4))
    gathered = torch.cat([features.detach(), torch.randn(5, 3)])
    contrastive = torch.nn.functional.cross_entropy(features @ gathered.T, torch.arange(5))
    plain = torch.nn.functional.cross_entropy(features, torch.zeros(5, dtype=torch.long))
    attending = (features @ features.T @ features).mean()
    losses = (contrastive, plain, attending, torch.zeros(1))
    assert [communication._has_constant_factor(loss) for loss in losses] == [True, False, False, False]


SUMS: dict[str, tuple[Callable[[Ranks], object], bool]] = {
    "the sum of means": (lambda ranks: reduced_by_hand(ranks, [[3.0, -2.0]]), True),
    "their mean": (lambda ranks: reduced_by_hand(ranks, [[1.5, -1.0]]), False),
    "one of them": (lambda ranks: reduced_by_hand(ranks, [[1.0, -2.0]]), False),
    "the sum of shares of a mean": (
        lambda ranks: reduced_by_hand(ranks, [[3.0, -2.0]], roots=[[["DivBackward0", 2.0], ["MeanBackward0", 4.0]]]),
        False,
    ),
    "the sum of sums": (
        lambda ranks: reduced_by_hand(ranks, [[3.0, -2.0]], roots=[[["MseLossBackward0", None]]]),
        False,
    ),
    "clipped": (lambda ranks: reduced_by_hand(ranks.tell("clip", norm=1.0), [[3.0, -2.0]]), False),
    "Adam": (lambda ranks: reduced_by_hand(ranks, [[3.0, -2.0]], by="Adam"), False),
    "DDP": (lambda ranks: reduced_by_hand(ranks.tell("wrap", ddp=0), [[3.0, -2.0]]), False),
    "not by hand": (lambda ranks: reduced_by_hand(ranks, [[3.0, -2.0]], by_hand=False), False),
}


def reduced_by_hand(
    ranks: Ranks, taken: list[list[float]], *, by: str = "SGD", by_hand: bool = True, **backward: Any
) -> None:
    ranks.tell("optimizer", optimizer=0, name=by)
    for _ in range(2):
        ranks.goes(**{"reached": [], **backward})
        ranks.tell("collective", lines=(3,), op="all_reduce", ranks=[0, 1], grads="plain", copied=False)
        sides: list[dict[str, Any]] = [{"own": [values] if by_hand else None} for values in ([1.0, 0.0], [2.0, -2.0])]
        ranks.steps(*sides, grad_sample=taken, touched=True)


@pytest.mark.parametrize("case", SUMS)
def test_gradients_that_are_added_up_over_ranks_are_to_be_divided(ranks: Ranks, case: str) -> None:
    told, wrong = SUMS[case]
    told(ranks)
    found = ranks.found(checks_gradients.summed_over_ranks)
    assert [(finding.id, finding.line) for finding in found] == [("loss-scaled-by-world-size", 3)] * wrong


@pytest.mark.parametrize(("by", "line"), [("a scheduler", 4), ("the rank", 2), ("nobody", None)])
def test_learning_rates_that_come_apart_are_told_where_they_do(ranks: Ranks, by: str, line: int | None) -> None:
    """All the rest is one weight that differs, and a scheduler that decides for itself says why."""
    ranks.tell("init").tell("optimizer", lines=(2,), optimizer=0)
    apart: list[dict[str, Any]] = [{"rates": [0.1]}, {"rates": [0.05]}]
    same: list[dict[str, Any]] = [{"rates": [0.1]}, {"rates": [0.1]}]
    ranks.goes().steps(*(apart if by == "the rank" else same), alike=[True])
    ranks.tell("scheduled", *(apart if by == "a scheduler" else same), lines=(4,), scheduler=0)
    ranks.goes().steps(*(same if by == "nobody" else apart))
    ranks.goes().steps({"values": ["b"]}, {"values": ["c" if by != "nobody" else "b"]})
    found = ranks.found(checks_replicas.replicas_diverged)
    assert [(finding.id, finding.line) for finding in found] == ([("replicas-diverged", line)] if line else [])
    assert all("0.1 and 0.05" in finding.evidence for finding in found)


def test_rates_of_a_part_that_each_rank_has_for_itself_may_differ(ranks: Ranks) -> None:
    ranks.tell("init").goes().steps({"rates": [0.1, 0.2]}, {"rates": [0.1, 0.4]}, alike=[True, False])
    assert ranks.found(checks_replicas.replicas_diverged) == []


def test_a_scheduler_with_a_step_of_its_own_tells_its_rates() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with ours, theirs:
        recorder = Recorder(theirs, {})
        for name in training._SCHEDULERS[1:]:
            owner = getattr(torch.optim.lr_scheduler, name)
            scheduler = owner(optimizer, *([2] if name.startswith("Cosine") else []))
            training._schedulers[scheduler] = 7
            running = training._scheduler_stepped(Call(recorder, owner.step, (scheduler,), {}, None))
            next(running)
            with contextlib.suppress(StopIteration):
                running.send(None)
            told = json.loads(ours.recv(1 << 16))
            assert (told["kind"], told["facts"]) == ("scheduled", {"scheduler": 7, "rates": [0.1]})
            assert "step" in vars(owner)
    own = {n for n, c in vars(torch.optim.lr_scheduler).items() if isinstance(c, type) and "step" in vars(c)}
    assert own & set(torch.optim.lr_scheduler.__all__) <= {*training._SCHEDULERS, "SequentialLR", "ChainedScheduler"}
