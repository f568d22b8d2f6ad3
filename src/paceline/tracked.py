"""The objects whose state a step changes: made equal on all workers, digested, saved and restored under their names."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from paceline.checkpoint import Store, compare_keys, pack
from paceline.determinism import aligned, compile_with_static_shapes, content_digest, flatten_state, tensor_digest
from paceline.errors import CheckpointError, UsageError
from paceline.memory.blocks import find_blocks
from paceline.memory.recompute import Mode, is_compiled, recompute
from paceline.team import Team

__all__ = ["Changes", "Tracked"]

_SMALL = 4096
"""Numbers."""


@dataclass(frozen=True)
class Changes:
    """How often each tensor had been changed, by its id, and a digest of all else."""

    versions: dict[int, int]
    digest: str

    def since(self, before: Changes) -> bool:
        """Whether something has changed."""
        counts = before.versions
        return self.digest != before.digest or any(counts.get(key, n) != n for key, n in self.versions.items())


class Tracked:
    """Modules, optimizers, and anything else with ``state_dict`` and ``load_state_dict``, by name."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._optimizers: dict[str, Any] = {}
        self._compiled_whole: list[str] = []
        self.begun = False

    def add(self, name: str, thing: Any) -> None:
        """Raises `UsageError`: the run has begun, the name is in use, or the object has no state."""
        if self.begun:
            raise UsageError(
                f"cannot track {name}",
                found="a run that has begun",
                needed="all that is tracked known before the first step, evaluation or save",
                fix="Move run.track up",
            )
        if name in self._objects:
            raise UsageError(
                f"cannot track {name}",
                found="the name in use",
                needed="a name for each object",
                fix=f"Write run.track({name}_2=...)",
            )
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise UsageError(
                f"cannot track {name}",
                found=f"a {type(thing).__name__}",
                needed="an object with state_dict and load_state_dict",
                fix="Give it those two methods, or make it a function of the step",
            )
        # What torch.compile returns has the same parameters under prefixed names (its class takes seconds to import).
        plain = getattr(thing, "_orig_mod", thing)
        if isinstance(plain, nn.Module):
            _refuse_untrainable(name, plain)
            if plain is not thing:
                self._compiled_whole.append(name)
            if plain is not thing or any(map(is_compiled, plain.modules())):
                compile_with_static_shapes()
        thing = plain
        self._objects[name] = thing

    @property
    def ids(self) -> frozenset[int]:
        """``id`` of each of them."""
        return frozenset(map(id, self._objects.values()))

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules among them."""
        return {name: thing for name, thing in self._objects.items() if isinstance(thing, nn.Module)}

    def parameters(self) -> list[nn.Parameter]:
        """Parameters of the modules that require a gradient, each once, in registration order."""
        modules = self.modules.values()
        return list(dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad))

    def recompute(self, mode: Mode) -> None:
        """Lets blocks of the modules recompute, see `paceline.memory.recompute`. Of several modules a
        mode takes the blocks of each, and paths begin with the name under which it is tracked.

        Raises:
            UsageError: a module that is compiled as a whole, which has no blocks left.
        """
        for name in self._compiled_whole:
            raise UsageError(
                f"cannot recompute blocks of {name}",
                found="a model compiled as a whole",
                needed="blocks that are compiled one by one, each recomputed around its compiled call",
                fix="Write `for block in model.blocks: block.compile(dynamic=False)` in place of torch.compile(model)",
            )
        modules = list(self.modules.values())
        if isinstance(mode, str):
            for module in list(filter(find_blocks, modules)) or modules[:1]:
                recompute(module, mode)
            return
        root = nn.Module()
        root._modules.update(self.modules)
        recompute(root if len(modules) > 1 else modules[0], mode)

    def begin_steps(self, micro_batch: int) -> None:
        """Forgets gradients of steps before: those of parameters that were frozen since would be applied for ever.

        Raises:
            UsageError: nothing to train, or statistics over micro-batches of a single sample.
        """
        for module in self.modules.values():
            module.zero_grad(set_to_none=True)
        if not self.parameters():
            raise UsageError(
                "cannot run the steps",
                found="no tracked parameter that requires a gradient",
                needed="at least one",
                fix="Write run.track(model=model, optimizer=optimizer) before run.steps",
            )
        for name, module in self.modules.items():
            for path, part in module.named_modules():
                if micro_batch == 1 and isinstance(part, _BatchNorm) and part.training:
                    raise UsageError(
                        f"cannot train {name}",
                        found=f"{path or name} ({type(part).__name__}) and recipe.micro_batch=1",
                        needed="statistics over more than one sample",
                        fix="Use a larger recipe.micro_batch, or GroupNorm, which needs no batch",
                    )

    @contextmanager
    def optimizers_held(self, allowed: Callable[[], bool]) -> Iterator[None]:
        """Meanwhile an optimizer that steps when it is not ``allowed`` raises `UsageError`."""

        def hold(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if not allowed():
                raise UsageError(
                    "cannot step the optimizer here",
                    found=f"{type(optimizer).__name__}.step() outside of step.update",
                    needed="one update for each step, with gradients summed over all workers",
                    fix="Leave it out: step.update(optimizer) steps it",
                )

        holds = [
            thing.register_step_pre_hook(hold)
            for thing in self._objects.values()
            if isinstance(thing, torch.optim.Optimizer)
        ]
        try:
            yield
        finally:
            for held in holds:
                held.remove()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The modules in eval mode; afterwards each part is as it was."""
        modes = [(part, part.training) for module in self.modules.values() for part in module.modules()]
        for part, _ in modes:
            part.training = False
        try:
            yield
        finally:
            for part, mode in modes:
                part.training = mode

    def changes(self) -> Changes:
        """To be compared with what it is later: did anybody change parameters, or what else is tracked, meanwhile?

        Cheap, unlike a digest: torch counts the changes of each tensor. Optimizers are not looked at, since nobody else
        may step them. Small tensors of other objects count by their content, as they may be made anew each time.
        """
        others = {
            name: thing.state_dict()
            for name, thing in self._objects.items()
            if not isinstance(thing, nn.Module | torch.optim.Optimizer)
        }
        tensors = dict(flatten_state(others))
        small = {path: tensor for path, tensor in tensors.items() if tensor.numel() <= _SMALL}
        versions = {
            id(tensor): tensor._version
            for tensor in (
                *(parameter for module in self.modules.values() for parameter in module.parameters()),
                *(tensor for tensor in tensors.values() if tensor.numel() > _SMALL),
            )
        }
        return Changes(versions, content_digest(small) + content_digest(others, tensors=False))

    def states(self) -> dict[str, Any]:
        """``state_dict()`` of each object."""
        return {name: thing.state_dict() for name, thing in self._objects.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of every state, by its path: ``model.head.weight``."""
        return dict(flatten_state(self.states()))

    def begin(self, team: Team, call: str) -> None:
        """Aligns the modules' storage and makes them equal to worker 0's. Collective, once, before anything trains.

        Args:
            call: what this is part of, see `Team.open`.

        Raises:
            UsageError: another architecture on another worker; names the first parameter that differs. Or a module
                that is wrapped in DistributedDataParallel.
        """
        names = team.gather(sorted(self._objects), call)
        for rank, theirs in enumerate(names):
            if theirs != names[0]:
                raise UsageError(
                    "cannot begin the run",
                    found=f"{', '.join(names[0]) or 'nothing'} tracked on worker 0, "
                    f"{', '.join(theirs) or 'nothing'} on worker {rank}",
                    needed="the same names on every worker",
                    fix="Take run.track out of `if run.is_main`",
                )
        if team.world_size > 1:
            _refuse_wrapped(self.modules)
        self.begun = True
        # Now, since training changes them: a schedule the learning rate, for one.
        self._optimizers = {
            name: {"class": type(thing).__name__} | _groups(thing)
            for name, thing in self._objects.items()
            if isinstance(thing, torch.optim.Optimizer)
        }
        for name, module in self.modules.items():
            with torch.no_grad():
                for tensor in [*module.parameters(), *module.buffers()]:
                    tensor.data = aligned(tensor.data)
            state = module.state_dict()
            _check_architecture(name, team.gather(_shapes(state), call))
            digests = team.gather({key: tensor_digest(key, value) for key, value in state.items()}, call)
            if any(theirs != digests[0] for theirs in digests):
                team.broadcast(list(state.values()))
        for name in sorted(self._objects.keys() - self.modules.keys()):
            states = team.gather(content_digest(self._objects[name].state_dict()), call)
            others = [rank for rank, theirs in enumerate(states) if theirs != states[0]]
            if others:
                raise UsageError(
                    f"cannot track {name}",
                    found=f"another state on worker {others[0]} than on worker 0",
                    needed="the same state on every worker",
                    fix="Make it without looking at the rank",
                )

    def check_savable(self) -> None:
        """Raises `CheckpointError` for a state that no checkpoint can hold."""
        for name, state in self.states().items():
            pack(name, state)

    def identity(self) -> dict[str, Any]:
        """What a checkpoint of these objects must match: names, shapes, optimizer settings as at the start."""
        shapes = {name: _shapes(module.state_dict()) for name, module in self.modules.items()}
        others = {name: type(thing).__name__ for name, thing in self._objects.items()}
        return others | self._optimizers | shapes

    def load(self, states: Mapping[str, Any]) -> None:
        """Takes over saved states; the keys must be the same both ways.

        Raises:
            CheckpointError: a name or key is missing on one side.
        """
        compare_keys("the checkpoint", states, self._objects)
        for name, module in self.modules.items():
            compare_keys(name, states[name], module.state_dict())
        for name, thing in self._objects.items():
            thing.load_state_dict(states[name])
            if isinstance(thing, torch.optim.Optimizer):
                _lay_out_like_parameters(thing)

    def load_weights(self, run_dir: Path) -> None:
        """Takes over the modules, and nothing else, from the newest checkpoint of another run.

        Raises:
            CheckpointError: no checkpoint there, or other names or keys.
        """
        loaded = Store(run_dir / "checkpoints").load(None, only=self.modules)
        if loaded is None:
            raise CheckpointError(
                f"cannot start from {run_dir}",
                found="no checkpoint there",
                needed="the directory of a run that has saved one",
                fix="Check recipe.init_from",
                cause="usage",
            )
        compare_keys(f"the modules from {run_dir}", loaded.states, self.modules)
        for name, module in self.modules.items():
            compare_keys(name, loaded.states[name], module.state_dict())
            module.load_state_dict(loaded.states[name])


def _shapes(state: Mapping[str, Tensor]) -> dict[str, str]:
    return {key: f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" for key, value in state.items()}


def _check_architecture(name: str, shapes: list[dict[str, str]]) -> None:
    for rank, theirs in enumerate(shapes):
        if theirs == shapes[0]:
            continue
        key = next(key for key in [*shapes[0], *theirs] if shapes[0].get(key) != theirs.get(key))
        raise UsageError(
            f"cannot track {name}",
            found=f"{key}: {shapes[0].get(key, 'none')} on worker 0, {theirs.get(key, 'none')} on worker {rank}",
            needed="the same architecture on every worker",
            fix="Build the model without looking at the rank",
        )


def _refuse_untrainable(name: str, module: nn.Module) -> None:
    """Raises `UsageError` for what cannot be trained this way, or not by anybody's workers."""

    def refusal(found: str, needed: str, fix: str) -> UsageError:
        return UsageError(f"cannot track {name}", found=found, needed=needed, fix=fix)

    for path, part in module.named_modules():
        what = f"{path} ({type(part).__name__})" if path else f"a {type(part).__name__}"
        if isinstance(part, nn.DataParallel | DistributedDataParallel):
            raise refusal(
                what,
                "the bare model: one process drives one device, and the run exchanges the gradients",
                "Track model.module, and start one worker per GPU with `paceline launch -n N`",
            )
        if isinstance(part, nn.SyncBatchNorm):
            raise refusal(
                what,
                "a layer that does not communicate in forward: lanes of one worker would wait for each other, and "
                "torch has it for GPUs only",
                "Use BatchNorm, whose statistics are per lane and averaged after the step, or GroupNorm",
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise refusal(
                f"sparse gradients of {what}",
                "dense gradients: only those have one order of summation",
                "Leave out sparse=True",
            )
    for path, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise refusal(
                f"{path}, a lazy parameter without a shape",
                "parameters that all workers can compare before the first step",
                "Give the module its sizes, or call the model once before it is tracked",
            )
        if parameter.is_complex():
            raise refusal(
                f"{path}, a parameter of {parameter.dtype}",
                "real parameters",
                "Hold the real and the imaginary part, and join them in forward by torch.view_as_complex",
            )


def _refuse_wrapped(modules: Mapping[str, nn.Module]) -> None:
    """Raises `UsageError` when a wrapper would exchange the gradients of a tracked module too.

    Its collectives, issued by the thread that runs backward, would pair up with the run's own: a hang, or wrong sums.
    """
    suspects = {
        name: set(module.parameters())
        for name, module in modules.items()
        if any(_is_held(parameter) for parameter in module.parameters() if parameter.requires_grad)
    }
    if not suspects:
        return
    # A graph of the user's holds parameters too. Only a look at all objects, a tenth of a second, can tell.
    wrappers = [thing for thing in gc.get_objects() if type(thing) is DistributedDataParallel]
    for name, parameters in suspects.items():
        if any(not parameters.isdisjoint(wrapper.parameters()) for wrapper in wrappers):
            raise UsageError(
                f"cannot train {name}",
                found="a DistributedDataParallel around it",
                needed="the bare model alone: the run exchanges the gradients",
                fix="Leave out the wrapper, and call the model itself in the train step",
            )


def _is_held(parameter: nn.Parameter) -> bool:
    """Whether somebody keeps the node that accumulates its gradient; else autograd makes another each time."""
    notes: Any = get_gradient_edge(parameter).node.metadata
    notes["paceline"] = True
    seen_again: Any = get_gradient_edge(parameter).node.metadata
    return "paceline" in seen_again


def _lay_out_like_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Gives the state the strides of its parameter, which a checkpoint does not keep: fused optimizers walk the memory
    of both side by side."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _groups(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Settings of each parameter group, as JSON."""
    return {
        f"group {number}": {"parameters": len(group["params"])}
        | {key: _plain(value) for key, value in group.items() if key != "params"}
        for number, group in enumerate(optimizer.param_groups)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
