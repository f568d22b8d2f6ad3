"""What the run pass concludes from records: a mistake where there is one, and nothing where there only seems to be.

Each test holds a right way and the wrong one that it resembles, as the ranks would tell of them.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.doctor.findings import Finding
from paceline.doctor.watching import (
    checks_collectives,
    checks_data,
    checks_files,
    checks_gradients,
    checks_launch,
    checks_models,
    checks_random,
    checks_replicas,
)
from paceline.doctor.watching.probe import communication, optimizers, training
from paceline.doctor.watching.probe.gpus import _Devices
from paceline.doctor.watching.probe.recorder import Recorder
from paceline.doctor.watching.records import KINDS, Account, Place, Record, Run

Check = Callable[[Run], Iterator[Finding]]


class Ranks:
    """Two ranks that tell of the same or of different things."""

    def __init__(self, path: Path) -> None:
        self.path, self.accounts, self._at_s = path, [Account(rank=0), Account(rank=1)], 0.0

    def tell(
        self,
        kind: str,
        *sides: dict[str, Any],
        lines: Sequence[int] = (1,),
        child: int | None = None,
        syncs: int = 0,
        **facts: Any,
    ) -> Ranks:
        """Both ranks tell it: with the same facts, or each with its side's besides. An empty side tells nothing."""
        assert kind in KINDS or kind == "lock"
        self._at_s += 1.0
        for account, own in zip(self.accounts, sides or ({"same": True}, {"same": True}), strict=True):
            if own:
                record = Record(
                    kind=kind,
                    rank=account.rank,
                    number=len(account.records),
                    at_s=self._at_s + account.rank / 4,
                    places=tuple(Place(str(self.path), line) for line in lines),
                    child=child,
                    syncs=syncs,
                    facts=facts | own,
                    ended_s=self._at_s + 0.5,
                )
                account.records.append(record)
        return self

    def goes(
        self, *, loader: int | None = None, lines: Sequence[int] = (5,), onto: bool = False, **facts: Any
    ) -> Ranks:
        """A batch of a loader, forward and backward."""
        if loader is not None:
            self.tell("batch", loader=loader, number=0, indices=[], rows=["a"])
        self.tell("forward", lines=lines, grad=True, ddp=0, training=True, input=facts.pop("input", None), batch=4)
        facts = {"roots": [[["MeanBackward0", 4.0]]], "reached": [[0, "synced"]], **facts}
        return self.tell("backward", lines=lines, onto=onto, **facts)

    def steps(self, *sides: dict[str, Any], **facts: Any) -> Ranks:
        whole: dict[str, Any] = {
            "optimizer": 0,
            "plain": True,
            "values": ["a"],
            "grads": ["g"],
            "sample": [[1.0]],
            "grad_sample": [[0.0]],
        }
        return self.tell("step", *sides, lines=(6,), **(whole | {"touched": False, "names": ["weight"]} | facts))

    def found(self, check: Check) -> list[Finding]:
        return list(check(Run(accounts=self.accounts, stopped="ended")))


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    path = tmp_path / "train.py"
    path.write_text("one\ntwo\nthree\nfour\nfive\nsix\n")
    return Ranks(path)


def ids(found: Sequence[Finding]) -> list[str]:
    return [finding.id for finding in found]


# --- files


@pytest.mark.parametrize(
    ("mode", "locked", "wrong"),
    [("write", False, True), ("write", True, False), ("update", False, False), ("exclusive", False, False)],
)
def test_a_file_that_is_locked_or_shared_is_not_a_save(ranks: Ranks, mode: str, locked: bool, wrong: bool) -> None:
    ranks.tell("open", path="/project/data.lock", mode=mode, own=True)
    if locked:
        ranks.tell("lock", path="/project/data.lock")
    assert ids(ranks.found(checks_files.other_files_on_all_ranks)) == ["save-on-all-ranks"] * wrong


@pytest.mark.parametrize(("lost", "whole", "wrong"), [(False, True, False), (True, False, True), (True, True, True)])
def test_a_wrappers_keys_are_wrong_for_a_plain_model_only(ranks: Ranks, lost: bool, whole: bool, wrong: bool) -> None:
    ranks.tell("save", lines=(3,), path="/project/last.pt", prefixed=True)
    ranks.tell("load-state", lines=(4,), ddp=None if lost else 0, lost=lost, whole=whole)
    found = ranks.found(checks_files.module_prefix_checkpoint)
    assert [(finding.id, finding.line) for finding in found] == [("module-prefix-checkpoint", 3)] * wrong


def test_a_wrappers_keys_that_nobody_loads_are_no_mistake_of_this_run(ranks: Ranks) -> None:
    ranks.tell("save", path="/project/last.pt", prefixed=True)
    assert ranks.found(checks_files.module_prefix_checkpoint) == []


def test_what_prints_for_others_is_told_where_they_ask_for_it(ranks: Ranks) -> None:
    """A print that was put in place of Python's own hands on what it was given."""
    ranks.path.write_text(
        "def print(*args, **kwargs):\n    builtin_print(*args, **kwargs)\nprint('loss')\nprint('done')\n"
    )
    for line in (3, 3, 4, 4):
        ranks.tell("print", lines=(2, line), text="loss")
    assert [finding.line for finding in ranks.found(checks_files.print_on_all_ranks)] == [3, 4]


@pytest.mark.parametrize(("line", "wrong"), [("print(loss)", True), ("print(f'cuda:{i} is there')", False)])
def test_a_line_that_tells_whose_it_is_may_come_from_every_rank(ranks: Ranks, line: str, wrong: bool) -> None:
    ranks.path.write_text(f"{line}\n")
    ranks.tell("print", text="1.0").tell("print", text="0.9")
    assert ids(ranks.found(checks_files.print_on_all_ranks)) == ["print-on-all-ranks"] * wrong


@pytest.mark.parametrize(
    ("load_first", "load_syncs", "save_syncs", "wrong"),
    [(True, 1, 9, False), (False, 9, 9, True), (False, 8, 9, True), (False, 10, 9, False), (True, 9, 9, True)],
    ids=["a state to resume from", "not met since", "behind", "met since", "at the same time"],
)
def test_who_loads_before_a_save_that_comes_much_later(
    ranks: Ranks, load_first: bool, load_syncs: int, save_syncs: int, wrong: bool
) -> None:
    for kind in ("load", "save") if load_first else ("save", "load"):
        only_zero: tuple[dict[str, Any], ...] = ({"prefixed": False}, {})
        if kind == "save":
            ranks.tell("save", *only_zero, syncs=save_syncs, path="/project/last.pt")
        else:
            ranks.tell("load", syncs=load_syncs, path="/project/last.pt", mapped=True)
    assert ids(ranks.found(checks_files.load_without_barrier)) == ["load-without-barrier"] * wrong


@pytest.mark.parametrize(("of_a_model", "level"), [(True, "warning"), (False, "advice")])
def test_a_load_without_a_device_matters_for_what_a_model_gets(ranks: Ranks, of_a_model: bool, level: str) -> None:
    ranks.tell("asks", what="gpus", value=False).tell("load", path="/project/x.pt", mapped=False)
    if of_a_model:
        ranks.tell("load-state", ddp=0, lost=False, whole=True)
    assert [finding.level for finding in ranks.found(checks_files.load_without_map_location)] == [level]


# --- gradients


def loads(ranks: Ranks, *numbers: int) -> Ranks:
    for number in numbers:
        ranks.tell("loader", loader=number, workers=0).tell("pass", loader=number, number=0)
    return ranks


def micro_batches(ranks: Ranks, *, onto: bool = True, lines: Sequence[Sequence[int]] = ((5,), (5,))) -> None:
    """Two batches of a loader before each step."""
    loads(ranks, 0)
    for _ in range(3):
        ranks.goes(loader=0, lines=lines[0]).goes(loader=0, lines=lines[1], onto=onto).steps()


ACCUMULATES: dict[str, tuple[Callable[[Ranks], object], bool]] = {
    "micro-batches": (micro_batches, True),
    "micro-batches, the last one elsewhere": (lambda ranks: micro_batches(ranks, lines=((5,), (3,))), True),
    "micro-batches, through a helper": (lambda ranks: micro_batches(ranks, lines=((2, 5), (2, 5))), True),
    "zeroed between": (lambda ranks: micro_batches(ranks, onto=False), False),
    "two losses of a batch": (
        lambda ranks: [
            loads(ranks, 0),
            *(ranks.goes(loader=0).goes(onto=True).steps() for _ in range(3)),
        ],
        False,
    ),
    "a batch of each of two loaders": (
        lambda ranks: [
            loads(ranks, 0, 1),
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
            loads(ranks, 0),
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
    loads(ranks, 0)
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
            own: list[dict[str, Any]] = [{}, {}]
            own[rank] = {"values": [value]} if value is not None else {}
            ranks.steps(*own, alike=[True])
    assert ids(ranks.found(checks_replicas.replicas_diverged)) == ["replicas-diverged"] * (not joined)


@pytest.mark.parametrize(("loads", "rule"), [(None, "replicas-diverged"), ((0,), "resume-on-one-rank")])
def test_a_state_that_one_rank_loads_later_in_the_run_is_the_cause(
    ranks: Ranks, loads: tuple[int, ...] | None, rule: str
) -> None:
    ranks.tell("init").goes().steps(alike=[True])
    if loads is not None:
        own: list[dict[str, Any]] = [{"whole": True} if rank in loads else {} for rank in (0, 1)]
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
        1.0: crossed(scores, classes, weight=weights),
        None: crossed(scores, classes, reduction="sum"),
    }
    assert [training._root(one, weighted=False)[0][1] for one in losses.values()] == list(losses)


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


def test_what_is_gathered_for_a_metric_is_in_no_product() -> None:
    features = torch.nn.Linear(4, 3)(torch.randn(5, 4))
    gathered = torch.cat([features.detach(), torch.randn(5, 3)])
    contrastive = torch.nn.functional.cross_entropy(features @ gathered.T, torch.arange(5))
    plain = torch.nn.functional.cross_entropy(features, torch.zeros(5, dtype=torch.long))
    attending = (features @ features.T @ features).mean()
    losses = (contrastive, plain, attending, torch.zeros(1))
    assert [communication._has_constant_factor(loss) for loss in losses] == [True, False, False, False]


# --- data


SPLITS = {
    "padded by hand": ([*range(33)], [*range(33, 65), 0], 65, False),
    "padded to whole batches": ([*range(36)], [*range(30, 60), *range(6)], 60, False),
    "padded part of a part": ([*range(0, 40, 2)], [*range(1, 39, 2), 0], 100, False),
    "a random half": ([*range(32)], [*range(16, 48)], 64, True),
    "a random tenth": ([3, 9, 17, 21, 40, 41], [1, 8, 17, 22, 40, 43], 60, True),
    "the most of it": ([*range(36)], [*range(4, 40)], 40, True),
    "another order": ([*range(32)], [*range(31, -1, -1)], 64, False),
}


@pytest.mark.parametrize("case", SPLITS)
def test_shards_are_no_split_that_differs(ranks: Ranks, case: str) -> None:
    *parts, of, wrong = SPLITS[case]
    sides = [{"size": len(part), "digest": str(part), "indices": part} for part in parts]
    ranks.tell("subset", *sides, of=of)
    assert ids(ranks.found(checks_data.random_split_differs)) == ["random-split-differs"] * wrong


WORKERS = {
    "as torch seeds them": ([(1, 7, "a"), (2, 8, "b")], [(3, 9, "c"), (4, 10, "d")], None),
    "a constant": ([(1, 7, "a"), (2, 8, "a")], [(3, 9, "a"), (4, 10, "a")], "error"),
    "by the worker's number": ([(1, 7, "a"), (2, 8, "b")], [(3, 9, "a"), (4, 10, "b")], "error"),
    "the same in each epoch": ([(1, 7, "a"), (2, 8, "a")], [(3, 9, "c"), (4, 10, "c")], "error"),
    "ranks seeded alike": ([(1, 7, "a"), (2, 8, "b")], [(3, 7, "a"), (4, 8, "b")], "advice"),
}


@pytest.mark.parametrize("case", WORKERS)
def test_loader_workers_are_to_blame_for_what_they_do_with_their_seeds(ranks: Ranks, case: str) -> None:
    *sides, level = WORKERS[case]
    ranks.tell("loader", loader=0, workers=1)
    for rank, workers in enumerate(sides):
        for child, seed, state in workers:
            own: list[dict[str, Any]] = [{}, {}]
            own[rank] = {"seed": seed, "state": state}
            ranks.tell("draw", *own, child=child, where="fetch", generator="numpy", fetch=1)
            own[rank] = {"seed": seed, "state": "by sample"}  # what a dataset seeds by the sample's number comes again
            ranks.tell("draw", *own, child=child, where="fetch", generator="numpy", fetch=2)
    found = ranks.found(checks_random.worker_seed_identical)
    assert [finding.level for finding in found] == ([level] if level else [])


@pytest.mark.parametrize("wrong", [True, False])
def test_parts_that_are_split_differently_are_not_told_as_another_order(ranks: Ranks, wrong: bool) -> None:
    """Number 0 of one rank's part is another sample than number 0 of the other's."""
    sides: list[dict[str, Any]] = [
        {"digest": "a", "indices": [*range(24)]},
        {"digest": "b" if wrong else "a", "indices": [*range(8, 32)]},
    ]
    ranks.tell("subset", *sides, size=24, of=32).tell("sampler", sampler=0, seed=0, shuffle=True, size=24)
    ranks.tell("loader", loader=0, sampler=0, workers=0).tell("pass", loader=0, number=0)
    rows = [{"rows": [f"row {n}" for n in range(12)]}, {"rows": [f"row {n + 8}" for n in range(12)]}]
    ranks.tell("batch", *rows, loader=0, number=0, indices=[*range(12)])
    assert ids(ranks.found(checks_data.dataset_order_differs)) == ["dataset-order-differs"] * (not wrong)
    assert ids(ranks.found(checks_data.random_split_differs)) == ["random-split-differs"] * wrong


@pytest.mark.parametrize(("replicas", "wrong"), [(2, True), (1, False)])
def test_a_sampler_of_a_ranks_own_data_may_differ(ranks: Ranks, replicas: int, wrong: bool) -> None:
    ranks.tell("sampler", {"seed": 0, "size": 30}, {"seed": 1, "size": 34}, sampler=0, shuffle=True, replicas=replicas)
    found = ranks.found(checks_data.sampler_seed_differs) + ranks.found(checks_data.dataset_order_differs)
    assert ids(found) == ["sampler-seed-differs", "dataset-order-differs"] * wrong


STREAMS = {
    "the same samples": (["a", "b", "c"], ["a", "b", "c"], True),
    "the same samples, some of them twice": ([*"abcdefghabcdefgh"], [*"abcdefghabcdefgh"], True),
    "every other sample": (["a", "c", "e"], ["b", "d", "f"], False),
    "every other sample, of few that repeat": ([*"acegacegacegaceg"], [*"bdfhbdfhbdfhbdfh"], False),
    "labels": ([*"abababab"], [*"abababab"], False),
}


@pytest.mark.parametrize("case", STREAMS)
def test_a_stream_is_the_same_if_its_samples_are_or_their_order_is(ranks: Ranks, case: str) -> None:
    *orders, wrong = STREAMS[case]
    ranks.tell("loader", loader=0, iterable=True, workers=0, dataset="Lines").tell("pass", loader=0, number=0)
    ranks.tell("batch", *({"rows": rows} for rows in orders), loader=0, number=0, indices=None)
    ranks.tell("backward", roots=[], reached=[])
    assert ids(ranks.found(checks_data.iterable_not_sharded)) == ["iterable-not-sharded"] * wrong


def test_the_function_that_seeds_workers_is_where_reading_may_tell_it(ranks: Ranks) -> None:
    """One mistake, one finding: that of the run takes the place of the one that was read in these lines."""
    ranks.tell("loader", loader=0, workers=1, seeding=[str(ranks.path), 2, 4])
    ranks.tell("draw", {"seed": 7}, {"seed": 8}, child=1, generator="numpy", state="same", where="fetch", fetch=1)
    (finding,) = ranks.found(checks_random.worker_seed_identical)
    assert finding.also == tuple((str(ranks.path), line) for line in (2, 3, 4))


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
    loads(ranks, 0)
    for number in range(3):
        ranks.tell("batch", loader=0, number=0, indices=[], rows=[])
        both: list[dict[str, Any]] = [{"grad": True}, {} if number == skips else {"grad": True}]
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
    ranks.tell("init").tell("collective", both, {}, lines=(2,)).tell("collective", {}, both, lines=(3,))
    ranks.tell("collective", both, {}, lines=(3,)).tell("end", {}, {"code": 0})
    (finding,) = ranks.found(checks_collectives.meetings_missed)
    assert (finding.id, finding.line) == ("rank-conditional-collective", 2)
    assert "rank 1 is at barrier (train.py:3)" in finding.evidence


@pytest.mark.parametrize(("code", "fails", "wrong"), [(0, False, True), (1, True, False), (0, True, False)])
def test_who_has_failed_is_not_missing(ranks: Ranks, code: int, fails: bool, wrong: bool) -> None:
    """An exception of one rank is told as such: nobody has to ask why it does not come."""
    ranks.path.write_text("save(model)\ndist.barrier()\n")
    ranks.tell("init").tell("collective", {}, {"op": "barrier"}, lines=(2,), ranks=[0, 1])
    if fails:
        ranks.tell("error", {"type": "OSError", "text": "no space left"}, {})
    ranks.tell("end", {"code": code, "initialized": False}, {})
    assert bool(ranks.found(checks_collectives.meetings_missed)) == wrong
