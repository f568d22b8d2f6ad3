"""The doctor's rules: their ids, how bad they are and what mends them. ``pages/<id>.md`` explains each.

How bad: an ``error`` makes a result wrong, hangs or crashes; a ``warning`` makes one worse than it could be, or wrong
for some inputs; ``advice`` may be what the author wants. It is decided here alone: a finding may say that its own case
is less bad, never that it is worse, whichever pass found it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from paceline.errors import UsageError

__all__ = ["RULES", "Family", "Rule", "Severity", "explain", "rule"]

Severity = Literal["error", "warning", "advice"]
Family = Literal["data", "gradients", "buffers", "collectives", "files", "launch"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A kind of mistake.

    Args:
        title: the mistake in one line.
        fix: what mends it, in one line.
    """

    id: str
    family: Family
    severity: Severity
    title: str
    fix: str


_TABLE: dict[Family, dict[str, tuple[Severity, str, str]]] = {
    "data": {
        "missing-set-epoch": (
            "error",
            "every epoch replays the first one's order: `set_epoch` is never called",
            "Call `sampler.set_epoch(epoch)` at the start of each epoch, before the loader is iterated",
        ),
        "shuffle-with-sampler": (
            "error",
            "`shuffle=True` beside a sampler, which DataLoader refuses",
            "Give `shuffle` to the sampler: `DistributedSampler(dataset, shuffle=True)`",
        ),
        "no-distributed-sampler": (
            "error",
            "every rank draws from the whole dataset: nothing shards it",
            "Use `DataLoader(..., sampler=DistributedSampler(dataset))`",
        ),
        "sampler-seed-differs": (
            "error",
            "ranks shuffle with different seeds, so their shards overlap and miss samples",
            "Give every rank's DistributedSampler the same seed",
        ),
        "dataset-order-differs": (
            "error",
            "ranks hold the samples in different orders or numbers, so their shards overlap and miss samples",
            "Sort the file list, and shuffle with a seed that is the same on every rank",
        ),
        "random-split-differs": (
            "error",
            "ranks split the dataset differently, so one's validation samples are another's training samples",
            "Give the split a generator of its own with a seed that is the same on every rank",
        ),
        "iterable-not-sharded": (
            "error",
            "every rank reads the whole stream: an IterableDataset is not sharded by anybody else",
            "Take every world_size-th item from the rank-th on, times the loader's workers, in `__iter__`",
        ),
        "stale-epoch-in-workers": (
            "error",
            "persistent loader workers keep the epoch that they were started with",
            "Hand the epoch over in shared memory or in the index, or set `persistent_workers=False`",
        ),
        "worker-seed-identical": (
            "error",
            "loader workers of all ranks draw the same random numbers",
            "Seed from `torch.initial_seed()`, or from rank, worker and epoch together, in `worker_init_fn`",
        ),
        "rng-identical-across-ranks": (
            "advice",
            "all ranks draw the same noise: dropout masks or augmentations repeat",
            "After the model is built, seed each rank's generator with seed + rank",
        ),
        "uneven-inputs": (
            "error",
            "ranks have different numbers of batches, so one waits for gradients that never come",
            "Give every rank the same number of batches (`drop_last=True`, DistributedSampler), or use `model.join()`",
        ),
        "rank-local-skip": (
            "error",
            "a rank skips a step for a reason that the others do not see",
            "Reduce the reason over all ranks first, and decide on the result",
        ),
        "eval-padded-duplicates": (
            "warning",
            "DistributedSampler repeats samples to even out the shards, and the metric counts them twice",
            "Evaluate on `Subset(dataset, range(rank, len(dataset), world_size))`, and sum counts over ranks",
        ),
        "global-batch-grows": (
            "advice",
            "the batch size is per rank, so the global batch grows with their number",
            "Divide the batch size by the world size, or scale the learning rate on purpose",
        ),
        "schedule-length-mismatch": (
            "warning",
            "the schedule is as long as one process's loader, though each rank takes fewer steps",
            "Count the schedule's steps from the loader that is iterated: `epochs * len(loader)`",
        ),
        "loader-workers-oversubscribed": (
            "warning",
            "every rank starts as many loader workers as there are cores",
            "Divide the cores by the ranks of the machine: `os.cpu_count() // local_world_size`",
        ),
        "threads-oversubscribed": (
            "warning",
            "every rank takes as many threads as there are cores",
            "Divide the cores by the ranks of the machine, or leave it to `OMP_NUM_THREADS`",
        ),
    },
    "gradients": {
        "ddp-forward-bypassed": (
            "error",
            "forward runs around the DDP wrapper, so gradients are not reduced",
            "Call the wrapped model itself: `model(x)`, not `model.module(x)`",
        ),
        "replicas-start-different": (
            "error",
            "ranks start from different weights",
            "Broadcast the weights from rank 0 before the first step, or wrap the model in DDP",
        ),
        "params-changed-after-wrap": (
            "error",
            "parameters changed after DDP took its list of them: the new ones are not reduced",
            "Add, replace and freeze parameters before `DDP(model)`",
        ),
        "redundant-grad-allreduce": (
            "warning",
            "gradients that DDP has already averaged are reduced once more",
            "Leave out the all-reduce, or leave out DDP",
        ),
        "loss-scaled-by-world-size": (
            "error",
            "the loss or the sum of gradients is off by the world size",
            "Leave out the factor, unless the loss is a sum divided by a global count",
        ),
        "no-sync-forward-outside": (
            "warning",
            "`no_sync` is around backward only: the forward outside decides, so gradients are reduced each time",
            "Put forward and backward inside `with model.no_sync()`",
        ),
        "unsynced-optimizer-step": (
            "error",
            "the optimizer steps on gradients that were never reduced",
            "Leave the last micro-batch before each step out of `no_sync`",
        ),
        "accumulation-not-normalised": (
            "error",
            "gradients of several micro-batches are summed, though each loss is a mean",
            "Divide each loss by the number of micro-batches: `(loss / accumulation).backward()`",
        ),
        "unequal-weight-average": (
            "error",
            "each rank's mean counts the same, whatever its number of samples or tokens",
            "Reduce the count, and divide the sum by it: `loss.sum() * world_size / total`",
        ),
        "clip-before-sync": (
            "error",
            "gradients are clipped before they are reduced, each rank by its own norm",
            "Clip once, after the last backward of a step",
        ),
        "gradscaler-diverges": (
            "error",
            "ranks skip steps or scale losses differently: GradScaler sees gradients that are not the same everywhere",
            "Unscale and step on reduced gradients only, with the same scaler calls on every rank",
        ),
        "gather-without-grad": (
            "error",
            "what `all_gather` returns carries no gradient, so the loss lacks the others' part",
            "Put this rank's own tensor back into the list, or use `torch.distributed.nn.functional.all_gather`",
        ),
        "optimizer-stale-params": (
            "error",
            "the optimizer holds parameters that are not the model's any more",
            "Make the optimizer after the last change of the model",
        ),
        "unused-parameters": (
            "error",
            "some parameters take no part in the loss, and DDP waits for their gradients",
            "Freeze or remove them before the wrap, or set `find_unused_parameters=True`",
        ),
        "find-unused-unneeded": (
            "warning",
            "`find_unused_parameters=True` walks the graph at each step although every parameter is used",
            "Leave it out",
        ),
        "reentrant-checkpoint": (
            "error",
            "reentrant checkpointing under DDP",
            "Use `checkpoint(..., use_reentrant=False)`",
        ),
        "static-graph-changes": (
            "error",
            "`static_graph=True`, and the graph changes",
            "Leave out `static_graph=True`, and set `find_unused_parameters=True` if parameters go unused",
        ),
        "model-differs-across-ranks": (
            "error",
            "ranks build different models",
            "Build the model from values that are the same on every rank",
        ),
        "rank-dependent-graph": (
            "error",
            "ranks run different parts of the model",
            "Run the same modules on every rank, or set `find_unused_parameters=True`",
        ),
        "replicas-diverged": (
            "error",
            "replicas hold different weights",
            "Look at the first step named: whatever changed weights there was not the same on every rank",
        ),
        "not-distributed": (
            "error",
            "started as several ranks, and each trains alone",
            "Call `init_process_group` and wrap the model in DDP, or start one process",
        ),
    },
    "buffers": {
        "batchnorm-unsynced": (
            "advice",
            "batch norm's statistics come from one rank's samples",
            "Convert with `SyncBatchNorm.convert_sync_batchnorm` (GPU), or use GroupNorm",
        ),
        "syncbn-on-cpu": (
            "error",
            "SyncBatchNorm works on GPUs only",
            "Convert when CUDA is there, or use GroupNorm",
        ),
        "buffers-not-synced": (
            "warning",
            "buffers are never made equal (`broadcast_buffers=False`), so ranks evaluate different models",
            "Reduce or broadcast buffers before evaluating and saving, or leave `broadcast_buffers` on",
        ),
        "rank-local-buffer-overwritten": (
            "error",
            "DDP overwrites with rank 0's value a buffer that each rank counts for itself",
            "Keep it in a plain attribute, or reduce it yourself",
        ),
    },
    "collectives": {
        "rank-conditional-collective": (
            "error",
            "a collective that only some ranks call: the others never come",
            "Call it on every rank, outside the condition",
        ),
        "rank-conditional-ddp-forward": (
            "error",
            "only some ranks call the DDP model, whose forward is a collective",
            "Call `model.module(x)` where one rank works alone",
        ),
        "rank-local-early-stop": (
            "error",
            "a rank leaves the loop for a reason that the others do not see",
            "Reduce or broadcast the decision first",
        ),
        "collective-order-differs": (
            "error",
            "ranks call collectives in different orders",
            "Call the same collectives in the same order everywhere",
        ),
        "data-dependent-collective": (
            "error",
            "whether a collective is called depends on one rank's data",
            "Reduce the condition first, or call it always",
        ),
    },
    "files": {
        "save-on-all-ranks": (
            "error",
            "every rank writes the same file",
            "Save on rank 0 only, and let the others wait at a barrier",
        ),
        "load-without-map-location": (
            "warning",
            "every rank loads tensors to the device that they were saved from",
            'Load with `map_location="cpu"` or this rank\'s own device',
        ),
        "module-prefix-checkpoint": (
            "warning",
            "keys are saved with DDP's `module.` in front, which a plain model does not load",
            "Save `model.module.state_dict()`",
        ),
        "load-without-barrier": (
            "error",
            "ranks load a file that another one may still be writing",
            "Put `dist.barrier()` between saving and loading",
        ),
        "resume-on-one-rank": (
            "error",
            "only some ranks load the checkpoint, after the weights were broadcast",
            "Load on every rank, or load before the wrap and broadcast the rest",
        ),
        "save-on-local-rank0": (
            "warning",
            "saving depends on the local rank: on several machines each writes",
            "Ask for the global rank: `dist.get_rank() == 0`",
        ),
        "metric-not-reduced": (
            "warning",
            "a metric of one rank's samples is reported as if it were of all",
            "Reduce sums and counts over ranks, then divide",
        ),
        "print-on-all-ranks": (
            "warning",
            "every rank prints",
            "Print on rank 0: `if dist.get_rank() == 0`",
        ),
        "tracker-on-all-ranks": (
            "warning",
            "every rank starts an experiment tracker",
            "Start it on rank 0",
        ),
        "download-on-all-ranks": (
            "error",
            "every rank downloads to the same place",
            "Download on rank 0 (local rank 0 for a local disk), and let the others wait at a barrier",
        ),
    },
    "launch": {
        "cuda-device-not-set": (
            "error",
            "every rank uses the first GPU",
            "Call `torch.cuda.set_device(local_rank)` first, and use that device",
        ),
        "global-rank-as-device": (
            "error",
            "the global rank chooses the GPU, which is wrong on the second machine",
            'Use `int(os.environ["LOCAL_RANK"])`',
        ),
        "nproc-exceeds-devices": (
            "warning",
            "several ranks share a GPU",
            "Start as many ranks as there are GPUs",
        ),
        "rendezvous-overridden": (
            "error",
            "the script overwrites the address at which its launcher waits",
            "Set MASTER_ADDR and MASTER_PORT only where they are missing: `os.environ.setdefault(...)`",
        ),
        "world-size-mismatch": (
            "error",
            "the script's world size is not the number of ranks that were started",
            "Leave out `rank` and `world_size`, or read RANK and WORLD_SIZE",
        ),
        "spawn-under-torchrun": (
            "error",
            "each rank that the launcher started starts ranks of its own",
            "Use one of both: torchrun, or mp.spawn from a plain `python`",
        ),
        "group-not-destroyed": (
            "advice",
            "the process group is never destroyed",
            "Call `dist.destroy_process_group()` at the end",
        ),
        "legacy-data-parallel": (
            "warning",
            "`nn.DataParallel` copies the model at each step, in one process",
            "Use DistributedDataParallel, one process per GPU",
        ),
    },
}

RULES: dict[str, Rule] = {
    name: Rule(id=name, family=family, severity=severity, title=title, fix=fix)
    for family, those in _TABLE.items()
    for name, (severity, title, fix) in those.items()
}
"""By id."""


def rule(name: str) -> Rule:
    """The rule of that id.

    Raises:
        UsageError: there is none.
    """
    if name in RULES:
        return RULES[name]
    near = difflib.get_close_matches(name, RULES, n=1)
    asked = f"Did you mean {near[0]!r}? " if near else ""  # a list of them all would be no help here
    raise UsageError(
        "cannot find a rule",
        found=repr(name),
        needed="one of the doctor's rules",
        fix=f"{asked}`paceline doctor --explain all` lists them",
    )


def explain(name: str) -> str:
    """The page of a rule, as Markdown."""
    known = rule(name)
    page = resources.files("paceline.doctor") / "pages" / f"{known.id}.md"
    return page.read_text(encoding="utf-8")
