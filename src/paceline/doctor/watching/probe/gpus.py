"""A script that names GPUs, in a run without: what it asks of them is done on the CPU.

Only calls that could not succeed are changed: devices named ``cuda`` become ``cpu``, nccl becomes gloo, autocast and
GradScaler work on the CPU, functions of ``torch.cuda`` answer for GPUs that are not there. `torch.cuda.is_available`
says no as before, unless the script does nothing without a yes (``pretending``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paceline.doctor.watching.probe.hooking import Call, Hooked
from paceline.doctor.watching.probe.recorder import Recorder

__all__ = ["TABLE", "put_on_cpu"]

_TOLD = 20


def put_on_cpu(recorder: Recorder, *, local_rank: int, ranks: int, pretending: bool) -> None:
    """From now on, in this thread and those forked from it."""
    told: list[object] = []

    def tell(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device or "cuda").index
        if len(told) < _TOLD:
            told.append(index)
            recorder.tell("device", index=index, how="to")

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is torch.Tensor.cuda:
                tell(args[1] if len(args) > 1 else kwargs.get("device"))
                return args[0]
            if func is torch.Tensor.pin_memory:
                return args[0]
            to = func is torch.Tensor.to
            moved = tuple(_moved(arg, tell, named=to, numbered=to and i == 1) for i, arg in enumerate(args))
            if "device" in kwargs:
                kwargs = kwargs | {"device": _moved(kwargs["device"], tell, named=True, numbered=True)}
            return func(*moved, **kwargs)

    OnCpu().__enter__()  # type: ignore[no-untyped-call]
    answers = _answers(recorder, local_rank, ranks)
    if not pretending:
        del answers["is_available"], answers["device_count"]
    for name, answer in answers.items():
        if hasattr(torch.cuda, name):
            setattr(torch.cuda, name, answer)
    norm: Any = torch.nn.SyncBatchNorm
    norm.forward = torch.nn.BatchNorm1d.forward  # the same without the others' samples
    norm._check_input_dim = _constant(None)


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


def _answers(recorder: Recorder, local_rank: int, ranks: int) -> dict[str, Callable[..., Any]]:
    """What stands in for functions of ``torch.cuda``."""
    current = [local_rank]

    def set_device(device: Any) -> None:
        current[0] = device if isinstance(device, int) else torch.device(device).index or 0
        recorder.tell("device", index=current[0], how="set_device")

    properties = SimpleNamespace(name="CPU", total_memory=16 << 30, major=8, minor=0, multi_processor_count=1)
    return {
        "is_available": _constant(True),
        "device_count": _constant(ranks),
        "set_device": set_device,
        "current_device": lambda: current[0],
        "get_device_name": _constant("CPU"),
        "get_device_properties": _constant(properties),
        "get_device_capability": _constant((8, 0)),
        "is_bf16_supported": _constant(True),
        "mem_get_info": _constant((8 << 30, 16 << 30)),
        "memory_summary": _constant(""),
        "Event": _Event,
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), _constant(0)),
        **dict.fromkeys(("max_memory_reserved", "utilization"), _constant(0)),
        **dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats", "ipc_collect"), _constant(None)),
    }


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
