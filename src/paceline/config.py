"""What a run is: `Recipe` (all that may change a bit of the result) and `Execution` (all that must not).

Both are frozen and checked when made. `Identity` is what a resume must match.
Reading YAML and the command line is `paceline.cli`'s; this module knows only values.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from paceline.errors import ConfigError, did_you_mean
from paceline.faults import Faults
from paceline.lanes import check_batch, lanes_of
from paceline.sizes import parse_size

__all__ = ["Execution", "Identity", "Optimizer", "Recipe", "Resume", "Schedule", "as_dict"]


Resume = Literal["auto", "never", "must"]
"""``never`` starts afresh, ``auto`` goes on from the newest checkpoint if there is one, ``must`` needs one."""


def _require(ok: bool, what: str, found: object, needed: str, fix: str) -> None:
    if not ok:
        raise ConfigError(f"cannot use {what}", found=f"{what.rpartition('.')[2]}={found!r}", needed=needed, fix=fix)


def _check_types(settings: object, section: str) -> None:
    """Raises `ConfigError` for the first field whose value is not of its type or among its choices."""
    for name, hint in typing.get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if not _fits(hint, value):
            choices = [str(one) for part in _parts(hint) for one in typing.get_args(part) if isinstance(one, str)]
            raise ConfigError(
                f"cannot use {section}.{name}",
                found=f"{name}={value!r}",
                needed=" or ".join(choices) or str(getattr(hint, "__name__", hint)),
                fix=did_you_mean(str(value), choices) if choices else f"Leave out {name} for the default",
            )


def _parts(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _fits(hint: Any, value: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if len(parts := _parts(hint)) > 1:
        return any(_fits(part, value) for part in parts)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple | list) and len(value) == len(arguments)
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer by import path.

    Args:
        class_path: any torch optimizer; a bare name is looked up in ``torch.optim``.
        lr: peak learning rate, the one that the schedule scales.
        lr_scaling: how ``lr`` follows the recipe's batch. ``none``: not at all; ``linear``: times batch / base_batch;
            ``sqrt``: times the root of that. The batch is the recipe's, so the number of workers never enters.
        base_batch: the batch that ``lr`` was found for; with ``linear`` and ``sqrt`` only.
        weight_decay: applied to matrices and embeddings only, never to vectors (norms, biases). ``null`` leaves the
            optimizer's own default.
        betas: passed on when the optimizer takes them; ``null`` leaves its own default.
        eps: likewise.
        fused: one kernel per step where the optimizer has it.
        init_args: further arguments of the optimizer, by name.
    """

    class_path: str = "AdamW"
    lr: float = 1e-3
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    base_batch: int | None = None
    weight_decay: float | None = 0.1
    betas: tuple[float, float] | None = (0.9, 0.95)
    eps: float | None = None
    fused: bool = True
    init_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_types(self, "optimizer")
        _require(self.lr >= 0, "optimizer.lr", self.lr, "a number >= 0", "Use lr: 1.0e-3")
        _require(
            self.base_batch is None or self.base_batch >= 1,
            "optimizer.base_batch",
            self.base_batch,
            "a whole number >= 1",
            "Use the batch that lr was found for",
        )
        if (self.lr_scaling == "none") != (self.base_batch is None):
            raise ConfigError(
                "cannot scale the learning rate",
                found=f"lr_scaling={self.lr_scaling}, base_batch={self.base_batch}",
                needed="both lr_scaling and base_batch, or neither",
                fix="Set optimizer.base_batch to the batch that lr was found for"
                if self.base_batch is None
                else "Set optimizer.lr_scaling to linear or sqrt, or leave out base_batch",
            )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate as a function of the step alone: a linear warm-up, then one of four shapes.

    Args:
        kind: ``cosine`` or ``linear`` decay to ``final``; ``constant``; ``wsd`` (warm-up, stable, linear decay).
        warmup: steps from 0 to the peak.
        final: fraction of the peak reached at the last step.
        decay: ``wsd`` only: fraction of all steps spent in the decay.
    """

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup: int = 0
    final: float = 0.1
    decay: float = 0.2

    def __post_init__(self) -> None:
        _check_types(self, "schedule")
        _require(self.warmup >= 0, "schedule.warmup", self.warmup, "steps >= 0", "Use warmup: 0 for none")
        _require(0 <= self.final <= 1, "schedule.final", self.final, "a fraction of the peak, 0 to 1", "Use final: 0.1")
        _require(
            0 <= self.decay <= 1, "schedule.decay", self.decay, "a fraction of the steps, 0 to 1", "Use decay: 0.2"
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every setting that may change a bit of the result.

    ``optimizer``, ``schedule``, ``max_norm``, ``compile`` and ``loss_chunks`` are for `paceline train`: your own loop
    does that itself.

    Args:
        batch: samples of one step, over all lanes: ``lanes x micro_steps x micro_batch``.
        micro_batch: samples of one forward and backward.
        lanes: virtual workers; the most real workers this recipe can ever use.
        steps: length of the run in steps; or
        epochs: in passes over the data. One of the two.
        tail: the samples that do not divide over lanes. ``short``: each sample once an epoch, some lanes one fewer;
            ``pad``: repeats fill up (torch's ``DistributedSampler``); ``drop``: left out (its ``drop_last=True``).
        order: ``cipher``: a keyed bijection, O(1) memory; ``permutation``: the epoch order of ``DistributedSampler``
            with one replica per lane; ``sequential``.
        seed: of initial weights, order, dropout and augmentation.
        optimizer: see `Optimizer`.
        schedule: see `Schedule`.
        max_norm: clip the global gradient norm to this; ``null``: no clipping.
        on_nonfinite: what all workers do when a loss or gradient is not finite: ``raise``, or ``skip`` the update.
        skip_loss_above: skip the update when the step's mean loss is above this.
        precision: ``fp32``, or ``bf16`` autocast over fp32 weights.
        compile: compile the model's repeated blocks, one by one.
        loss_chunks: parts into which a micro-batch's tokens are split for output head and loss, so that the logits of
            one part only are in memory at a time; ``null``: all at once. For tasks that can, as those on text here.
        device: ``cpu``, ``cuda``, or ``auto``: cuda where there is one. The resolved value is recorded.
        threads: torch threads of each worker; sums inside an operator can depend on them.
        gradients: ``exact``: a fixed tree over lanes; ``allreduce``: the backend's own sum, bits move with workers.
        compress: how gradients travel: ``none``: as they are; ``bf16``: half the bytes, with 8 significant bits, and
            added up so. With ``gradients: allreduce`` only.
        init_from: run directory whose weights the run starts from.
    """

    batch: int = 64
    micro_batch: int = 8
    lanes: int = 8
    steps: int | None = None
    epochs: int | None = None
    tail: Literal["short", "pad", "drop"] = "short"
    order: Literal["cipher", "permutation", "sequential"] = "cipher"
    seed: int = 0
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    max_norm: float | None = 1.0
    on_nonfinite: Literal["raise", "skip"] = "raise"
    skip_loss_above: float | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    loss_chunks: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
    gradients: Literal["exact", "allreduce"] = "exact"
    compress: Literal["none", "bf16"] = "none"
    init_from: str | None = None

    def __post_init__(self) -> None:
        _check_types(self, "recipe")
        for name in ("batch", "micro_batch", "lanes", "threads"):
            value = getattr(self, name)
            _require(value >= 1, f"recipe.{name}", value, "a whole number >= 1", f"Use recipe.{name}: 8")
        _require(self.threads <= 1024, "recipe.threads", self.threads, "at most 1024", "Use recipe.threads: 1")
        for name in ("steps", "epochs"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"recipe.{name}", value, "a whole number >= 1", f"Use {name}: 100")
        _require(
            self.loss_chunks is None or self.loss_chunks >= 1,
            "recipe.loss_chunks",
            self.loss_chunks,
            "a whole number >= 1",
            "Use recipe.loss_chunks: 8, or null for the whole at once",
        )
        _require(0 <= self.seed < 2**63, "recipe.seed", self.seed, "0 <= seed < 2**63", "Use seed: 0")
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                "cannot tell how long to train",
                found=f"steps={self.steps}, epochs={self.epochs}",
                needed="exactly one of them",
                fix="Set recipe.steps or recipe.epochs, not both",
            )
        _require(
            self.max_norm is None or self.max_norm > 0,
            "recipe.max_norm",
            self.max_norm,
            "a number > 0",
            "Use null for no clipping",
        )
        if self.compress != "none" and self.gradients != "allreduce":
            raise ConfigError(
                "cannot compress the exchange",
                found=f"compress={self.compress}, gradients={self.gradients}",
                needed="gradients: allreduce, since rounded sums depend on the workers",
                fix="Set recipe.gradients: allreduce, or leave out recipe.compress",
            )
        check_batch(self.batch, self.micro_batch, self.lanes)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Every setting that must not change a bit of the result.

    ``evaluate_every``, ``log_every`` and ``tensorboard`` are for `paceline train`.

    Args:
        workers: training processes; ``auto``: one per GPU, or one per two CPU cores up to the lanes (at least one).
        loader_workers: data-loading processes of each worker; 0 loads in the worker itself.
        checkpoint_every: steps between checkpoints; ``null``: only at the end.
        async_checkpoint: write in the background; a step waits only for the copy in memory.
        keep: newest checkpoints kept.
        keep_best: also keep the checkpoint with the lowest value of this held-out metric.
        evaluate_every: steps between evaluations; ``null``: only at the end.
        log_every: steps between progress lines.
        digest_every: steps between digests of the whole state in the run log, with each tensor's; for `verify`.
        bucket_mib: size of one exchange in MiB.
        overlap: exchange gradients while the last backward still runs; ``false``: only after it has ended.
        stop_at: stop after this step, leaving the schedule as it is.
        run_dir: where the run lives; default ``runs/<config name>``.
        tensorboard: also write scalars for TensorBoard to ``<run_dir>/tensorboard``.
        on_loss: when a worker is lost. ``replace``: the others go on at once, and another takes its place; ``shrink``:
            the others go on alone; ``restart``: all start again from the newest checkpoint; ``stop``: the run ends.
            ``auto``: replace on CPU; restart on CUDA, where going on has not been tried yet. With no other worker left
            the run starts again from its newest checkpoint, unless it is ``stop``.
        hang_after_s: a worker that does not get on with a micro-batch, a load or an update for so long is taken for
            hung and replaced; ``null``: ten times the longest of its kind so far in this run, at least 30 s.
        recompute: blocks that run again in backward, so that what is inside them need not be kept: ``none``; ``all``;
            ``selective``: all, but what matrix products and attention return is kept; ``every:k``: blocks 0, k, 2k;
            ``auto``: what fits ``memory`` at the least cost in time (`paceline train` only; see `paceline.memory.fit`);
            or a list of module paths and patterns (``[blocks.*]``), or a mapping of them to keep, selective or full.
        memory: most bytes that a worker may need, such as ``8GiB``: a run that needs more does not start (`paceline
            train` only); ``null``: with ``auto`` what this machine has, divided by the workers on it.
        faults: failures to rehearse, e.g. ``kill worker=1 step=3; stop worker=0 step=7``; see `paceline.faults`.
        timeout_s: seconds after which a wait for the other workers is an error, and what has not happened before in
            this run (a first step, an evaluation, a save) is taken for hung.
    """

    workers: int | Literal["auto"] = "auto"
    loader_workers: int = 0
    checkpoint_every: int | None = 500
    async_checkpoint: bool = True
    keep: int = 3
    keep_best: str | None = None
    evaluate_every: int | None = 500
    log_every: int = 10
    digest_every: int | None = None
    bucket_mib: float = 16.0
    overlap: bool = True
    stop_at: int | None = None
    run_dir: str | None = None
    tensorboard: bool = False
    on_loss: Literal["auto", "replace", "shrink", "restart", "stop"] = "auto"
    hang_after_s: float | None = None
    recompute: str | list[str] | dict[str, str] = "none"
    memory: str | None = None
    faults: str | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _check_types(self, "execution")
        for name in ("workers", "checkpoint_every", "keep", "evaluate_every", "log_every", "digest_every", "stop_at"):
            value = getattr(self, name)
            ok = value is None or value == "auto" or value >= 1
            _require(ok, f"execution.{name}", value, "a whole number >= 1", f"Use execution.{name}: 1 or more")
        _require(
            self.loader_workers >= 0,
            "execution.loader_workers",
            self.loader_workers,
            "a whole number >= 0",
            "Use 0 to load in the worker",
        )
        for name in ("bucket_mib", "timeout_s", "hang_after_s"):
            value = getattr(self, name)
            _require(
                value is None or 0 < value <= 1e9,
                f"execution.{name}",
                value,
                "a number > 0, at most 1e9",
                f"Leave out execution.{name} for the default",
            )
        _check_recompute(self.recompute)
        if self.memory is not None:
            parse_size(self.memory, "execution.memory")
        if self.faults is not None:
            Faults.parse(self.faults)

    def check_started(self, workers: int) -> None:
        """Raises `ConfigError` when another number of workers was started than ``workers`` says."""
        if self.workers not in ("auto", workers):
            raise ConfigError(
                "cannot start the run",
                found=f"{workers} workers started, execution.workers={self.workers}",
                needed="the same number",
                fix=f"Start it with `paceline launch -n {self.workers}`, or leave out workers",
            )

    def check(self, recipe: Recipe) -> None:
        """Raises `ConfigError` when ``recipe`` cannot be run this way."""
        if self.workers != "auto":
            lanes_of(0, self.workers, recipe.lanes)
        levels = self.recompute.values() if isinstance(self.recompute, dict) else [self.recompute]
        if recipe.compile and "selective" in levels:
            raise ConfigError(
                "cannot recompute selectively",
                found="recipe.compile: true, and a compiled block shows none of its operators",
                needed="blocks that run as they are written",
                fix="Use execution.recompute: all or every:2; the compiler chooses what a block keeps by itself",
            )


def _check_recompute(mode: str | list[str] | dict[str, str]) -> None:
    needed = "none, all, selective, auto, every:k with k >= 1, a list of module paths, or a mapping of them to levels"
    fix = "Use none for no recompute, or name blocks: [blocks.0, blocks.2]"
    if isinstance(mode, str):
        every, _, k = mode.partition(":")
        ok = mode in _MODES or (every == "every" and k.isdecimal() and int(k) >= 1)
        fix = "" if ok else _nearest_mode(mode)
    else:
        ok = bool(mode) and all(isinstance(path, str) and path for path in mode)
    if isinstance(mode, dict) and ok:
        unknown = [level for level in mode.values() if level not in _LEVELS]
        ok, needed = not unknown, "keep, selective or full for each module path"
        fix = did_you_mean(str(unknown[0]), _LEVELS) if unknown else ""
    _require(ok, "execution.recompute", mode, needed, fix)


_MODES, _LEVELS = ("none", "all", "selective", "auto", "every:2"), ("keep", "selective", "full")
_NO, _YES = ("null", "~", "false", "off", "no", "0"), ("true", "on", "yes", "1")


def _nearest_mode(text: str) -> str:
    """What to write in place of a text that is no way to recompute."""
    low = text.lower()
    if low in ("", *_NO):
        return "Use none for no recompute"
    if low in _YES:
        return "Use all, or auto for what fits execution.memory"
    if text.startswith("{"):
        return "Write a mapping of paths to levels: {blocks.0: full, blocks.1: selective}"
    if text.startswith("[") or "." in text or "*" in text:
        paths = [path.strip(" '\"") for path in text.strip("[] ").split(",")]
        shown = [path if path[:1].isalpha() and path.lower() not in (*_NO, *_YES) else repr(path) for path in paths]
        return f"For a block of that name write [{', '.join(shown)}]"
    near = get_close_matches(low, _MODES, n=1)
    return f"Did you mean {near[0]!r}?" if near else "Use all, or name blocks: [blocks.0, blocks.2]"


@dataclass(frozen=True)
class Identity:
    """What a resume must match, as flat fields: ``{"recipe.seed": 0, "task.class_path": "...", ...}``.

    >>> a = Identity.of({"recipe": {"seed": 0, "steps": 3}})
    >>> a.differences(Identity.of({"recipe": {"seed": 1, "steps": 3}}))
    ['recipe.seed: 0 there, 1 here']
    """

    fields: Mapping[str, Any]

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Identity:
        """Flattens nested mappings; every leaf must be JSON."""
        flat: dict[str, Any] = {}

        def walk(prefix: str, value: Any) -> None:
            if isinstance(value, Mapping) and value:
                for key, below in value.items():
                    walk(f"{prefix}.{key}" if prefix else str(key), below)
            else:
                flat[prefix] = json.loads(json.dumps(value))

        walk("", tree)
        return cls(flat)

    @property
    def digest(self) -> str:
        """SHA-256 of the fields in canonical JSON, 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(dict(self.fields), sort_keys=True).encode()).hexdigest()

    def differences(self, here: Identity) -> list[str]:
        """One line per field in which ``here`` differs from this recorded identity; empty when they match."""
        missing = "nothing"
        return [
            f"{name}: {self.fields.get(name, missing)} there, {here.fields.get(name, missing)} here"
            for name in sorted({*self.fields, *here.fields})
            if self.fields.get(name, missing) != here.fields.get(name, missing)
        ]


def as_dict(settings: Recipe | Execution) -> dict[str, Any]:
    """Settings as plain nested dicts, lists and scalars: what YAML and JSON can hold."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(settings)))
    return plain
