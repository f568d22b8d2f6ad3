"""A script that names GPUs, in a run without: what it asks of them is done on the CPU.

Only calls that could not succeed are changed: devices named ``cuda`` become ``cpu``, nccl becomes gloo, autocast and
GradScaler work on the CPU, functions of ``torch.cuda`` and ``torch.accelerator`` answer for GPUs that are not there.
Whether there are any is answered with no, as before, unless the script does nothing without a yes (``pretending``).
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from paceline.doctor.watching.probe.hooking import Call, Hooked
from paceline.doctor.watching.probe.recorder import Recorder

__all__ = ["TABLE", "put_on_cpu"]

_TOLD = 20


def put_on_cpu(recorder: Recorder, *, local_rank: int, ranks: int, pretending: bool) -> None:
    """From now on, in this thread and those forked from it."""
    devices = _Devices(recorder, local_rank)

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is torch.Tensor.cuda:
                devices.tell(args[1] if len(args) > 1 else kwargs.get("device"))
                return args[0]
            if func is torch.Tensor.pin_memory:
                return args[0]
            if pretending and getattr(func, "__self__", None) is torch.Tensor.is_cuda and recorder.called_by_user():
                return True
            to = func is torch.Tensor.to
            moved = tuple(_moved(arg, devices.tell, named=to, numbered=to and i == 1) for i, arg in enumerate(args))
            if "device" in kwargs:
                kwargs = kwargs | {"device": _moved(kwargs["device"], devices.tell, named=True, numbered=True)}
            return func(*moved, **kwargs)

    OnCpu().__enter__()  # type: ignore[no-untyped-call]
    for module, answers in _answers(devices, ranks).items():
        for name, answer in answers.items():
            if hasattr(module, name) and (pretending or name not in _WHETHER_THERE):
                to_all = module is torch.cuda
                setattr(module, name, answer if to_all else _to_users(recorder, getattr(module, name), answer))
    # Both are refused in C, before they come to the mode: a stream of ours, and a number for a device.
    cast(Any, torch.Tensor).record_stream = _constant(None)
    cast(Any, torch.nn.Module).to = _to_cpu(torch.nn.Module.to, devices)
    norm, ddp = cast(Any, torch.nn.SyncBatchNorm), cast(Any, torch.nn.parallel.DistributedDataParallel)
    # Both refuse the CPU, and shall where the script uses it by itself. The same without the others' samples:
    norm.forward = devices.if_used(torch.nn.BatchNorm1d.forward, else_call=norm.forward)
    ddp._passing_sync_batchnorm_handle = devices.if_used(_constant(None), else_call=ddp._passing_sync_batchnorm_handle)


class _Devices:
    """Which GPU is the current one, and which ones are named."""

    def __init__(self, recorder: Recorder, local_rank: int) -> None:
        self._recorder, self._told = recorder, 0
        self._current, self._chosen = local_rank, False

    def tell(self, device: Any, how: str = "to") -> None:
        index = device if isinstance(device, int) else torch.device(device or "cuda").index
        if index is None and self._chosen:
            index = self._current
        self._told += 1
        if self._told <= _TOLD:
            self._recorder.tell("device", index=index, how=how)

    def if_used(self, function: Callable[..., Any], *, else_call: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as soon as any GPU was named."""
        return lambda *args, **kwargs: (function if self._told else else_call)(*args, **kwargs)

    def choose(self, device: Any) -> None:
        """As ``set_device`` does."""
        self._current, self._chosen = _index(device), True
        self.tell(self._current, "set_device")

    def current(self) -> int:
        return self._current

    @contextlib.contextmanager
    def chosen(self, device: Any) -> Iterator[None]:
        """As a context of a device does."""
        before = self._current, self._chosen
        self._current, self._chosen = _index(device), True
        try:
            yield
        finally:
            self._current, self._chosen = before


def _index(device: Any) -> int:
    return device if isinstance(device, int) else torch.device(device).index or 0


def _moved(value: Any, tell: Callable[[Any], None], *, named: bool, numbered: bool) -> Any:
    """``cpu`` in place of a GPU."""
    gpu = (
        (isinstance(value, torch.device) and value.type == "cuda")
        or (named and isinstance(value, str) and value.startswith("cuda"))
        or (numbered and isinstance(value, int) and not isinstance(value, bool))
    )
    if not gpu:
        return value
    tell(value)
    return torch.device("cpu")


def _to_cpu(function: Callable[..., Any], devices: _Devices) -> Callable[..., Any]:
    """``module.to(0)``; what else is a GPU is seen to by the mode, tensor by tensor."""

    @functools.wraps(function)
    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        first = [_moved(arg, devices.tell, named=False, numbered=True) for arg in args[:1] if isinstance(arg, int)]
        return function(module, *first, *args[len(first) :], **kwargs)

    return to


_WHETHER_THERE = frozenset({"is_available", "device_count", "current_accelerator"})


_NO_STATE = torch.zeros(16, dtype=torch.uint8)
"""Of the generator of a GPU, by which nothing is drawn: as long as a real one."""


def _answers(devices: _Devices, ranks: int) -> dict[Any, dict[str, Callable[..., Any]]]:
    """What stands in for functions of ``torch.cuda`` and ``torch.accelerator``."""
    properties = SimpleNamespace(name="CPU", total_memory=16 << 30, major=8, minor=0, multi_processor_count=1)
    both = {
        "is_available": _constant(True),
        "device_count": _constant(ranks),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), _constant(0)),
        "max_memory_reserved": _constant(0),
        **dict.fromkeys(("synchronize", "empty_cache"), _constant(None)),
        **dict.fromkeys(("current_stream", "set_stream"), _Stream),
    }
    cuda = both | {
        "set_device": devices.choose,
        "current_device": devices.current,
        "device": devices.chosen,
        "get_device_name": _constant("CPU"),
        "get_device_properties": _constant(properties),
        "get_device_capability": _constant((8, 0)),
        "get_arch_list": _constant(["sm_80"]),
        "init": _constant(None),
        "is_bf16_supported": _constant(True),
        "mem_get_info": _constant((8 << 30, 16 << 30)),
        "memory_summary": _constant(""),
        "utilization": _constant(0),
        "memory_stats": _constant(Counter[str]()),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "ipc_collect"), _constant(None)),
        "set_per_process_memory_fraction": _constant(None),
        "get_rng_state": lambda *_: _NO_STATE.clone(),
        "get_rng_state_all": lambda: [_NO_STATE.clone() for _ in range(ranks)],
        **dict.fromkeys(("set_rng_state", "set_rng_state_all"), _constant(None)),
        **{name: getattr(torch, name) for name in dir(torch.cuda) if name.endswith("Tensor")},
        "Event": _Event,
        **dict.fromkeys(("Stream", "default_stream"), _Stream),
        "stream": contextlib.nullcontext,
    }
    accelerator = both | {
        **dict.fromkeys(("set_device_index", "set_device_idx"), devices.choose),
        **dict.fromkeys(("current_device_index", "current_device_idx"), devices.current),
        "device_index": devices.chosen,
        "current_accelerator": _constant(torch.device("cuda")),
    }
    marks: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(("range_push", "range_pop", "range_start", "range_end", "mark"), _constant(None)),
        "range": contextlib.nullcontext,
    }
    return {torch.cuda: cuda, torch.accelerator: accelerator, torch.cuda.nvtx: marks}


def _to_users(recorder: Recorder, function: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    """Answers the user; torch, which asks for accelerators itself, is told the truth."""
    return lambda *args, **kwargs: (answer if recorder.called_by_user() else function)(*args, **kwargs)


def _constant(value: Any) -> Callable[..., Any]:
    """A function that returns this, whatever it is given."""
    return lambda *_, **__: value


class _Event:
    """In place of torch.cuda.Event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Nothing runs beside the CPU."""

    synchronize = wait = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: _Event) -> float:
        return 0.0


class _Stream(_Event):
    """In place of torch.cuda.Stream, also as a context."""

    wait_stream = wait_event = _Event.record

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to leave."""


def _group_made(call: Call) -> Generator[None, Any, None]:
    if "nccl" in str(call["backend"] or ""):
        call.put(backend="gloo")
    if call["device_id"] is not None:
        call.put(device_id=None)
    yield


def _ddp_made(call: Call) -> Generator[None, Any, None]:
    if call["device_ids"] is not None or call["output_device"] is not None:
        call.put(device_ids=None, output_device=None)
    yield


def _met(call: Call) -> Generator[None, Any, None]:
    if call["device_ids"] is not None:
        call.put(device_ids=None)
    yield


def _loaded(call: Call) -> Generator[None, Any, None]:
    call.put(map_location="cpu")
    yield


def _cast(call: Call) -> Generator[None, Any, None]:
    if call["device_type"] == "cuda":
        call.put(device_type="cpu", dtype=torch.bfloat16 if call["dtype"] in (None, torch.float16) else call["dtype"])
    yield


def _scaler_made(call: Call) -> Generator[None, Any, None]:
    if call["device"] == "cuda":
        call.put(device="cpu")
    yield


_DIST = ("torch.distributed.distributed_c10d", "torch.distributed")
TABLE = (
    *(Hooked(module, "init_process_group", _group_made) for module in _DIST),
    *(Hooked(module, "new_group", _group_made) for module in _DIST),
    *(Hooked(module, "barrier", _met) for module in _DIST),
    Hooked("torch.nn.parallel.distributed", "DistributedDataParallel.__init__", _ddp_made),
    Hooked("torch", "load", _loaded),
    Hooked("torch.amp.autocast_mode", "autocast.__init__", _cast),
    Hooked("torch.amp.grad_scaler", "GradScaler.__init__", _scaler_made),
)
