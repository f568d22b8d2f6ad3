"""What a rank tells of itself while the script runs: one message for each thing that happened. No torch here.

A rank's probe writes records, the parent reads and judges them. Both know the kinds from `KINDS` alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["BOUND_BYTES", "KINDS", "Account", "Place", "Record", "Run", "Stopped", "pack"]

BOUND_BYTES = 100_000
"""The largest message; a larger one loses its facts."""

KINDS: dict[str, str] = {
    # the process
    "begin": "the rank is there: pid, thread (identifier of its main thread)",
    "end": "the script has come to its end: code, initialized (whether the process group is still there), buffers",
    "error": "an exception has left the script: type, text",
    "fault": "a hook has failed, and tells nothing: text",
    "sleep": "time.sleep of seconds",
    "env": "a launcher's variable was set: key, before, after",
    "asks": "what the machine has was asked for: what, value",
    "threads": "torch.set_num_threads: count",
    "spawn": "processes are started by torch.multiprocessing: count",
    "device": "a GPU is named: index (None: the current one), how",
    # data
    "subset": "a Subset is made: size, digest, indices (the first ones)",
    "sampler": "a DistributedSampler is made: sampler, seed, shuffle, replicas, own_rank, size, total, drop_last",
    "set-epoch": "set_epoch of a sampler: sampler, epoch",
    "loader": "a DataLoader is made: loader, dataset, size, batch, batches, workers, persistent, iterable, sampler, "
    "drawn_by (the kind of its sampler)",
    "pass": "a loader is iterated anew: loader, number, epoch (the dataset's), sampled (the sampler's), grad",
    "batch": "a loader gives a batch: loader, number (of the pass), indices, rows (a digest of each sample)",
    "pass-end": "the loader has no more: loader, number, batches",
    "draw": "random numbers were drawn: where (forward, fetch), generator, state (a digest before), worker, seeded",
    # training
    "wrap": "DDP is made: ddp, names, shapes, buffers, options, norms (batch norms), own_buffers",
    "forward": "DDP is called: ddp, grad, sync, training, communicates, batch",
    "graph": "after a forward with gradients: ddp, unused (names), total",
    "overwritten": "DDP's broadcast changed buffers that are not of a batch norm: ddp, names, before, after",
    "around": "a module inside a DDP is called, not through it: ddp, module",
    "no-sync": "a no_sync context, until it is left: ddp",
    "backward": "autograd runs: roots (names of the loss's last functions and what it was divided by)",
    "optimizer": "an optimizer is made: optimizer, name",
    "step": "an optimizer steps: optimizer, and what `probe.optimizers` tells",
    "clip": "gradients are clipped: norm",
    "scale": "GradScaler.update: before, after",
    "schedule": "a scheduler is made: scheduler, name, length",
    "scheduled": "a scheduler steps: scheduler",
    "load-state": "load_state_dict of a module: ddp (of which it is a part, or None), params",
    "checkpointed": "reentrant checkpointing: in_ddp",
    "replicated": "nn.DataParallel is made",
    # communication
    "init": "init_process_group: backend, world_size, own_rank (None: not given)",
    "destroy": "destroy_process_group",
    "wait": "the result of a collective is waited for",
    "join": "a context for uneven inputs is made",
    "collective": "a collective: op, ranks, shape, dtype, grads (of a DDP's parameters), carries (a gradient)",
    "gathered": "what all_gather returned was not put back before backward: op",
    # files and output
    "save": "torch.save: path, prefixed (keys with `module.`)",
    "load": "torch.load: path, map_location (whether given)",
    "open": "a file is opened for writing: path, mode, own (by the user's own line, or into the working directory)",
    "read": "a file that was written since the run began is opened: path",
    "download": "something is fetched: url",
    "tracker": "an experiment tracker is started: name, where",
    "print": "a line is printed: text (the beginning)",
    # of another record
    "done": "what record `of` told of has come to its end: facts of it",
    "failed": "what record `of` told of has raised",
}


@dataclass(frozen=True)
class Place:
    """A line of the user's code."""

    path: str
    line: int
    function: str = ""


@dataclass(kw_only=True)
class Record:
    """One thing that happened.

    Args:
        rank: who tells; ``child``: of a process that the rank has forked, with a ``number`` of its own counting.
        at_s: by `time.monotonic`, which all processes of a machine share.
        places: the user's lines that led to it, innermost first.
        syncs: how many times this rank had met the others before.
        ended_s: when it was over; ``None``: it never was, or it is of a moment.
    """

    kind: str
    rank: int
    number: int
    at_s: float
    places: tuple[Place, ...] = ()
    syncs: int = 0
    child: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    ended_s: float | None = None
    failed: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.facts.get(name)

    @property
    def place(self) -> Place | None:
        return self.places[0] if self.places else None

    @property
    def over(self) -> bool:
        return self.ended_s is not None


def pack(message: Mapping[str, Any]) -> bytes:
    """A message as it travels. One that is too long is told without its facts."""
    packed = json.dumps(message, separators=(",", ":"), default=str).encode()
    if len(packed) > BOUND_BYTES:
        packed = json.dumps({**message, "facts": {"cut": True}}, separators=(",", ":"), default=str).encode()
    return packed


@dataclass(kw_only=True)
class Account:
    """All that one rank has told, and how it ended.

    Args:
        code: its exit code, negative for a signal; ``None``: it was ended by the doctor.
        ended_s: when it ended by itself.
        tail: the last lines that it printed.
        stands: where it stood when nothing moved any more, as far as its stacks tell.
    """

    rank: int
    records: list[Record] = field(default_factory=list)
    code: int | None = None
    ended_s: float | None = None
    tail: str = ""
    stands: str | None = None
    _open: dict[tuple[int | None, int], Record] = field(default_factory=dict, repr=False)

    def take(self, message: bytes) -> Record | None:
        """Adds what a message tells; the new record, if it is one."""
        told = json.loads(message)
        key = (told["child"], told["of"]) if "of" in told else None
        if key is not None:
            record = self._open.pop(key, None)
            if record is not None:
                record.ended_s, record.failed = told["at_s"], told["kind"] == "failed"
                record.facts |= told["facts"]
            return None
        told["places"] = tuple(Place(*place) for place in told["places"])
        record = Record(rank=self.rank, **told)
        self.records.append(record)
        self._open[record.child, record.number] = record
        return record

    def of(self, *kinds: str) -> Iterator[Record]:
        """Its records of some kinds, in order. Those of forked processes are told only of kind ``draw``."""
        return (r for r in self.records if r.kind in kinds and (r.child is None or r.kind == "draw"))

    def first(self, *kinds: str) -> Record | None:
        return next(self.of(*kinds), None)

    def waiting(self) -> Record | None:
        """The innermost thing that has begun and is not over."""
        unfinished = [r for r in self.records if r.kind in _LASTING and not r.over and r.child is None]
        return unfinished[-1] if unfinished else None


_LASTING = frozenset({"init", "wrap", "forward", "backward", "collective", "wait", "destroy", "sleep", "step"})
"""Kinds that a rank may be found in the middle of."""


Stopped = Literal["ended", "failed", "steps", "spawned", "hang", "time"]


@dataclass(kw_only=True)
class Run:
    """What all ranks have told.

    Args:
        stopped: what ended it: all ranks came to their end; one failed; they had taken enough steps; they started ranks
            of their own; nothing moved any more; or time was up.
    """

    accounts: list[Account]
    stopped: Stopped = "ended"

    @property
    def world(self) -> int:
        return len(self.accounts)

    def all(self, *kinds: str) -> Iterator[Record]:
        """Records of some kinds of all ranks, rank by rank."""
        for account in self.accounts:
            yield from account.of(*kinds)
