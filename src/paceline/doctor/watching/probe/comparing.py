"""Hooks of a run that is compared with another one, of one worker: what is left to chance is taken out of both, the one
worker is given the samples that the ranks have drawn, and each step tells of its losses, gradients and weights.

Here a hook does change what the script computes; in other runs of the doctor none does.

[Note: chance] Ranks and one worker draw other random numbers wherever they draw some for a batch. So dropout is left
out, what a dataset draws for a sample depends on the sample's number alone, and all generators start from the rank's
number, so that one worker begins with the weights of rank 0 even if the script sets no seed. What else is drawn in a
step is told (``drew``), and then nothing follows from a difference.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
import xxhash

from paceline.doctor.watching.probe import digests
from paceline.doctor.watching.probe.hooking import Call, Hooked, install
from paceline.doctor.watching.probe.recorder import Recorder
from paceline.doctor.watching.probe.training import replicas

__all__ = ["compare_steps"]

_VALUES = 1500
"""So many values of all gradients together are told: with those of the weights, and norms, half a message."""
_PARAMETERS = 400
_PRIME = 2_654_435_761
_DIGITS = 9
"""As many as tell two float32 values apart."""
_CONTENTS = 1 << 64
"""The samples of a step are told as the sum of their digests, which does not depend on who had which, and when."""


def compare_steps(recorder: Recorder, rank: int, settings: dict[str, Any]) -> None:
    """From now on, and until so many steps have been taken: then the process ends.

    Args:
        settings: ``steps``; ``still`` (batch norms take their running statistics, not the batch's); ``loaders``, for
            the one worker: by loader, in the order in which they are made, the ``size`` of its dataset, the size of a
            ``batch`` (``None``: its own) and, for each of its ``passes``, the indices of each batch.
    """
    _seed(rank)
    steps = _Steps(recorder, settings["steps"])
    feeding = _Feeding(settings["loaders"])
    install(recorder, _without_chance(still=settings["still"]))
    install(recorder, feeding.table)
    install(recorder, steps.table)
    _key_samples(torch.utils.data._utils.fetch._MapDatasetFetcher)
    _feed(torch.utils.data.DataLoader, feeding)
    steps.watch()


def _seed(number: int) -> None:
    random.seed(number)
    torch.default_generator.manual_seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)


def _without_chance(*, still: bool) -> tuple[Hooked, ...]:
    functional, names = "torch.nn.functional", ("dropout", "dropout1d", "dropout2d", "dropout3d")
    return (
        *(Hooked(functional, name, _as_in_evaluation) for name in (*names, "alpha_dropout", "feature_alpha_dropout")),
        Hooked(functional, "scaled_dot_product_attention", _attending),
        *(Hooked("torch.nn", f"{name}.forward", _recurrent) for name in ("RNN", "LSTM", "GRU")),
        *([Hooked(functional, "batch_norm", _by_running_statistics)] if still else []),
        Hooked("torch", "compile", _compiling),
    )


def _as_in_evaluation(call: Call) -> Generator[None, Any, None]:
    call.put(training=False)
    yield


def _attending(call: Call) -> Generator[None, Any, None]:
    """It is not written in Python, and has no signature: the probability of dropout is its fifth argument."""
    if len(call.args) > 4:
        call.args = (*call.args[:4], 0.0, *call.args[5:])
    elif "dropout_p" in call.kwargs:
        call.kwargs["dropout_p"] = 0.0
    yield


def _recurrent(call: Call) -> Generator[None, Any, None]:
    call.owner.dropout = 0.0
    yield


def _by_running_statistics(call: Call) -> Generator[None, Any, None]:
    if call["running_mean"] is not None:
        call.put(training=False)
    yield


def _compiling(call: Call) -> Generator[None, Any, None]:
    """Compiled code would not come by these hooks."""
    torch.compiler.set_stance("force_eager")
    yield


def _key_samples(fetcher: Any) -> None:
    """What is drawn while a sample is made depends on its number alone, in whichever process it is made."""
    fetch = fetcher.fetch

    def fetched(self: Any, index: Any) -> Any:
        own = _getter(self.dataset)
        if own is None or not self.auto_collation:
            return fetch(self, index)
        before = torch.get_rng_state(), random.getstate(), _numpy_state()
        try:
            return self.collate_fn([_drawn_by(int(i), own, i) for i in index])
        finally:
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            _set_numpy_state(before[2])

    fetcher.fetch = fetched


def _getter(dataset: Any) -> Callable[[Any], Any] | None:
    """How to get one sample; ``None``: it has another way of its own to get many."""
    own = type(dataset).__getitem__ if hasattr(type(dataset), "__getitem__") else None
    return dataset.__getitem__ if own is not None and own is not torch.utils.data.Dataset.__getitem__ else None


def _drawn_by(number: int, own: Callable[[Any], Any], index: Any) -> Any:
    _seed(number)
    return own(index)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None else None


def _set_numpy_state(state: Any) -> None:
    if state is not None:
        sys.modules["numpy"].random.set_state(state)


class _Feeding:
    """What the one worker's loaders are given."""

    def __init__(self, loaders: list[dict[str, Any]]) -> None:
        self._left = iter(loaders)
        self._fed: weakref.WeakKeyDictionary[Any, list[list[list[int]]]] = weakref.WeakKeyDictionary()
        self._samplers: weakref.WeakKeyDictionary[Any, _Fed] = weakref.WeakKeyDictionary()
        self.table = (Hooked("torch.utils.data", "DataLoader.__init__", self._made, scope="fed"),)

    def _made(self, call: Call) -> Generator[None, Any, None]:
        ranks = next(self._left, {})
        if ranks.get("batch") is not None and call["batch_sampler"] is None and call["batch_size"] is not None:
            call.put(batch_size=ranks["batch"])
        yield
        loader = call.owner
        if call.error is None and loader._auto_collation and _length(loader.dataset) == ranks.get("size"):
            self._fed[loader] = ranks["passes"]

    def sampler(self, loader: Any, own: Any) -> Any:
        """What draws a loader's batches: as the ranks did, where that is known."""
        if not self._fed.get(loader):
            return own
        if loader not in self._samplers:
            self._samplers[loader] = _Fed(own, self._fed[loader])
        return self._samplers[loader]


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None


class _Fed:
    """The batches of the ranks, in each pass; in those that are not known the sampler's own."""

    def __init__(self, own: Any, passes: list[list[list[int]]]) -> None:
        self._own, self._passes = own, passes
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[Any]:
        number = next(self._numbers)  # now is when the first batch is asked for: torch makes iterators in vain
        yield from self._passes[number] if number < len(self._passes) else self._own

    def __len__(self) -> int:
        return len(self._own)


def _feed(loader: Any, feeding: _Feeding) -> None:
    own = loader._index_sampler.fget
    loader._index_sampler = property(lambda self: feeding.sampler(self, own(self)))


class _Steps:
    """What happens between two steps of an optimizer, and the steps."""

    def __init__(self, recorder: Recorder, most: int) -> None:
        self._recorder, self._left, self._running = recorder, most, 0
        self._known, self._seen, self._hooked = digests.generators(), set[int](), False
        self._forget()
        ddp, loader = "torch.nn.parallel.distributed", "torch.utils.data.dataloader"
        self.table = (
            Hooked("torch.nn", "Module.__call__", self._model_called, scope="model called"),
            Hooked("torch.nn.functional", "batch_norm", self._normed),
            Hooked("torch.nn", "SyncBatchNorm.forward", self._norm_synced),
            Hooked("torch.autograd", "backward", self._backward, scope="loss"),
            Hooked(ddp, "DistributedDataParallel.register_comm_hook", self._hook_registered),
            Hooked(ddp, "DistributedDataParallel._register_builtin_comm_hook", self._hook_registered),
            Hooked("torch.utils.data", "DataLoader.__iter__", self._loading),
            Hooked(loader, "_BaseDataLoaderIter.__next__", self._loading),
        )

    def _forget(self) -> None:
        self._losses: list[float] = []
        self._rows: list[int] = []
        self._width: list[int] | None = None
        self._begun = self._drew = self._batch_normed = self._synced = self._low = False

    def watch(self) -> None:
        """Begins to."""
        optimizer = sys.modules["torch.optim.optimizer"]
        optimizer.register_optimizer_step_pre_hook(self._stepping)
        optimizer.register_optimizer_step_post_hook(self._stepped)

    def _model_called(self, call: Call) -> Generator[None, Any, None]:
        """Counts the samples that go into a model. What was computed by another one before is none, and a loss has no
        parameters."""
        if torch.is_grad_enabled() and next(call.owner.parameters(), None) is not None:
            if not self._begun:
                self._begun, self._known = True, digests.generators()
            given = digests.tensors_in([*call.args[1:], *call.kwargs.values()])
            columns = [tensor.detach() for tensor in given if tensor.dim() and not tensor.requires_grad]
            columns = [column for column in columns if len(column) == len(columns[0])]
            if columns:
                self._width = list(columns[0].shape[1:])
                self._rows += [_digest([column[i] for column in columns]) for i in range(len(columns[0]))]
            self._low |= torch.is_autocast_enabled("cpu")
        yield

    def _normed(self, call: Call) -> Generator[None, Any, None]:
        self._batch_normed |= bool(call["training"])
        yield

    def _norm_synced(self, _: Call) -> Generator[None, Any, None]:
        self._synced = True
        yield

    def _backward(self, call: Call) -> Generator[None, Any, None]:
        roots = [root for root in digests.tensors_in(call["tensors"]) if root.numel() == 1]
        self._losses.append(sum(float(root.detach().double()) for root in roots))
        yield

    def _hook_registered(self, _: Call) -> Generator[None, Any, None]:
        self._hooked = True
        yield

    def _loading(self, call: Call) -> Generator[None, Any, None]:
        """What is drawn for the samples is no draw of the step's, nor what was drawn before it."""
        self._drew |= self._begun and digests.generators() != self._known
        yield
        self._known = digests.generators()
        self._begun |= call.function.__name__ == "__next__"

    def _stepping(self, optimizer: Any, _: Any, __: Any) -> None:
        self._running += 1
        if self._running == 1:  # a wrapper's step calls that of the optimizer inside
            with self._recorder.unnoticed():
                self._tell(optimizer)
            self._forget()

    def _stepped(self, *_: Any) -> None:
        self._running -= 1
        if self._running == 0:
            self._left -= 1
            if self._left == 0:
                sys.stdout.flush()
                os._exit(0)

    def _tell(self, optimizer: Any) -> None:
        drew = self._drew or digests.generators() != self._known
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        plain = all(type(p.detach()) is torch.Tensor for p in parameters) and len(parameters) > 0
        first = id(optimizer) not in self._seen
        self._seen.add(id(optimizer))
        kept = parameters[:_PARAMETERS]
        each = max(2, _VALUES // max(1, len(kept)))
        names = replicas.names()
        facts: dict[str, Any] = {}
        if first:
            facts["digest"] = _digest([p.detach() for p in parameters]) if plain else None
            facts["names"] = [names.get(id(p), f"parameter {i}") for i, p in enumerate(kept)]
        self._recorder.tell(
            "measured",
            plain=plain,
            sizes=[p.numel() for p in kept],
            norms=[_norm(p.grad) for p in kept] if plain else [],
            gradients=[_sampled(p.grad, each, p) for p in kept] if plain else [],
            weights=[_sampled(p, each, p) for p in kept] if plain else [],
            losses=[_rounded(loss) for loss in self._losses],
            samples=len(self._rows),
            content=sum(self._rows) % _CONTENTS,
            distinct=len(set(self._rows)),
            width=self._width,
            drew=drew,
            normed=self._batch_normed,
            synced=self._synced,
            low=self._low or any(p.dtype in (torch.bfloat16, torch.float16) for p in kept),
            hooked=self._hooked,
            rates=[float(group.get("lr", 0.0)) for group in optimizer.param_groups],
            **facts,
        )


def _digest(tensors: Sequence[Any]) -> int:
    found = xxhash.xxh3_64()
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        found.update(memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b"")
    return int(found.intdigest())


def _norm(gradient: Any) -> float | None:
    if gradient is None:
        return None
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return _rounded(float(values.detach().double().norm()))


def _sampled(tensor: Any, most: int, like: Any) -> list[float]:
    """A few of its values, all over it; of a gradient that is not there those of zeros, which come to the same."""
    size = like.numel()
    if tensor is None or tensor.is_sparse:
        return [0.0] * min(most, size) if tensor is None else []
    flat = tensor.detach().reshape(-1)
    if size > most:  # in even steps they might all be of one column, which is zero for a pixel that always is
        flat = flat[torch.arange(most) * _PRIME % size]
    return [_rounded(value) for value in flat.double().tolist()]


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
