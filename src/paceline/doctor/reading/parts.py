"""Which parts of a wrapped model its forward uses: always, sometimes, or never.

What is judged is the part itself, by whatever name it is used: ``self.fc`` may be called as ``self.layers[0]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from paceline.doctor.reading.evidence import inner_module, modules_in, opposite
from paceline.doctor.reading.lookup import method_of
from paceline.doctor.reading.trace import Condition, Event, Trace
from paceline.doctor.reading.values import NONE, UNKNOWN, Value, words

__all__ = ["Idle", "Use", "has_parameters", "idle_parts", "inside", "is_frozen"]

_WITH_PARAMETERS = words(
    "Linear LazyLinear Bilinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d BatchNorm1d "
    "BatchNorm2d BatchNorm3d SyncBatchNorm LayerNorm GroupNorm RMSNorm Embedding EmbeddingBag LSTM GRU RNN LSTMCell "
    "GRUCell RNNCell Transformer TransformerEncoder TransformerDecoder TransformerEncoderLayer TransformerDecoderLayer "
    "MultiheadAttention PReLU"
)


_MOST: Final = 200
"""Of a model with more modules only these are judged: what is true of one layer is true of the next."""

Use = Literal["always", "sometimes", "in some copies", "never"]
"""How forward uses a part: in each step, in some, in each but only in some of the modules that one line makes
(``Block(down=i == 0) for i in range(3)``), or in none."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A field of a module in the wrapped model that forward does not always use."""

    module: Value
    name: str
    use: Use


def idle_parts(trace: Trace, wrap: Event) -> list[Idle]:
    """Those of a wrapped model that are not always used."""
    uses = _uses(trace, wrap)
    found: list[Idle] = []
    for module in list(modules_in(inner_module(wrap)))[:_MOST]:
        if module.kind != "module" or not _shows_its_reads(trace, module):
            continue
        for name, held in module.fields.items():
            parts = [part for part in held.each() if part.kind in ("module", "parameter") and has_parameters(part)]
            if name == "__class__" or not parts or any(is_frozen(trace, part, wrap) for part in parts):
                continue
            use = _most(_use_of(part, uses) for part in parts)
            if use != "always":
                found.append(Idle(module, name, use))
    return found


def _shows_its_reads(trace: Trace, module: Value) -> bool:
    """Whether it is known which of its fields forward looks at."""
    own = bool(module.code) and method_of(module, "forward") is not None
    holder = module.name in ("torch.nn.ModuleList", "torch.nn.ModuleDict") or "some" in module.labels
    return id(module) in trace.reads and (own or (holder and not module.code))


def _uses(trace: Trace, wrap: Event) -> dict[int, Use]:
    """By identity, the parts that forward calls, or else reads."""
    trained = {outer.number for _, outer in inside(trace, wrap) if outer.with_grad}
    calls: dict[int, dict[int, list[tuple[Event, Event]]]] = {}  # by part and by forward of the whole
    for event, outer in inside(trace, wrap):
        if outer.number in trained or not trained:
            calls.setdefault(id(event.subject), {}).setdefault(outer.number, []).append((event, outer))
    uses: dict[int, Use] = {}
    for module in modules_in(inner_module(wrap)):
        for name, always in trace.reads.get(id(module), {}).items():
            for part in module.fields[name].each() if name in module.fields else ():
                use: Use = "always" if always else "sometimes"
                uses[id(part)] = _most((use, uses.get(id(part), "never")))
    for part_id, those in calls.items():  # ``self.parts[which](x)``: called always, but read only sometimes
        each = [_use_by(calls_of_one) for calls_of_one in those.values()]
        each += ["sometimes"] if len(those) < len(trained) else []
        uses[part_id] = _least((*each, uses.get(part_id, "always")))
    _share(uses, list(modules_in(inner_module(wrap))))
    return uses


def _share(uses: dict[int, Use], parts: list[Value]) -> None:
    """Of layers that hold one weight (``self.out.weight = self.embedding.weight``) the use of one is that of all."""
    tied: dict[int, list[int]] = {}
    for part in parts:
        if (weight := part.fields.get("weight")) is not None:
            tied.setdefault(id(weight), []).append(id(part))
    for those in tied.values():
        if len(those) > 1:
            uses.update(dict.fromkeys(those, _most(uses.get(part, "never") for part in those)))


def _use_by(calls: list[tuple[Event, Event]]) -> Use:
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


def _use_of(part: Value, uses: dict[int, Use]) -> Use:
    """By what it holds, if nobody looks at it itself."""
    if id(part) in uses:
        return uses[id(part)]
    inner = [uses.get(id(held), "never") for held in modules_in(part) if held is not part and _is_leaf(held)]
    if _is_leaf(part) or not inner:
        return "never"
    return inner[0] if len(set(inner)) == 1 else "sometimes"


_ORDER: Final[tuple[Use, ...]] = ("always", "sometimes", "in some copies", "never")


def _most(uses: Iterable[Use]) -> Use:
    return min(uses, key=_ORDER.index)


def _least(uses: Iterable[Use]) -> Use:
    return max(uses, key=_ORDER.index)


def _is_leaf(part: Value) -> bool:
    """Whether it has parameters of its own."""
    if part.kind == "parameter":
        return part.fields.get("requires_grad", Value()).only is not False
    return part.name.removeprefix("torch.nn.") in _WITH_PARAMETERS


def has_parameters(module: Value) -> bool:
    return any(_is_leaf(part) for part in modules_in(module))


def is_frozen(trace: Trace, module: Value, wrap: Event) -> bool:
    """Whether it is frozen before the wrap, or may be."""
    for event in trace.of("freeze", "store"):
        if event.number > wrap.number or event.name not in ("requires_grad", "requires_grad_"):
            continue
        owner = event.subject.fields.get("owner", event.subject)
        if any(part is module for option in owner.each() for part in modules_in(option)):
            return True
    return False


def inside(trace: Trace, wrap: Event, role: str = "forward") -> Iterator[tuple[Event, Event]]:
    """Each module's forward within the wrapped model's, with that one."""
    outer: Event | None = None
    for event in trace.of("forward", "choose"):
        if not event.inside:
            outer = event if event.subject is wrap.result else None
        elif outer is not None and event.role == role:
            yield event, outer
