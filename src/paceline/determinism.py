"""Seeds by key, threads, torch's global flags, aligned storage and digests. Nothing else in the package sets these.

Randomness is keyed, never carried: a generator is seeded from where it is used, so no generator's state is ever saved.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from paceline.errors import ConfigError

__all__ = [
    "ALIGNMENT",
    "HostRandomness",
    "aligned",
    "autocast",
    "combined",
    "compile_blocks",
    "compile_with_static_shapes",
    "configure_process",
    "configure_thread",
    "content_digest",
    "digest",
    "flatten_state",
    "forget_inherited_randomness",
    "forked_randomness",
    "resolve_device",
    "resolve_kernels",
    "seed_by",
    "tensor_digest",
]

ALIGNMENT = 64
"""Bytes. A kernel's path, and so its bits, can depend on a pointer's offset; a cache line is the most any asks for."""
_FROM_MKL = (
    *(torch.acos, torch.asin, torch.atan, torch.cos, torch.sin, torch.tan, torch.tanh, torch.trunc, torch.sqrt),
    *(torch.erf, torch.erfc, torch.erfinv, torch.exp, torch.log, torch.log10, torch.log2),
)


def seed_by(*key: int | str) -> int:
    """Seeds torch, numpy and Python's `random` in this process from a key, and returns the seed (63 bits).

    >>> seed_by("step", 3, 0) == seed_by("step", 3, 0) != seed_by("step", 3, 1)
    True
    """
    text = "/".join(str(part) for part in key)
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    # torch.manual_seed also notes a formatted stack for each kind of device not in use, 20 times its cost.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    return seed


class HostRandomness:
    """The states of numpy's and Python's generators at this moment. As a context manager it goes back to them, as often
    as it is entered, and leaves what was there before."""

    def __init__(self) -> None:
        self._states = self._now()

    def __enter__(self) -> None:
        self._before = self._now()
        self._go_to(self._states)

    def __exit__(self, *raised: object) -> None:
        self._go_to(self._before)

    def _now(self) -> tuple[Any, Any]:
        return np.random.get_state(), random.getstate()

    def _go_to(self, states: tuple[Any, Any]) -> None:
        np.random.set_state(states[0])
        random.setstate(states[1])


def configure_process(*, threads: int, device: torch.device) -> None:
    """Sets all that moves bits without being asked: threads, denormals, algorithm choice. Once per worker."""
    resolve_kernels()
    configure_thread(threads)
    torch.set_deterministic_debug_mode("error")  # as use_deterministic_algorithms(True), which imports the compiler
    # Filling every empty tensor with NaN only helps to find bugs, and costs a pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


def configure_thread(threads: int) -> None:
    """What torch keeps per thread: its OpenMP width and the treatment of denormals. In each thread that computes."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def resolve_device(choice: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """The device of this worker.

    Raises:
        ConfigError: cuda was asked for and is not there, or there are fewer GPUs than workers on this machine.
    """
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "cannot use recipe.device=cuda",
            found="no CUDA device",
            needed="a GPU and a CUDA build of torch",
            fix="Use recipe.device: cpu",
        )
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            "cannot give each worker a GPU",
            found=f"local rank {local_rank}, {torch.cuda.device_count()} GPUs",
            needed="one GPU per worker",
            fix=f"Use -n {torch.cuda.device_count()} or fewer",
        )
    return torch.device("cuda", local_rank)


@contextmanager
def autocast(precision: Literal["fp32", "bf16"], device: torch.device) -> Iterator[None]:
    """Autocast to bf16 over fp32 weights, or nothing.

    Without its cache of weights in bf16: gradients of a weight that is used twice are added up in float32 then, whether
    or not one of the uses is recomputed, which casts anew; and no copy of all weights outlives its use.
    """
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        yield


def compile_blocks(model: nn.Module) -> None:
    """Compiles the members of every `nn.ModuleList` of ``model`` one by one, in place; keys and attributes stay.

    Shapes are static: with dynamic shapes the bits would depend on which shapes a worker happened to see first. For the
    same reason running past the recompile limit, where torch would quietly go back to eager code, is an error.

    Raises:
        ConfigError: the model has no repeated blocks.
    """
    blocks = [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]
    if not blocks:
        raise ConfigError(
            "cannot compile the model by blocks",
            found=f"no nn.ModuleList in {type(model).__name__}",
            needed="repeated blocks in an nn.ModuleList",
            fix="Set recipe.compile: false, or hold the blocks in an nn.ModuleList",
        )
    compile_with_static_shapes()
    for block in blocks:
        block.compile(dynamic=False)


def compile_with_static_shapes() -> None:
    """For all that torch compiles from now on: each shape is compiled for itself, whichever came first."""
    import torch._dynamo  # torch imports them lazily, and so do we: they take a second
    import torch._inductor.config

    torch._inductor.config.deterministic = True
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    # A shape per possible micro-batch in train and in eval mode is normal here, not a runaway.
    torch._dynamo.config.recompile_limit = 64


def aligned(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy of it on its own storage when its first byte is not 64-byte aligned."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone(memory_format=torch.contiguous_format)


def tensor_digest(name: str, tensor: Tensor) -> str:
    """xxh3-128 of a tensor's name, dtype, shape and raw bytes, 32 hexadecimal digits."""
    hasher = xxhash.xxh3_128(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.numel():
        hasher.update(flat.view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """One digest of many tensors, whatever the order of the mapping."""
    return combined({name: tensor_digest(name, tensor) for name, tensor in tensors.items()})


def combined(digests: Mapping[str, str]) -> str:
    """`digest`, from each tensor's."""
    hasher = xxhash.xxh3_128()
    for name in sorted(digests):
        hasher.update(digests[name].encode())
    return hasher.hexdigest()


def content_digest(value: Any, *, tensors: bool = True) -> str:
    """A digest of nested values, the same in every process that holds equal ones: 32 hexadecimal digits.

    Tensors and arrays count by their bytes, numbers and text as they are, sets whatever their order; what prints its
    address, and any object of another kind, counts by its class alone. Without ``tensors`` these do not count.

    >>> content_digest([torch.ones(2), {"a", "b"}]) == content_digest([torch.ones(2), {"b", "a"}])
    True
    """
    hasher = xxhash.xxh3_128()

    def add(value: Any) -> None:
        if isinstance(value, Tensor) and not tensors:
            return
        if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
            hasher.update(tensor_digest("", value).encode())
        elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            hasher.update(f"{value.dtype}{value.shape}".encode())
            hasher.update(value.tobytes())
        elif isinstance(value, Mapping):
            for key, below in value.items():
                hasher.update(repr(key).encode())
                add(below)
        elif isinstance(value, list | tuple):
            hasher.update(b"[%d]" % len(value))
            for below in value:
                add(below)
        elif isinstance(value, set | frozenset):
            add(sorted(map(content_digest, value)))
        elif value is None or isinstance(value, bool | int | float | str | bytes):
            hasher.update(repr(value).encode())
        else:
            hasher.update(f"{type(value).__module__}.{type(value).__qualname__}".encode())

    add(value)
    return hasher.hexdigest()


def flatten_state(state: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a nested ``state_dict``, with its path: ``optimizer.state.0.exp_avg``."""
    if isinstance(state, Tensor):
        yield prefix, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from flatten_state(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from flatten_state(value, f"{prefix}.{index}" if prefix else str(index))


def forget_inherited_randomness() -> None:
    """In a forked process: numpy's generator as in a fresh one, not a copy of the parent's. `random` does so by itself,
    and torch starts from one constant anyway."""
    np.random.seed()


@contextmanager
def forked_randomness(device: torch.device) -> Iterator[None]:
    """What draws inside it leaves torch's, numpy's and Python's generators as they were; of GPUs only ``device``'s."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), HostRandomness():
        yield


def resolve_kernels() -> None:
    """Calls each elementwise function that torch takes from MKL once, on one number, so that none is first called by
    several threads at once.

    MKL looks for the kernel of a function at its first call. If two threads make that call together, one may be given
    another kernel, of three digits instead of seven, for its whole share of that one call: pytorch issue 188792, until
    MKL 2025.0. Processes forked afterwards have it behind them too.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for function in _FROM_MKL:
            function(one)
