"""Micro-batches of the lanes of one worker, from any step on, loaded here or in loader workers.

No loader state exists: what comes next follows from (plan, step, lanes). A loader worker is a subprocess of a worker;
it dies with it, and ignores the signals that are meant for it.
"""

from __future__ import annotations

import atexit
import copy
import ctypes
import gc
import signal
from collections.abc import Callable, Generator, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from paceline.data.order import Plan
from paceline.determinism import aligned, configure_thread, seed_by
from paceline.errors import UsageError

__all__ = ["Loader", "move", "sample_count"]

Index = tuple[int, int]
"""(epoch, sample): what the randomness of a sample is keyed by."""


@dataclass(frozen=True)
class _Keyed(Dataset[Any]):
    """``dataset`` with torch, numpy and `random` seeded for each sample from (seed, epoch, index) before it is made.

    A dataset whose attribute ``keyed`` is False says that it draws no random numbers, and is read without.
    """

    dataset: Any
    seed: int

    def __getitems__(self, keys: Sequence[Index]) -> list[Any]:
        if not getattr(self.dataset, "keyed", True):
            indices = [index for _, index in keys]
            if hasattr(self.dataset, "__getitems__"):
                samples: list[Any] = self.dataset.__getitems__(indices)
                return samples
            return [self.dataset[index] for index in indices]
        samples = []
        for epoch, index in keys:
            seed_by(self.seed, "sample", epoch, index)
            samples.append(self.dataset[index])
        return samples

    def __getitem__(self, key: Index) -> Any:
        return self.__getitems__([key])[0]


def sample_count(dataset: Dataset[Any]) -> int:
    """``len(dataset)``.

    Raises:
        UsageError: its samples have no numbers.
    """
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "cannot deal the samples",
            found="a DataLoader",
            needed="the dataset itself: Paceline shuffles, batches and deals it",
            fix="Pass loader.dataset, and if you have one, collate=collate_fn; loader processes are "
            "Execution(loader_workers=...)",
        )
    if not (hasattr(type(dataset), "__len__") and hasattr(type(dataset), "__getitem__")):
        raise UsageError(
            "cannot deal the samples",
            found="None" if dataset is None else f"an object of {type(dataset).__qualname__}",
            needed="a map-style dataset, with __len__ and __getitem__: samples are dealt by number",
            fix="Give the samples numbers; a stream can be written to a file first",
        )
    return len(dataset)  # type: ignore[arg-type]


class Loader:
    """Loads micro-batches in the order in which this worker needs them.

    Args:
        dataset: map-style: ``len(dataset)``, ``dataset[index]``; optionally ``__getitems__(indices)`` for many at once.
        seed: of augmentation.
        collate: makes a batch of a list of samples.
        device: where batches end up.
        loader_workers: subprocesses; 0 loads in the calling thread.
        threads: torch threads of a loader worker.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        seed: int,
        collate: Callable[[list[Any]], Any] | None,
        device: torch.device,
        loader_workers: int,
        threads: int,
    ) -> None:
        self._dataset, self._seed, self._collate = _Keyed(dataset, seed), seed, collate or default_collate
        self._device, self._loader_workers, self._threads = device, loader_workers, threads
        self.probes = max(2, loader_workers + 1)
        """Enough for one loader worker to read the same samples twice."""

    def train(
        self, plan: Plan, lanes: range, steps: range, *, phases: int = 1, done_phases: int = 0, probe: bool = False
    ) -> Generator[Any, None, None]:
        """The micro-batches of ``lanes``, lane by lane, phase by phase, step by step; of the first step without its
        ``done_phases``.

        Before them, if asked for, ``probes`` times the same probe: a micro-batch of samples from all over the dataset,
        to compare the data by, the same on every worker, in every run, and each time it is read. It comes through the
        loader workers as all else does: a dataset may open files when first read, and they must not be open when the
        workers are forked. Closing the generator ends the loader workers.
        """
        probed = np.linspace(0, plan.samples - 1, min(plan.samples, plan.micro_batch), dtype=np.int64)
        batches = (
            [(plan.epoch_of(step), int(index)) for index in indices]
            for step in steps
            for _ in range(done_phases if step == steps.start else 0, phases)
            for lane in lanes
            for indices in plan.lane(step, lane)
        )
        return self._load(chain([[(0, int(index)) for index in probed]] * (self.probes if probe else 0), batches))

    def evaluate(
        self, samples: int, micro_batch: int, lanes: Sequence[int], all_lanes: int
    ) -> Generator[tuple[int, int, Any], None, None]:
        """(lane, number, micro-batch) of every sample of ``lanes`` once, lane by lane.

        Micro-batch ``n`` belongs to lane ``n % all_lanes``.
        """
        numbers = [n for lane in lanes for n in range(lane, -(-samples // micro_batch), all_lanes)]
        batches = self._load(
            [(0, index) for index in range(n * micro_batch, min(samples, (n + 1) * micro_batch))] for n in numbers
        )
        for number, batch in zip(numbers, batches, strict=True):
            yield number % all_lanes, number, batch

    def _load(self, keys: Iterator[list[Index]]) -> Generator[Any, None, None]:
        if self._loader_workers == 0:
            for some in keys:
                yield move(self._collate(self._dataset.__getitems__(some)), self._device)
            return
        loader = DataLoader(
            self._dataset,
            batch_sampler=_Once(keys),
            num_workers=self._loader_workers,
            collate_fn=self._collate,
            worker_init_fn=_Start(self._threads),
            pin_memory=self._device.type == "cuda",
            # Children of this very process, which die with it; a fork server's would not.
            multiprocessing_context="fork",
        )
        gc.collect()  # groups that a loss has left in cycles have threads, which a forked process cannot join
        batches = iter(loader)
        end: Callable[[], None] = batches._shutdown_workers  # type: ignore[attr-defined]
        # A traceback or an unfinished loop may hold them at exit, when multiprocessing sends SIGTERM to its daemons and
        # waits for ever: ours ignore it. What is registered later runs earlier.
        atexit.register(end)
        try:
            for batch in batches:
                yield move(batch, self._device)
        finally:
            end()  # now, not when the last traceback that holds them is dropped
            atexit.unregister(end)


class _Once:
    """A batch sampler that gives a stream of index lists, once."""

    def __init__(self, keys: Iterator[list[Index]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[list[Index]]:
        return self._keys


@dataclass(frozen=True)
class _Start:
    """What a loader worker does first. It must not outlive its worker, whose sockets it holds open when forked."""

    threads: int

    def __call__(self, number: int) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        # A signal to the process group is for the worker, which ends its loaders itself.
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(ignored, signal.SIG_IGN)
        configure_thread(self.threads)


def move(batch: Any, device: torch.device) -> Any:
    """All tensors in nested mappings, lists and tuples on ``device``, float ones on 64-byte-aligned storage.

    Mappings and tuples keep their class, and so their attributes. Other objects are asked to move themselves, if they
    have a method ``to``.
    """
    if isinstance(batch, Tensor):
        moved = batch.to(device, non_blocking=True)
        return aligned(moved) if moved.is_floating_point() else moved
    if isinstance(batch, MutableMapping):
        like = copy.copy(batch)
        for key, value in batch.items():
            like[key] = move(value, device)
        return like
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(value, device) for value in batch)
    return batch
