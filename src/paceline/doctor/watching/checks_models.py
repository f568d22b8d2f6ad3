"""What DDP was made of: parameters that go unused, graphs that change, batch norms, buffers, checkpointing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from paceline.doctor.findings import Finding
from paceline.doctor.watching.evidence import beside, count, found, intervals, ranks
from paceline.doctor.watching.records import Record, Run

__all__ = ["CHECKS"]

_FEW = 32
"""A batch norm over so many samples of each rank does without the others'."""


def _wraps(run: Run) -> dict[int, Record]:
    return {r["ddp"]: r for r in run.accounts[0].of("wrap") if r["ddp"] is not None}


def _graphs(run: Run, ddp: int) -> list[list[Record]]:
    """The same graph of each rank, one after another. None can be seen through reentrant checkpointing."""
    if any(r["ddp"] == ddp for r in run.all("checkpointed")):
        return []
    each = [[r for r in account.of("graph") if r["ddp"] == ddp] for account in run.accounts]
    return [list(those) for those in zip(*each, strict=False)]


def model_differs_across_ranks(run: Run) -> Iterator[Finding]:
    for those in beside(run, "wrap"):
        models = [list(zip(r["names"] or (), map(tuple, r["shapes"] or ()), strict=False)) for r in those]
        if all(model == models[0] for model in models):
            continue
        parts = [dict(model) for model in models]
        name = next((n for n in {**parts[0], **parts[-1]} if parts[0].get(n) != parts[-1].get(n)), "")
        shapes = [str(part.get(name, "missing")) for part in parts]
        yield from found(
            "model-differs-across-ranks",
            those[0].place,
            "the ranks wrap different models",
            f"{name} is {' and '.join(shapes)} on ranks 0 to {run.world - 1}" if name else "",
            stands_in=True,
        )
        return


def _matters(run: Run, ddp: int) -> bool:
    """Whether DDP has missed gradients, or has not come so far as to miss any: a loss may use parameters beside it."""
    missed = any("Expected to have finished reduction" in (r["text"] or "") for r in run.all("error"))
    forwards = [r for r in run.accounts[0].of("forward") if r["ddp"] == ddp and r["grad"] and r.over]
    return missed or run.stopped in ("hang", "failed") or len(forwards) == 1


def _waiting_for_all(run: Run) -> Iterator[tuple[Record, list[list[Record]]]]:
    """DDP models that want a gradient of each parameter, and their graphs."""
    for ddp, wrap in _wraps(run).items():
        if not wrap["find_unused"] and not wrap["static"] and _matters(run, ddp):
            yield wrap, _graphs(run, ddp)


def _apart(graphs: list[list[Record]]) -> list[Record] | None:
    """The first graph that is not the same on all ranks."""
    return next((those for those in graphs if len({tuple(r["unused"] or ()) for r in those}) > 1), None)


def rank_dependent_graph(run: Run) -> Iterator[Finding]:
    for _, graphs in _waiting_for_all(run):
        if (those := _apart(graphs)) is not None:
            yield from found(
                "rank-dependent-graph",
                those[0].place,
                "the ranks run different parts of the model",
                " and ".join(f"rank {r.rank} leaves out {', '.join(r['unused'][:3]) or 'nothing'}" for r in those),
                stands_in=True,
            )


def unused_parameters(run: Run) -> Iterator[Finding]:
    for wrap, graphs in _waiting_for_all(run):
        first = next((those[0] for those in graphs if those[0]["unused"]), None)
        if first is not None and _apart(graphs) is None:
            yield from found(
                "unused-parameters",
                wrap.place,
                f"{', '.join(first['unused'][:4])} take no part in the loss, and DDP waits for their gradients",
                f"{count(len(first['unused']), 'parameter')} of {first['total']} went unused in a forward of this run",
                stands_in=True,
            )


def find_unused_unneeded(run: Run) -> Iterator[Finding]:
    """Of models whose forward takes one way only: a few steps tell nothing of a way that is taken now and then."""
    for ddp, wrap in _wraps(run).items():
        graphs = _graphs(run, ddp)
        if (
            wrap["find_unused"]
            and len(graphs) > 1
            and not any(r["unused"] for those in graphs for r in those)
            and not any(_chooses(path, line) for path, line in wrap["forwards"] or ())
        ):
            yield from found(
                "find-unused-unneeded",
                wrap.place,
                "find_unused_parameters=True walks the graph at each step for nothing",
                f"each of {graphs[0][0]['total']} parameters was used in each of {len(graphs)} forwards, on every rank",
            )


def _chooses(path: str, line: int) -> bool:
    """Whether the class whose ``forward`` begins at a line goes different ways in it, or in a method that it may call.

    What is only asked for ``None`` is a part that is there or not, all the time.
    """
    try:
        classes = [
            n for n in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))) if isinstance(n, ast.ClassDef)
        ]
    except (OSError, SyntaxError, UnicodeDecodeError):
        return True
    around = [node for node in classes if node.lineno <= line <= (node.end_lineno or 0)]
    methods = [method for node in around[-1:] for method in node.body if isinstance(method, ast.FunctionDef)]
    return not methods or any(
        _is_choice(node) for method in methods if method.name != "__init__" for node in ast.walk(method)
    )


def _is_choice(node: ast.AST) -> bool:
    if isinstance(node, ast.If | ast.IfExp):
        asked = node.test.ops if isinstance(node.test, ast.Compare) else []
        return not all(isinstance(op, ast.Is | ast.IsNot) for op in asked) or not asked
    if isinstance(node, ast.Subscript):  # self.experts[i]
        return isinstance(node.value, ast.Attribute) and not isinstance(node.slice, ast.Constant)
    return isinstance(node, ast.While | ast.Match | ast.Try | ast.Break | ast.Continue)


def static_graph_changes(run: Run) -> Iterator[Finding]:
    for ddp, wrap in _wraps(run).items():
        graphs = _graphs(run, ddp)
        used = [tuple(those[0]["unused"]) for those in graphs]
        if wrap["static"] and len(set(used)) > 1:
            number = next(i for i, own in enumerate(used) if own != used[0])
            changed = sorted(set(used[0]) ^ set(used[number]))
            yield from found(
                "static-graph-changes",
                wrap.place,
                "static_graph=True, and the graph changes",
                f"forward {number + 1} uses other parameters than the first one: {', '.join(changed[:4])}",
            )


def reentrant_checkpoint(run: Run) -> Iterator[Finding]:
    records = [r for r in run.accounts[0].of("checkpointed") if r["ddp"] is not None]
    failed = next((r for r in run.all("error") if "ready only once" in r["text"] or "ready twice" in r["text"]), None)
    if records:
        yield from found(
            "reentrant-checkpoint",
            records[0].place,
            "reentrant checkpointing inside of a DDP",
            f"rank {failed.rank} failed: a parameter was marked ready twice in one backward"
            if failed
            else f"{count(len(records), 'block')} in this run; it works only while each runs once in a forward",
            severity="error" if failed else "advice",
        )


def batchnorm_unsynced(run: Run) -> Iterator[Finding]:
    for ddp, wrap in _wraps(run).items():
        forwards = [r for r in run.accounts[0].of("forward") if r["ddp"] == ddp and r["training"] and r["grad"]]
        batch = max((r["batch"] or 0 for r in forwards), default=0)
        if wrap["norms"] and forwards:
            yield from found(
                "batchnorm-unsynced",
                wrap.place,
                "batch norm's statistics come from one rank's samples",
                f"{count(wrap['norms'], 'batch norm')}, over {batch} of {batch * run.world} samples on each rank",
                severity=None if batch < _FEW else "advice",
            )


def rank_local_buffer_overwritten(run: Run) -> Iterator[Finding]:
    wraps = _wraps(run)
    for record in run.all("overwritten"):
        if record.rank == 0 or record["ddp"] not in wraps:
            continue
        names = record["names"]
        yield from found(
            "rank-local-buffer-overwritten",
            wraps[record["ddp"]].place,
            f"DDP overwrites {', '.join(names[:3])} with rank 0's value before each forward",
            f"rank {record.rank} had {record['before'][0]:g} in {names[0]}, and went on with {record['after'][0]:g}",
            stands_in=True,
        )
        return


def buffers_not_synced(run: Run) -> Iterator[Finding]:
    for wrap in _wraps(run).values():
        if wrap["broadcasts"] or not wrap["buffers"] or run.world < 2:
            continue
        ends = [account.first("end") for account in run.accounts]
        if all(end is not None and len({str(e["buffers"]) for e in ends if e is not None}) == 1 for end in ends):
            continue  # made equal in the end
        for those in zip(*(intervals(account) for account in run.accounts), strict=False):
            buffers = [one.step["buffers"] or {} for one in those]
            names = [name for name in buffers[0] if len({own.get(name) for own in buffers}) > 1]
            if names:
                yield from found(
                    "buffers-not-synced",
                    wrap.place,
                    "broadcast_buffers=False, and the ranks' buffers differ",
                    f"before step {those[0].number + 1} {ranks(range(run.world))} hold different values in "
                    f"{', '.join(names[:3])}",
                )
                break


CHECKS = (
    model_differs_across_ranks,
    rank_dependent_graph,
    unused_parameters,
    find_unused_unneeded,
    static_graph_changes,
    reentrant_checkpoint,
    batchnorm_unsynced,
    rank_local_buffer_overwritten,
    buffers_not_synced,
)
