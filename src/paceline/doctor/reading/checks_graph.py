"""Rules about which parts of the model take part, and whether those are the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from paceline.doctor.reading.evidence import (
    Found,
    backwards_through,
    differs,
    inner_module,
    local,
    modules_in,
    opposite,
    rule_check,
)
from paceline.doctor.reading.objects import method_of
from paceline.doctor.reading.trace import Condition, Event, Trace
from paceline.doctor.reading.values import NONE, UNKNOWN, VARYING, Value, words

__all__: list[str] = []

_WITH_PARAMETERS = words(
    "Linear LazyLinear Bilinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d BatchNorm1d "
    "BatchNorm2d BatchNorm3d SyncBatchNorm LayerNorm GroupNorm RMSNorm Embedding EmbeddingBag LSTM GRU RNN LSTMCell "
    "GRUCell RNNCell Transformer TransformerEncoder TransformerDecoder TransformerEncoderLayer TransformerDecoderLayer "
    "MultiheadAttention PReLU"
)


# --- parts that take no part

_Use = Literal["always", "sometimes", "in some copies", "never"]
"""How forward uses a part: in each step, in some, in each but only in some of the modules that one line makes
(``Block(down=i == 0) for i in range(3)``), or in none."""


@dataclass(frozen=True, slots=True)
class _Idle:
    """A field of a module in the wrapped model that forward does not always use."""

    module: Value
    name: str
    use: _Use


@rule_check("unused-parameters")
def unused_parameters(trace: Trace) -> Iterator[Found]:
    for wrap in _judgeable(trace):
        if any(wrap.arguments.get(name, NONE).default not in (None, False) for name in _LENIENT):
            continue
        idle = next((idle for idle in _idle(trace, wrap) if idle.use in ("never", "in some copies")), None)
        if idle is None:
            yield from _left_out(trace, wrap)
            continue
        module, name = idle.module, idle.name
        owner = module.fields["__class__"].name if "__class__" in module.fields else "the model"
        some, seen = ("", "never") if idle.use == "never" else ("some ", "by some copies only")
        yield Found(
            wrap,
            f"`self.{name}` of {some}{owner} takes no part in forward: DDP waits for gradients of its parameters",
            evidence=f"made at line {module.fields[name].line or module.line}, {seen} read in forward",
        )


_LENIENT = ("find_unused_parameters", "static_graph")


@rule_check("static-graph-changes")
def static_graph_changes(trace: Trace) -> Iterator[Found]:
    for wrap in _judgeable(trace):
        if wrap.arguments.get("static_graph", NONE).only is not True or not _changes(trace, wrap):
            continue
        name = next((idle.name for idle in _idle(trace, wrap) if idle.use == "sometimes"), None)
        if name is not None:
            yield Found(wrap, f"`static_graph=True`, but `self.{name}` takes part in some steps only")


@rule_check("find-unused-unneeded")
def find_unused_unneeded(trace: Trace) -> Iterator[Found]:
    for wrap in _judgeable(trace):
        looks = wrap.arguments.get("find_unused_parameters", NONE).only is True
        whole = not _may_skip(trace, wrap) and _all_known(inner_module(wrap)) and not trace.any("checkpoint")
        if looks and whole and not _idle(trace, wrap):
            yield Found(wrap, "`find_unused_parameters=True`, though each forward uses every parameter")


def _judgeable(trace: Trace) -> Iterator[Event]:
    """Wraps of models whose forward is called, and that are in the script's own hands."""
    called = [event.subject for event in trace.of("forward")]
    for wrap in trace.of("wrap"):
        inner = inner_module(wrap)
        if inner is not None and any(wrap.result is model for model in called) and "escaped" not in inner.labels:
            yield wrap


def _idle(trace: Trace, wrap: Event) -> list[_Idle]:
    """What is judged is the part, by whatever name it is used: ``self.fc`` may be called as ``self.layers[0]``."""
    uses = _uses(trace, wrap)
    found: list[_Idle] = []
    for module in list(modules_in(inner_module(wrap)))[:200]:
        if module.kind != "module" or not _shows_its_reads(trace, module):
            continue
        for name, held in module.fields.items():
            parts = [part for part in held.each() if part.kind in ("module", "parameter") and _has_parameters(part)]
            if name == "__class__" or not parts or any(_frozen(trace, part, wrap) for part in parts):
                continue
            use = _most(_use_of(part, uses) for part in parts)
            if use != "always":
                found.append(_Idle(module, name, use))
    return found


def _shows_its_reads(trace: Trace, module: Value) -> bool:
    """Whether it is known which of its fields forward looks at."""
    own = bool(module.code) and method_of(module, "forward") is not None
    holder = module.name in ("torch.nn.ModuleList", "torch.nn.ModuleDict") or "some" in module.labels
    return id(module) in trace.reads and (own or (holder and not module.code))


def _uses(trace: Trace, wrap: Event) -> dict[int, _Use]:
    """By identity, the parts that forward calls, or else reads."""
    trained = {outer.number for _, outer in _inside(trace, wrap) if outer.with_grad}
    calls: dict[int, dict[int, list[tuple[Event, Event]]]] = {}  # by part and by forward of the whole
    for event, outer in _inside(trace, wrap):
        if outer.number in trained or not trained:
            calls.setdefault(id(event.subject), {}).setdefault(outer.number, []).append((event, outer))
    uses: dict[int, _Use] = {}
    for module in modules_in(inner_module(wrap)):
        for name, always in trace.reads.get(id(module), {}).items():
            for part in module.fields[name].each() if name in module.fields else ():
                use: _Use = "always" if always else "sometimes"
                uses[id(part)] = _most((use, uses.get(id(part), "never")))
    for part_id, those in calls.items():  # ``self.parts[which](x)``: called always, but read only sometimes
        each = [_use_by(calls_of_one) for calls_of_one in those.values()]
        each += ["sometimes"] if len(those) < len(trained) else []
        uses[part_id] = _least((*each, uses.get(part_id, "always")))
    _share(uses, list(modules_in(inner_module(wrap))))
    return uses


def _share(uses: dict[int, _Use], parts: list[Value]) -> None:
    """Of layers that hold one weight (``self.out.weight = self.embedding.weight``) the use of one is that of all."""
    tied: dict[int, list[int]] = {}
    for part in parts:
        if (weight := part.fields.get("weight")) is not None:
            tied.setdefault(id(weight), []).append(id(part))
    for those in tied.values():
        if len(those) > 1:
            uses.update(dict.fromkeys(those, _most(uses.get(part, "never") for part in those)))


def _use_by(calls: list[tuple[Event, Event]]) -> _Use:
    """Of a part that is called, each time within a forward of the whole."""
    own = [(event, [c for c in event.under[len(outer.under) :] if not _if_there(c, event)]) for event, outer in calls]
    if any(not conditions for _, conditions in own):
        return "always"
    single = [event for event, conditions in own if len(conditions) == 1]
    if any(opposite(event, other) for event in single for other in single):
        return "always"
    return _most(
        "in some copies" if all(_by_copy(c, event) for c in conditions) else "sometimes" for event, conditions in own
    )


def _if_there(condition: Condition, event: Event) -> bool:
    """Whether it asks whether the part, or what holds it, is not ``None``: it is used wherever it is there."""
    asked = condition.value.fields.get("of", NONE)
    return any(option is part for option in asked.each() for part in (event.subject, *event.inside))


def _by_copy(condition: Condition, event: Event) -> bool:
    """Whether it was settled when the module was made, in a loop that is over, and not alike for all."""
    known = condition.value.known
    if known is None or known.loop is None or known.loop in [loop.number for loop in event.loops]:
        return False
    return len({bool(point) for point in known.points if point is not UNKNOWN}) > 1


def _use_of(part: Value, uses: dict[int, _Use]) -> _Use:
    """By what it holds, if nobody looks at it itself."""
    if id(part) in uses:
        return uses[id(part)]
    inner = [uses.get(id(held), "never") for held in modules_in(part) if held is not part and _is_leaf(held)]
    if _is_leaf(part) or not inner:
        return "never"
    return inner[0] if len(set(inner)) == 1 else "sometimes"


_ORDER: Final[tuple[_Use, ...]] = ("always", "sometimes", "in some copies", "never")


def _most(uses: Iterable[_Use]) -> _Use:
    return min(uses, key=_ORDER.index)


def _least(uses: Iterable[_Use]) -> _Use:
    return max(uses, key=_ORDER.index)


def _is_leaf(part: Value) -> bool:
    """Whether it has parameters of its own."""
    if part.kind == "parameter":
        return part.fields.get("requires_grad", Value()).only is not False
    return part.name.removeprefix("torch.nn.") in _WITH_PARAMETERS


def _has_parameters(module: Value) -> bool:
    return any(_is_leaf(part) for part in modules_in(module))


def _frozen(trace: Trace, module: Value, wrap: Event) -> bool:
    """Whether it is frozen before the wrap, or may be."""
    for event in trace.of("freeze", "store"):
        if event.number > wrap.number or event.name not in ("requires_grad", "requires_grad_"):
            continue
        owner = event.subject.fields.get("owner", event.subject)
        if any(part is module for option in owner.each() for part in modules_in(option)):
            return True
    return False


def _left_out(trace: Trace, wrap: Event) -> Iterator[Found]:
    """Parts whose output reaches no loss."""
    inner = inner_module(wrap)
    losses = backwards_through(trace, wrap)
    reached = {label for event in losses for label in event.labels}
    for event, outer in _inside(trace, wrap):
        direct = len(event.inside) == 2 and outer.with_grad and event.with_grad
        fields = inner.fields.items() if inner is not None else ()
        held = next((name for name, part in fields if part is event.subject), None)
        left_out = f"part:{id(event.subject)}" not in reached and _has_parameters(event.subject)
        if losses and direct and held is not None and left_out and not _frozen(trace, event.subject, wrap):
            yield Found(event, f"what `self.{held}` gives reaches no loss: DDP waits for gradients of its parameters")
            return


def _inside(trace: Trace, wrap: Event, role: str = "forward") -> Iterator[tuple[Event, Event]]:
    """Each module's forward within the wrapped model's, with that one."""
    outer: Event | None = None
    for event in trace.of("forward", "choose"):
        if not event.inside:
            outer = event if event.subject is wrap.result else None
        elif outer is not None and event.role == role:
            yield event, outer


def _changes(trace: Trace, wrap: Event) -> bool:
    """Whether what decides over a part of the graph changes while training."""
    for event, outer in _inside(trace, wrap):
        for condition in event.under[len(outer.under) :]:
            value = condition.value
            if value.labels & ({"counter", "every-nth"} | VARYING) or (value.known and value.known.loop is not None):
                return True
    return False


def _may_skip(trace: Trace, wrap: Event) -> bool:
    return any(
        len(event.under) > len(outer.under) or not event.with_grad
        for event, outer in _inside(trace, wrap)
        if outer.with_grad
    )


def _all_known(inner: Value | None) -> bool:
    return all(
        part.kind in ("parameter", "buffer") or part.code is not None or part.name.startswith("torch.nn.")
        for part in modules_in(inner)
    )


# --- parts that differ between ranks


@rule_check("rank-dependent-graph")
def rank_dependent_graph(trace: Trace) -> Iterator[Found]:
    for wrap in trace.of("wrap"):
        if wrap.arguments.get("find_unused_parameters", NONE).default is True:
            continue
        for event, _ in _inside(trace, wrap, "choose"):
            key = event.argument("key")
            if key is not None and differs(key) and _has_parameters(event.subject):
                yield Found(event, "which part of the model runs is not the same on all ranks")
        done: set[int] = set()
        for event, outer in _inside(trace, wrap):
            for condition in event.under[len(outer.under) :]:
                if _differs(condition) and _has_parameters(event.subject) and condition.line not in done:
                    done.add(condition.line)
                    yield Found(
                        event,
                        "whether this part of the model runs is not the same on all ranks",
                        evidence=f"{event.source} under the condition of line {condition.line}",
                    )


def _differs(condition: Condition) -> bool:
    return differs(condition.value) and ("rank" in condition.value.labels or local(condition))


@rule_check("model-differs-across-ranks")
def model_differs_across_ranks(trace: Trace) -> Iterator[Found]:
    wrapped_parts = {id(part) for wrap in trace.of("wrap") for part in modules_in(wrap.argument("module"))}
    for event in trace.of("module"):
        if id(event.result) not in wrapped_parts:
            continue
        if event.on_some_ranks or any(
            _is_size(name, value) and differs(value) for name, value in event.arguments.items()
        ):
            yield Found(event, "this layer's size or kind is not the same on all ranks")
            return


def _is_size(name: str, value: Value) -> bool:
    """Whether an argument may say how large a layer is; another module or its weights do not."""
    return name not in ("device", "dtype") and value.kind not in ("module", "ddp", "parameter", "tensor", "function")


@rule_check("reentrant-checkpoint")
def reentrant_checkpoint(trace: Trace) -> Iterator[Found]:
    wraps = list(trace.of("wrap"))
    if not wraps or any(wrap.arguments.get("static_graph", NONE).default is True for wrap in wraps):
        return
    for event in trace.of("checkpoint"):
        if event.arguments.get("use_reentrant", NONE).only is True:
            yield Found(event, "reentrant checkpointing runs a backward of its own inside DDP's")
            return
