"""Recompute (activation checkpointing): blocks that run again during backward, in place of keeping what it needs.

What runs is torch's own ``checkpoint(..., use_reentrant=False)`` (Chen et al. 2016, Training Deep Nets with Sublinear
Memory Cost), selective in torch's sense with `torch.utils.checkpoint.create_selective_checkpoint_contexts`. Here lies
what makes it safe on any module: no bit of a result changes, buffers and random generators included, and a block of
which that is not true is found out.

[Note: where the call is wrapped] A block keeps its class, its keys and its hooks. `torch.nn.Module` calls
``_compiled_call_impl`` in place of all else if it is set, which is also where ``Module.compile`` puts the compiled
call. The wrapper takes that slot and calls what was there: checkpointing lies outside a compiled block, since inside it
the compiler would fuse other operators, and round otherwise in bf16.
"""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias, cast, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from paceline.determinism import content_digest
from paceline.errors import ConfigError, UsageError, did_you_mean
from paceline.memory.again import Again, Buffer, count_fused_steps
from paceline.memory.blocks import find_blocks, named_modules, nearest_path
from paceline.memory.fakes import current_fakes
from paceline.memory.plan import Level
from paceline.memory.simulate import flop_formulas

__all__ = ["Mode", "Recomputed", "get_levels", "is_compiled", "levels_of", "recompute", "set_levels"]


Mode: TypeAlias = str | Sequence[str] | Mapping[str, str]


def recompute(model: nn.Module, mode: Mode) -> dict[str, Level]:
    """Lets blocks of ``model`` recompute from now on, in place of any others so far. Not collective.

    Call it after ``compile``. No key or type in the model changes, and never a bit of a result. A block's hooks run in
    its second forward too, if that gets so far: it ends where all is there that backward needs.

    Args:
        model: any module tree.
        mode: ``none``, ``all``, ``selective`` (keep what matrix products and attention return, recompute the rest),
            ``every:k`` (blocks 0, k, 2k, ...), a list of module paths and patterns, or a mapping of these to ``keep``,
            ``selective`` or ``full``.

    Returns:
        The level of each block by module path. See `paceline.memory.find_blocks`.

    Raises:
        ConfigError: an unknown mode or block, or a model without repeated blocks.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    >>> model = nn.Sequential(*[block() for _ in range(3)])
    >>> recompute(model, "every:2")
    {'0': 'full', '1': 'keep', '2': 'full'}
    """
    levels = levels_of(model, mode)
    set_levels(model, levels)
    return levels


def levels_of(model: nn.Module, mode: Mode) -> dict[str, Level]:
    """What `recompute` would do, undone as yet."""
    blocks = find_blocks(model)
    levels: dict[str, Level] = dict.fromkeys(blocks, "keep")
    if not isinstance(mode, str):
        if not isinstance(mode, Sequence | Mapping) or not all(isinstance(path, str) for path in mode):
            raise ConfigError(
                "cannot recompute blocks",
                found=reprlib.repr(mode),
                needed="none, all, selective, every:k, or module paths",
                fix='Write recompute(model, "all"), or recompute(model, ["blocks.0", "blocks.2"])',
            )
        named = mode if isinstance(mode, Mapping) else dict.fromkeys(mode, "full")
        for pattern, level in named.items():
            levels.update(dict.fromkeys(named_modules(model, [pattern]), _level(level)))
        return levels
    every, _, k = mode.partition(":")
    if mode not in ("none", "all", "selective") and not (every == "every" and k.isdecimal() and int(k) > 0):
        raise ConfigError(
            "cannot recompute blocks",
            found=repr(mode),
            needed="none, all, selective, every:k, or module paths",
            fix="Use paceline.memory.fit for what fits a budget"
            if mode == "auto"
            else did_you_mean(mode.lower(), ("none", "all", "selective", "every:2")),
        )
    if not blocks and mode != "none":
        raise ConfigError(
            "cannot recompute blocks",
            found=f"no repeated blocks in {type(model).__name__}",
            needed="modules of one class side by side, with modules inside, as the layers of a transformer",
            fix="Name what shall be recomputed, as in execution.recompute: [encoder, decoder]",
        )
    if mode != "none":
        chosen = list(blocks)[:: int(k) if k else 1]
        levels.update(dict.fromkeys(chosen, "selective" if mode == "selective" else "full"))
    return levels


def _level(word: object) -> Level:
    for level in get_args(Level):
        if word == level:
            return cast(Level, level)
    raise ConfigError(
        "cannot recompute blocks",
        found=repr(word),
        needed=" or ".join(get_args(Level)),
        fix=did_you_mean(str(word).lower(), get_args(Level)),
    )


def set_levels(model: nn.Module, levels: Mapping[str, Level]) -> None:
    """Gives each named module its level; all others keep what autograd saves.

    Raises:
        ConfigError: an unknown path, a compiled module that shall be ``selective``, or one inside a compiled module.
    """
    modules = dict(model.named_modules())
    if unknown := levels.keys() - modules.keys():
        raise ConfigError(
            "cannot recompute a block",
            found=f"no module {min(unknown)!r} in {type(model).__name__}",
            needed="a module's path, the first where it has several",
            fix=nearest_path(min(unknown), filter(None, modules)),
        )
    compiled = [path for path, module in modules.items() if is_compiled(module)]
    for path, level in levels.items():
        outer = [up for up in compiled if level != "keep" and up != path and (not up or path.startswith(f"{up}."))]
        if outer:
            raise ConfigError(
                f"cannot recompute {path}",
                found=f"it inside of {outer[0] or type(model).__name__}, which is compiled as a whole",
                needed="blocks that are compiled one by one, each recomputed around its compiled call",
                fix="Write `for block in model.blocks: block.compile(dynamic=False)` in place of model.compile()",
            )
        if level == "selective" and path in compiled:
            raise ConfigError(
                f"cannot recompute {path} selectively",
                found="a compiled block, which shows none of its operators",
                needed="a block that runs as it is written",
                fix="Recompute all of it: the compiler chooses by itself what a block keeps",
            )
    if {*levels.values()} - {"keep"}:
        count_fused_steps()
    for path, module in modules.items():
        call, level = module._compiled_call_impl, levels.get(path, "keep")
        if isinstance(call, Recomputed):
            module._compiled_call_impl = call.inner
        if level != "keep":
            module._compiled_call_impl = Recomputed(path, module, level)


def get_levels(model: nn.Module) -> dict[str, Level]:
    """The modules that recompute now, and how."""
    calls = {path: module._compiled_call_impl for path, module in model.named_modules()}
    return {path: call.level for path, call in calls.items() if isinstance(call, Recomputed)}


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.nn.Module.compile` was called on it."""
    call = module._compiled_call_impl
    return (call.inner if isinstance(call, Recomputed) else call) is not None


class Recomputed:
    """The call of a module that recomputes. See [Note: where the call is wrapped].

    Attributes:
        timed: measure the two following.
        forward_s, again_s: seconds of calls so far, and of their repetitions in backward.
    """

    def __init__(self, path: str, module: nn.Module, level: Level) -> None:
        self._path, self._module, self.level = path, module, level
        self.inner: Callable[..., Any] | None = module._compiled_call_impl
        self._calls = 0
        self._written: set[Buffer] = set()
        """Buffers that calls changed whose outputs were compared."""
        self.timed = False
        self.forward_s = self.again_s = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner = self.inner or self._module._call_impl
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        if torch._C._functorch.maybe_current_level() is not None or torch._C._is_tracing():
            raise self.refusal(
                "a transformation by torch.func or torch.jit.trace around it",
                needed="a block that runs as it is written",
                fix='Call paceline.memory.recompute(model, "none") before',
            )
        begun = self._now()
        try:
            return self._checkpointed(inner, args, kwargs)
        finally:
            self.forward_s += self._now() - begun

    def _now(self) -> float:
        if self.timed and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter() if self.timed else 0.0

    def _checkpointed(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names, first = tuple(kwargs), []
        self._calls += 1
        # Calls 1, 2, 4, 8, ... run to their end a second time too, and must return the same bits: a block that goes
        # astray is found in its first step, one that does so later soon enough, and hashing stays free. `selective`
        # recomputes all then, but where somebody counts what it does: what it keeps would hide what it does not.
        compared = self._calls & (self._calls - 1) == 0 and not (self.timed and self._calls > 1)
        on_shapes = current_fakes() is not None

        def forward(*flat: Any) -> Any:
            at = len(flat) - len(names)
            returned = inner(*flat[:at], **dict(zip(names, flat[at:], strict=True)))
            if compared and not on_shapes:
                first.append(content_digest(returned))
                if first[-1] != first[0]:
                    raise self.refusal("another output of its second forward than of its first")
            return returned

        keeping, kept = nullcontext(), nullcontext()
        if self.level == "selective" and not (compared and torch._C._len_torch_dispatch_stack() == 0):
            keeping, kept = create_selective_checkpoint_contexts(_policy)
        again = Again(
            self._module,
            [*args, *kwargs.values()],
            self.refusal,
            inside=lambda: self._second(kept),
            once=self.level == "selective",
        )
        # All by place: of what is passed by name checkpoint overlooks the device, and its random state.
        returned = checkpoint(
            forward,
            *args,
            *kwargs.values(),
            use_reentrant=False,
            context_fn=lambda: (keeping, again),
            early_stop=not compared,
        )
        self._note_changed(again.first_ended(), compared=compared)
        return returned

    def _note_changed(self, buffers: list[Buffer], *, compared: bool) -> None:
        """One that is changed in some calls only may also be read, which no comparison has shown to be harmless."""
        if compared:
            self._written.update(buffers)
        for part, name in buffers:
            if (part, name) not in self._written and not isinstance(part, _NormBase):  # these only write
                raise self.refusal(f"a buffer that its forward changes in some calls only, {name}")

    @contextmanager
    def _second(self, kept: AbstractContextManager[Any]) -> Iterator[None]:
        begun = self._now()
        try:
            with kept:
                yield
        finally:
            self.again_s += self._now() - begun

    def refusal(self, found: str, *, needed: str | None = None, fix: str | None = None) -> UsageError:
        """Of a block that is found out."""
        return UsageError(
            f"cannot recompute block {self._path}",
            found=found,
            needed=needed
            or "a forward that depends on its inputs, weights and random numbers alone, and changes none of them",
            fix=fix
            or f"Leave out {self._path} in execution.recompute; or look in {type(self._module).__name__}.forward for "
            "counters, caches, generators of its own, contexts open around forward only, and inputs or buffers that it "
            "changes and reads",
        )


def _policy(context: object, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps what products of matrices, convolutions and attention return: what a count of operations knows of."""
    dear = getattr(operator, "overloadpacket", operator) in flop_formulas()
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE
