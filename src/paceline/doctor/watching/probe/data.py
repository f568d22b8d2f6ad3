"""Hooks on samplers, loaders and what is drawn at random while a batch is made."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Generator
from types import CodeType
from typing import Any

import torch

from paceline.doctor.watching.probe import digests
from paceline.doctor.watching.probe.hooking import Call, Hooked
from paceline.doctor.watching.probe.recorder import Recorder

__all__ = ["TABLE"]

_INDICES = 4096
"""The most indices of a subset that are told."""
_FETCHES = 6
"""So many fetches of a process are looked at for random draws."""


class _Numbers:
    """Numbers objects of a kind in the order in which they were made, which ranks have in common."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()

    def of(self, thing: Any) -> int:
        if thing not in self._known:
            self._known[thing] = next(self._next)
        return self._known[thing]

    def known(self, thing: Any) -> int | None:
        try:
            return self._known.get(thing)
        except TypeError:  # no weak reference to such
            return None


_samplers, _loaders = _Numbers(), _Numbers()
_passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_iterators: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
_taken: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()
"""By iterator the indices whose batches have not been given yet: loader workers are some ahead."""
_fetched = 0


class _Pass:
    """One iterator of a loader."""

    def __init__(self, loader: int, number: int) -> None:
        self.loader, self.number, self.batches = loader, number, 0


def _subset_made(call: Call) -> Generator[None, Any, None]:
    yield
    indices = [int(index) for index in call.owner.indices]
    call.recorder.tell(
        "subset",
        size=len(indices),
        of=_length(call.owner.dataset),
        digest=digests.of_numbers(indices),
        indices=indices[:_INDICES],
    )


def _sampler_made(call: Call) -> Generator[None, Any, None]:
    yield
    if call.error is not None:
        return
    sampler = call.owner
    call.recorder.tell(
        "sampler",
        sampler=_samplers.of(sampler),
        seed=sampler.seed,
        shuffle=sampler.shuffle,
        replicas=sampler.num_replicas,
        size=len(sampler.dataset),
        total=sampler.total_size,
    )


def _epoch_set(call: Call) -> Generator[None, Any, None]:
    call.recorder.tell("set-epoch", sampler=_samplers.known(call.owner), epoch=call["epoch"])
    yield


def _loader_made(call: Call) -> Generator[None, Any, None]:
    yield
    if call.error is not None:
        return
    loader = call.owner
    iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    sampler = None if iterable else loader.sampler
    call.recorder.tell(
        "loader",
        loader=_loaders.of(loader),
        dataset=type(loader.dataset).__name__,
        size=None if iterable else _length(loader.dataset),
        batch=loader.batch_size,
        workers=loader.num_workers,
        persistent=loader.persistent_workers,
        seeding=_written_at(call.recorder, loader.worker_init_fn),
        iterable=iterable,
        sampler=_samplers.known(sampler) if sampler is not None else None,
        drawn_by=type(sampler).__name__,
        batches=None if iterable else _length(loader),
    )


def _pass_begun(call: Call) -> Generator[None, Any, None]:
    loader = call.owner
    iterator = yield
    number = _passes[loader] = _passes.get(loader, -1) + 1
    this = _iterators[iterator] = _Pass(_loaders.of(loader), number)
    epoch = getattr(loader.dataset, "epoch", None)
    call.recorder.tell(
        "pass",
        loader=this.loader,
        number=number,
        epoch=epoch if isinstance(epoch, int) else None,
        grad=torch.is_grad_enabled(),
    )


def _index_taken(call: Call) -> Generator[None, Any, None]:
    index = yield
    if call.error is not None:
        return
    _taken.setdefault(call.owner, deque()).append(index)


def _batch_given(call: Call) -> Generator[None, Any, None]:
    batch = yield
    this, taken = _iterators.get(call.owner), _taken.get(call.owner, deque())
    if this is None:
        return
    if isinstance(call.error, StopIteration):
        taken.clear()
        call.recorder.tell("pass-end", loader=this.loader, number=this.number, batches=this.batches)
    elif call.error is None:
        this.batches += 1
        index = taken.popleft() if taken else None
        call.recorder.tell(
            "batch",
            loader=this.loader,
            number=this.number,
            indices=_plain(index),
            rows=digests.rows(batch),
        )


def _fetching(call: Call) -> Generator[None, Any, None]:
    """Told only when something was drawn, and of the first fetches of a process."""
    global _fetched
    _fetched += 1
    if _fetched > _FETCHES:
        return
    info = torch.utils.data.get_worker_info()
    before = digests.generators()
    yield
    after = digests.generators()
    for name in before:
        if before[name] != after.get(name):
            call.recorder.tell(
                "draw",
                where="fetch",
                generator=name,
                state=before[name],
                seed=info.seed if info is not None else None,
                fetch=_fetched,
            )


def _worker_begun(call: Call) -> Generator[None, Any, None]:
    """In the forked process: its own counting begins."""
    global _fetched
    _fetched = 0
    yield


def _written_at(recorder: Recorder, function: Any) -> tuple[str, int, int] | None:
    """Where the user has written a function, maybe with arguments bound to it: its first and last line."""
    code: CodeType | None = getattr(getattr(function, "func", function), "__code__", None)
    path = recorder.users_path(code.co_filename) if code is not None else None
    if code is None or path is None:
        return None
    return path, code.co_firstlineno, max(line or 0 for *_, line in code.co_lines())


def _seeded(call: Call) -> Generator[None, Any, None]:
    if call.recorder.called_by_user():
        call.recorder.tell("seed")
    yield


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None


def _plain(index: Any) -> list[int] | None:
    if isinstance(index, int):
        return [index]
    if isinstance(index, list | tuple) and all(isinstance(one, int) for one in index):
        return list(index)
    return None


_DATA, _LOADER = "torch.utils.data", "torch.utils.data.dataloader"
TABLE = (
    Hooked("torch", "manual_seed", _seeded),
    Hooked("torch.utils.data.dataset", "Subset.__init__", _subset_made),
    Hooked("torch.utils.data.distributed", "DistributedSampler.__init__", _sampler_made),
    Hooked("torch.utils.data.distributed", "DistributedSampler.set_epoch", _epoch_set),
    Hooked(_DATA, "DataLoader.__init__", _loader_made),
    Hooked(_DATA, "DataLoader.__iter__", _pass_begun),
    Hooked(_LOADER, "_BaseDataLoaderIter._next_index", _index_taken),
    Hooked(_LOADER, "_BaseDataLoaderIter.__next__", _batch_given),
    Hooked("torch.utils.data._utils.fetch", "_MapDatasetFetcher.fetch", _fetching),
    Hooked("torch.utils.data._utils.fetch", "_IterableDatasetFetcher.fetch", _fetching),
    Hooked("torch.utils.data._utils.worker", "_worker_loop", _worker_begun),
)
