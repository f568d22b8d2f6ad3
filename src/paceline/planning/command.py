"""`paceline plan`: what a run will need, which micro-batches fit, and what else would make room."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.errors import EXIT_DONE, EXIT_FAILED, ConfigError, PacelineError
from paceline.parsing import Settings
from paceline.planning.budget import Budget
from paceline.planning.candidates import Candidate
from paceline.planning.grid import Cell
from paceline.planning.looks import Looked, look
from paceline.planning.measure import measure
from paceline.planning.outlook import Outlook
from paceline.planning.sheet import dominant, lines, told_moment
from paceline.planning.state import footprint, process_bytes
from paceline.planning.table import show_grid, show_lines, told_levels
from paceline.planning.told import told
from paceline.planning.unprepared import with_vocabulary
from paceline.progress import waiting
from paceline.sizes import show_size

__all__ = ["plan", "what_fits"]

_FURTHEST = 16
"""Times the micro-batch of now: larger ones are not looked at, unless the batch has room for them."""


def plan(settings: Settings, *, workers: int, budget: Budget, measured: bool = False) -> int:
    """Prints the plan of a run and returns the exit code: done if it fits as it is configured, else failed.

    Args:
        settings: of the run, with ``recipe.device`` resolved.
        workers: how many it will have.
        budget: bytes for each of them.
        measured: also run a micro-batch for real.

    Raises:
        PacelineError: what the task raises; or nothing at all fits the budget.
    """
    with told(settings.task.class_path.rpartition(".")[2]):
        settings = with_vocabulary(settings)
    outlook, looked = _look(settings, workers, budget, process_bytes(settings.recipe))
    now = outlook.cell(outlook.now, outlook.own_mode)
    if now is None:
        raise ConfigError(
            f"cannot plan recompute {outlook.own_mode}",
            found=f"blocks of {looked.model} that cannot do that",
            needed="blocks that change nothing in place, are differentiated once, and are not compiled",
            fix="Use recompute: all, or none",
        )
    there, costs = outlook.there(outlook.now), outlook.costs(outlook.now)
    sheet = lines(there, costs, now, _notes(settings, workers, looked))

    print(_headline(settings, workers, budget, looked), end="\n\n")
    show_lines(sheet, now.peak, told_moment(costs, now))
    print()
    show_grid(outlook.grid(), budget.size)
    print()
    for sentence in _sentences(outlook, now, looked):
        print(sentence)
    if measured:
        measure(settings, now.levels, now.activations)
    _refuse_the_impossible(outlook, budget)
    return EXIT_DONE if now.peak <= budget.size else EXIT_FAILED


def what_fits(settings: Settings, *, workers: int, budget: Budget, process: int) -> str:
    """The largest micro-batches that fit, with and without recompute, in sentences. Arguments as for `plan`.

    Args:
        process: bytes of a worker before it has a model.
    """
    outlook, _ = _look(settings, workers, budget, process)
    return " ".join(_largest(outlook))


def _look(settings: Settings, workers: int, budget: Budget, process: int) -> tuple[Outlook, Looked]:
    recipe, recompute = settings.recipe, settings.execution.recompute
    own_mode = recompute if isinstance(recompute, str) else "as written"
    most = max(_FURTHEST * recipe.micro_batch, recipe.batch // workers)

    def outlook_of(looked: Looked) -> Outlook:
        return _outlook(settings, own_mode, workers, budget, process, looked)

    with waiting("paceline plan") as tell:
        looked = look(
            settings,
            own_mode=own_mode,
            most=most,
            further=lambda looked: outlook_of(looked).worth_a_look(),
            tell=tell,
        )
    return outlook_of(looked), looked


def _outlook(settings: Settings, own_mode: str, workers: int, budget: Budget, process: int, looked: Looked) -> Outlook:
    recipe, execution = settings.recipe, settings.execution
    return Outlook(
        now=Candidate(micro_batch=recipe.micro_batch, batch=recipe.batch, lanes=recipe.lanes),
        modes={**looked.modes, "auto": "auto"} if looked.blocks else looked.modes,
        own_mode=own_mode,
        workers=workers,
        budget=budget.size,
        looked_at=looked.costs,
        there=lambda choice: footprint(
            looked.state,
            recipe,
            execution,
            lanes=choice.lanes,
            workers=workers,
            process=process,
            batch=looked.sample_bytes * choice.micro_batch,
        ),
    )


def _headline(settings: Settings, workers: int, budget: Budget, looked: Looked) -> str:
    recipe, state = settings.recipe, looked.state
    counted = f"{state.count:,} parameters"
    if state.trained != state.count:
        counted += f" ({state.trained:,} trained)"
    who = f"{workers} worker{'s' if workers > 1 else ''} on {recipe.device}"
    where = settings.config_path or "the demo"
    text = f"{where}: {looked.model}, {counted}, {looked.blocks} blocks; {who}\n"
    return f"{text}budget: {show_size(budget.size)} a worker, {budget.source}"


def _notes(settings: Settings, workers: int, looked: Looked) -> dict[str, str]:
    recipe = settings.recipe
    lanes = -(-recipe.lanes // workers)
    cuda = recipe.device == "cuda"
    return {
        "process": "driver, kernels and libraries: an estimate" if cuda else "Python with torch, measured here",
        "parameters": f"{looked.state.count:,}",
        "buffers": "of the model, and a copy for the step",
        "gradients": "one set",
        "lane sums": f"further sets of gradients: a worker drives {lanes} of {recipe.lanes} lanes",
        "optimizer state": recipe.optimizer.class_path.rpartition(".")[2],
        "optimizer's step": "while it runs",
        "exchange": f"what {workers - 1} other worker{'s send' if workers > 2 else ' sends'}",
        "checkpoint's copy": "on worker 0, until it is written",
        "gaps": "of freed memory that what comes next does not fit: an estimate",
        "batches": f"{settings.execution.loader_workers} loader workers" if settings.execution.loader_workers else "",
    }


def _sentences(outlook: Outlook, now: Cell, looked: Looked) -> Iterator[str]:
    yield _verdict(outlook, now)
    yield from _largest(outlook)
    yield (
        "Another micro_batch, number of lanes or batch is another recipe: other bits. Recompute never changes a bit."
    )
    yield from _lanes(outlook)
    yield _sharding(outlook, now)
    yield from looked.remarks


def _verdict(outlook: Outlook, now: Cell) -> str:
    as_it_is = f"micro_batch {outlook.now.micro_batch}, recompute {outlook.own_mode}"
    if outlook.own_mode not in ("none", "all", "selective"):
        as_it_is += f" ({told_levels(now.levels)})"
    left = outlook.budget - now.peak
    if left >= 0:
        return f"As configured ({as_it_is}) it fits; {show_size(left)} to spare."
    sentence = f"As configured ({as_it_is}) it does not fit: {show_size(-left)} too much."
    best = outlook.cell(outlook.now, "auto") if "auto" in outlook.modes else None
    if best is not None and best.peak <= outlook.budget:
        slower = f"{told_levels(best.levels)}, a step takes {best.slower:.2f} times as long"
        return f"{sentence} With execution.recompute: auto it does: {slower}."
    return f"{sentence} No recompute is enough at this micro_batch."


def _largest(outlook: Outlook) -> Iterator[str]:
    found = outlook.largest("none")
    yield f"Largest micro_batch without recompute: {_told(outlook, found, 'none')}."
    if "auto" in outlook.modes:
        yield f"Largest micro_batch with recompute: {_told(outlook, outlook.largest('auto'), 'auto')}."


def _told(outlook: Outlook, choice: Candidate | None, mode: str) -> str:
    if choice is None:
        return "none fits"
    is_last = choice == outlook.choices[-1]
    or_more = " or more (looked no further: plan a larger recipe.micro_batch)" if is_last else ""
    changes = [f"recipe.lanes {choice.lanes}"] if choice.lanes != outlook.now.lanes else []
    changes += [f"recipe.batch {choice.batch}"] if choice.batch != outlook.now.batch else []
    text = f"{choice.micro_batch}{or_more}" + (f" (with {' and '.join(changes)})" if changes else "")
    cell = outlook.cell(choice, mode)
    assert cell is not None
    if set(cell.levels.values()) <= {"keep"}:
        return text if mode == "none" else f"{text}; nothing recomputed"
    return f"{text}; {told_levels(cell.levels)}, {cell.slower:.2f} times the time for a sample"


def _lanes(outlook: Outlook) -> Iterator[str]:
    fewest = outlook.with_fewest_lanes(outlook.now)
    lane_sums = outlook.there(outlook.now).lane_sums
    if fewest is not None and lane_sums > outlook.budget // 20:
        yield (
            f"With recipe.lanes {fewest.lanes}, one per worker, each needs {show_size(lane_sums)} less; but that is "
            "the most workers that there can be."
        )


def _sharding(outlook: Outlook, now: Cell) -> str:
    if outlook.workers == 1:
        return "One worker holds all there is; sharding over several is not supported yet."
    optimizer, everything = (
        show_size(now.peak - less) for less in outlook.sharded(outlook.now, now.activations + now.gaps)
    )
    saved = f"the optimizer's state {optimizer} a worker, that of parameters and gradients too {everything}"
    return f"Sharding over {outlook.workers} workers would save: {saved}. Not supported yet."


def _refuse_the_impossible(outlook: Outlook, budget: Budget) -> None:
    choice, cell = outlook.least()
    if cell.peak <= outlook.budget:
        return
    sheet = lines(outlook.there(choice), outlook.costs(choice), cell, {})
    most = dominant(sheet)
    optimizer, everything = outlook.sharded(choice, cell.activations)
    fix = _FIXES.get(most.what, "Use a smaller model or shorter samples")
    if outlook.workers > 1 and everything <= outlook.budget:
        what = "the optimizer's state" if optimizer <= outlook.budget else "parameters, gradients and optimizer"
        fix = f"It needs sharding of {what} over the workers: not supported yet. {fix}"
    raise PacelineError(
        "cannot fit this run",
        found=f"{show_size(budget.size)} a worker ({budget.source})",
        needed=f"at least {show_size(cell.peak)}, with micro_batch {choice.micro_batch} and {told_levels(cell.levels)}"
        f"; the most of it: {show_size(most.size)} of {most.what}",
        fix=fix,
    )


_FIXES = {
    "process": "Give each worker more, or use fewer workers",
    "lane sums": "Use a worker for each lane, or fewer lanes (that is another recipe: other bits)",
    "optimizer state": "Use an optimizer that keeps less, such as SGD, or a smaller model",
    "checkpoint's copy": "Set execution.async_checkpoint: false, or use a smaller model",
    "logits and loss": "Set recipe.loss_chunks (another recipe: other bits), or use shorter samples",
}
