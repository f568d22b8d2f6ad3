"""What a rank tells of itself while the script runs: one message for each thing that happened. No torch here.

A rank's probe writes records, the parent reads and judges them. Both know the kinds from `KINDS` alone.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline.doctor.circumstances import Circumstances

__all__ = [
    "BOUND_BYTES",
    "KEPT_BYTES",
    "KINDS",
    "LASTING",
    "MEETINGS",
    "WEIGHTED",
    "Account",
    "Place",
    "Record",
    "Run",
    "Stopped",
    "legible",
    "pack",
]

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
    "exec": "another program is to take the place of this one: program",
    "spawn": "processes are started by torch.multiprocessing: count",
    "device": "a GPU is named: index (None: the current one), how",
    # data
    "subset": "a Subset is made: of (length of what it is taken from), size, digest, indices (the first ones)",
    "sampler": "a DistributedSampler is made: sampler, seed, shuffle, replicas, size, total",
    "set-epoch": "set_epoch of a sampler: sampler, epoch",
    "loader": "a DataLoader is made: loader, dataset, size, batch, batches, workers, persistent, iterable, sampler, "
    "drawn_by (the kind of its sampler), seeding (path and lines of its worker_init_fn)",
    "seed": "torch is seeded",
    "pass": "a loader is iterated anew: loader, number, epoch (the dataset's), grad",
    "batch": "a loader gives a batch: loader, number (of the pass), indices, rows (a digest of each sample)",
    "pass-end": "the loader has no more: loader, number, batches",
    "draw": "random numbers were drawn: where (forward, fetch), generator, state (a digest before), seed "
    "(of the loader worker), fetch",
    # training
    "wrap": "DDP is made: ddp, names, shapes, buffers, options, norms (batch norms), forwards (path, line "
    "of the user's forward methods)",
    "forward": "DDP is called: ddp, grad, sync, training, communicates, batch, input (digest of the first tensor)",
    "graph": "after a forward with gradients: ddp, unused (names), total",
    "overwritten": "DDP's broadcast changed buffers that are not of a batch norm: ddp, names, before, after",
    "around": "a module inside a DDP is called, not through it: ddp, module",
    "no-sync": "a no_sync context, until it is left: ddp",
    "backward": "autograd runs: roots (names of the loss's last functions and what it was divided by; with `WEIGHTED` "
    "behind it, by the weights of the samples' classes), onto (whether "
    "there were gradients that it adds to), reached (by DDP whose gradients changed)",
    "optimizer": "an optimizer is made: optimizer, name",
    "step": "an optimizer steps: optimizer, and what `probe.optimizers` tells: alike (by parameter, when it "
    "changes: to be equal on all ranks), ...",
    "measured": "a step of a run that is compared with another one: what `probe.comparing` tells",
    "clip": "gradients are clipped: norm",
    "scale": "GradScaler.update: before, after",
    "schedule": "a scheduler is made: scheduler, name, length",
    "scheduled": "a scheduler has stepped: scheduler, rates (of its optimizer, by group)",
    "load-state": "load_state_dict of a module: ddp (of which it is a part, or None), params, lost (keys with "
    "`module.` for a plain model), whole (it did not fail)",
    "checkpointed": "reentrant checkpointing: in_ddp",
    "replicated": "nn.DataParallel is made",
    # communication
    "init": "init_process_group: world_size (None: not given)",
    "destroy": "destroy_process_group",
    "wait": "the result of a collective is waited for",
    "join": "a context for uneven inputs is made",
    "collective": "a collective: op, ranks, shape, grads (of a DDP's parameters), "
    "copied (a flattened or cloned copy of gradients)",
    "gathered": "what all_gather returned was not put back before backward: op",
    # files and output
    "save": "torch.save: path, prefixed (keys with `module.`)",
    "load": "torch.load: path, map_location (whether given)",
    "open": "a file is opened for writing: path, mode, own (by the user's own line, or into the working directory)",
    "guard": "how writing outside of the scratch folder is refused: by (landlock or python)",
    "refused": "what the script wanted to write outside of its scratch folder: path",
    "lock": "a file is locked: path",
    "read": "a file that was written since the run began is opened: path",
    "download": "something is fetched: url",
    "tracker": "an experiment tracker is started: name, where",
    "print": "a line is printed: text (the beginning)",
    # of another record
    "done": "what record `of` told of has come to its end: facts of it",
    "failed": "what record `of` told of has raised",
}


WEIGHTED = " of weighted classes"
"""Behind the name of a loss in ``roots``."""

LASTING = frozenset(
    {"init", "wrap", "forward", "no-sync", "backward", "step", "collective", "wait", "destroy", "sleep"}
)
"""Kinds whose end is told, too: ``done`` or ``failed``."""

MEETINGS = frozenset({"init", "wrap", "forward", "backward", "collective", "wait", "destroy"})
"""Kinds in the middle of which a rank may wait for the others."""

KEPT_BYTES = 32 * 1024 * 1024
"""Messages of so many bytes fill an account: 2,000 batches of 512 samples (20 steps of 100 micro-batches), or 100,000
collectives. Whoever tells more goes round in a loop, whose end looks like its beginning. As records they take about
four times the space."""

_LAST = frozenset({"end", "error", "fault", "destroy"})
"""How a rank ends is kept, however full its account is."""


@dataclass(frozen=True)
class Place:
    """A line of the user's code.

    Args:
        record: of a rank that was there; ``None``: it was found in the source.
    """

    path: str
    line: int
    function: str = ""
    record: Record | None = field(default=None, compare=False, repr=False)


@dataclass(kw_only=True)
class Record:
    """One thing that happened.

    Args:
        rank: who tells; ``child``: of a process that the rank has forked, with a ``number`` of its own counting.
        at_s: by `time.monotonic`, which all processes of a machine share.
        places: the user's lines that led to it, innermost first.
        syncs: how many times this rank had met the others before.
        aside: it happened in another thread than the main one.
        ended_s: when it was over; ``None``: it never was, or it is of a moment.
    """

    kind: str
    rank: int
    number: int
    at_s: float
    places: tuple[Place, ...] = ()
    syncs: int = 0
    child: int | None = None
    aside: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    ended_s: float | None = None
    failed: bool = False

    def __post_init__(self) -> None:
        self.places = tuple(replace(place, record=self) for place in self.places)

    def __getitem__(self, name: str) -> Any:
        return self.facts.get(name)

    @property
    def place(self) -> Place | None:
        return self.places[0] if self.places else None

    @property
    def over(self) -> bool:
        return self.ended_s is not None


_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?", re.DOTALL)
"""What terminals obey: colours, moves, titles."""
_UNPRINTED = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def legible(text: str) -> str:
    """What a script has said, as it may be shown on anybody's terminal: without what clears a screen, and of a line
    that was written over, such as a progress bar, the last.

    >>> legible("\\x1b[31mloss\\x1b[0m 3\\r\\n 10%\\r 20%\\r\\a")
    'loss 3\\n 20%'
    """
    lines = _UNPRINTED.sub("", _CODES.sub("", text)).split("\n")
    return "\n".join(next((part for part in reversed(line.split("\r")) if part.strip()), "") for line in lines)


def pack(message: Mapping[str, Any]) -> bytes:
    """A message as it travels. One that is too long is told without its facts."""
    packed = json.dumps(message, separators=(",", ":"), default=str).encode()
    if len(packed) > BOUND_BYTES:
        packed = json.dumps({**message, "facts": {"cut": True}}, separators=(",", ":"), default=str).encode()
    return packed


@dataclass(kw_only=True)
class Account:
    """What one rank has told, and how it ended.

    However much it tells, taking a message costs the same, and memory is bounded: once it is full, only what is not
    over yet and how the rank ends is kept, besides the beginning of the run, which has no holes.

    Args:
        records: those that are kept, in order.
        told: by kind how many there were.
        moves: how many messages came of what the main thread does, or a process that the rank has forked.
        dropped: how many records are not kept.
        code: its exit code, negative for a signal; ``None``: it was ended by the doctor.
        ended_s: when it ended by itself.
        tail: the last lines that it printed.
        stands: where it stood when nothing moved any more, as far as its stacks tell.
    """

    rank: int
    records: list[Record] = field(default_factory=list)
    told: Counter[str] = field(default_factory=Counter)
    moves: int = 0
    dropped: int = 0
    code: int | None = None
    ended_s: float | None = None
    tail: str = ""
    stands: str | None = None
    _open: dict[tuple[int | None, int], Record] = field(default_factory=dict, repr=False)
    _bytes: int = field(default=0, repr=False)

    def take(self, message: bytes) -> None:
        """Adds what a message tells."""
        told = json.loads(message)
        self.moves += not told.get("aside")
        if "of" in told:
            record = self._open.pop((told["child"], told["of"]), None)
            if record is not None:
                record.ended_s, record.failed = told["at_s"], told["kind"] == "failed"
                record.facts |= told["facts"]
            return
        told["places"] = tuple(Place(*place) for place in told["places"])
        record = Record(rank=self.rank, **told)
        self.told[record.kind] += 1
        self._bytes += len(message)
        if self._bytes > KEPT_BYTES and record.kind not in _LAST:
            self.dropped += 1
        else:
            self.records.append(record)
        if record.kind in LASTING:
            self._open[record.child, record.number] = record

    def of(self, *kinds: str) -> Iterator[Record]:
        """Its records of some kinds, in order. Those of forked processes are told only of kind ``draw``."""
        return (r for r in self.records if r.kind in kinds and (r.child is None or r.kind == "draw"))

    def first(self, *kinds: str) -> Record | None:
        return next(self.of(*kinds), None)

    def waiting(self) -> Record | None:
        """The innermost thing that its main thread has begun and that is not over."""
        unfinished = (r for r in reversed(self._open.values()) if r.kind != "no-sync")
        return next((r for r in unfinished if r.child is None and not r.aside), None)


Stopped = Literal["ended", "failed", "steps", "spawned", "hang", "time"]


@dataclass(kw_only=True)
class Run:
    """What all ranks have told.

    Args:
        stopped: what ended it: all ranks came to their end; one failed; they had taken enough steps; they started ranks
            of their own; nothing moved any more; or time was up.
        circumstances: what reading has understood of the script's lines; nothing, if it was not read.
    """

    accounts: list[Account]
    stopped: Stopped = "ended"
    circumstances: Circumstances = field(default_factory=Circumstances)

    @property
    def world(self) -> int:
        return len(self.accounts)

    def all(self, *kinds: str) -> Iterator[Record]:
        """Records of some kinds of all ranks, rank by rank."""
        for account in self.accounts:
            yield from account.of(*kinds)
