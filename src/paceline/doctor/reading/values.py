"""What the reader knows of a value in the script: what it is, what went into it, and what is known of it exactly.

Nothing is run, so a `Value` stands for whatever the script would hold there. Three things are known of it:

* its **kind**: a sampler, a loader, a module, a DDP wrapper, a tensor, a function of the script, ...;
* its **labels**: what went into it, how it was computed, how well it is known. What becomes of them in something
  that is made of the value depends on their nature: `NATURES` says how, and `flows` does it;
* where it is a number, a string, a truth value or ``None``: what exactly, on each of `RANKS` ranks and, for a counter,
  in each of the first `STEPS` iterations of its loop (`Known`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = [
    "FACTORS",
    "LABELS",
    "MAX_ITEMS",
    "NATURES",
    "NONE",
    "ORDERS",
    "RANKS",
    "STEPS",
    "TRUE",
    "UNKNOWN",
    "VARYING",
    "Known",
    "Value",
    "combined",
    "constant",
    "numbered",
    "words",
]

RANKS: Final = 2
STEPS: Final = 48
MAX_ITEMS: Final = 256
"""How many elements of a list are told apart: ``a = a + a`` in a loop must not grow for ever."""

NATURES: Final[dict[str, dict[str, str]]] = {
    # It is not the same on all ranks. Goes over into whatever is computed of it; but of an object of which only some
    # part differs, an unknown part is unknown, not different: see `flows.part_labels`.
    "varies": {
        "rank": "some rank's number, global or local",
        "local_rank": "the rank on its machine",
        "global_rank": "the rank among all",
        "data": "samples that only this rank sees",
        "rng": "random numbers that each rank draws for itself",
        "clock": "the time, or this process's own name, number or temporary folder",
    },
    # It may or may not be what a rule looks for: neither "differs" nor "is the same" can be said of it. Goes over.
    "doubt": {
        "partly": "something of which some part differs between ranks",
        "escaped": "handed to a library that is not known",
    },
    # It is made of that. Goes over into what is computed of it.
    "origin": {
        "world": "the number of ranks",
        "environment": "a variable that the launcher sets",
        "other-launcher": "a variable that only Slurm or MPI sets",
        "config": "the command line",
        "devices": "the number of GPUs",
        "modulo-devices": "a remainder by that",
        "cores": "the number of CPU cores",
        "shard": "a share of a data set that is dealt out to ranks",
        "reduced": "what ranks have agreed on since",
        "eval": "a forward under `no_grad`",
        "gradient": "gradients",
        "counter": "something that is another one each time round",
        "every-nth": "a remainder of a counter",
        "size": "a length or shape",
        "own-size": "a selection whose length depends on the values",
        "unique": "`unique`: the same",
        "drawn-apart": "a split that each rank draws for itself",
        "worker": "the number of a loader's worker",
        "worker-seed": "the seed that torch gives a loader's worker",
        "exception": "whether something was raised",
        "exists": "whether there is such a file",
        "own-disk": "a folder that each machine has for itself",
    },
    # In which order its elements come. Goes over as origin does, but not from an element to what holds it.
    "order": {
        "listing": "the order in which a file system lists",
        "hash-order": "the order of a set",
        "shuffled": "a shuffle",
    },
    # A backward through it reaches something. Goes over as origin does, until it is detached: a truth, a text or a
    # number of Python has none. So do ``forward:N`` and ``part:N``.
    "graph": {
        "graph": "a forward that records its graph",
        "gathered": "what `all_gather` gave of something that had a gradient",
    },
    # How it was computed, as a loss is. Goes over, but not into a truth or a text.
    "weighting": {
        "mean": "an average over the batch",
        "mean-of-some": "an average over what is not ignored",
        "own-mean": "a sum over this rank's own count",
        "sum": "a sum",
        "count": "a sum of something without gradient",
        "divided": "a loss that was divided or scaled",
        "times-count": "a mean times a number of samples: a sum again",
        "times-world": "a loss times the world size",
        "divided-by-world": "a loss by the world size",
        "over-global-count": "divided by what was reduced",
    },
    # What it is proportional to. Only products and quotients pass it on: see `arithmetic`.
    "factor": {
        "world-multiple": "proportional to the number of ranks",
        "world-share": "inversely so",
    },
    # Said of this very object, and of nothing that is made of it.
    "own": {
        "drawn": "weights that each rank draws for itself",
        "some": "a list of which not every element is known",
        "open": "a dict of which not every key is known",
        "maybe": "a buffer that is there under an open condition only",
    },
}
"""Labels by what becomes of them. Besides: ``forward:N``, the result of that event; ``part:N``, of that part of a
model; ``count-of-loader``, ``count-of-dataset``, ``count-of-shard``, ...: the length of such a thing."""

LABELS: Final = {label: told for nature in NATURES.values() for label, told in nature.items()}

VARYING: Final = frozenset(NATURES["varies"])
"""Labels of what is not the same on all ranks."""

FACTORS: Final = frozenset(NATURES["factor"])

ORDERS: Final = frozenset(NATURES["order"])


def words(text: str) -> frozenset[str]:
    """The names in a text, to be looked up in.

    >>> sorted(words("sum mean"))
    ['mean', 'sum']
    """
    return frozenset(text.split())


def numbered(values: list[Value]) -> dict[str, Value]:
    """As fields of something that has them by number."""
    return {str(index): value for index, value in enumerate(values)}


class _Unknown:
    """At one rank and iteration: not known."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = _Unknown()


@dataclass(frozen=True, slots=True)
class Known:
    """What a value is exactly: one point if it is the same everywhere, one per rank, or one per rank and iteration.

    Args:
        points: in order of ranks, then of iterations.
        loop: the loop over whose iterations it changes.
        assumed: an option's default, say, which another command line may change: never decides a branch.
    """

    points: tuple[Any, ...]
    loop: int | None = None
    assumed: bool = False

    def at(self, rank: int, step: int = 0) -> Any:
        if len(self.points) == 1:
            return self.points[0]
        return self.points[rank] if self.loop is None else self.points[rank * STEPS + step]

    @property
    def only(self) -> Any:
        """What it is on every rank; `UNKNOWN` if that differs."""
        first = self.points[0]
        same = self.loop is None and all(type(p) is type(first) and p == first for p in self.points)
        return first if same else UNKNOWN


def combined(function: Callable[..., Any], *operands: Known | None) -> Known | None:
    """``function`` of the operands, point by point; what raises, or is too large, is unknown there. ``None``: known
    nowhere.

    >>> combined(lambda a, b: a + b, Known((10,)), Known((0, 1))).points
    (10, 11)
    """
    known = [operand for operand in operands if operand is not None]
    loops = {operand.loop for operand in known if operand.loop is not None}
    if len(known) != len(operands) or len(loops) > 1:
        return None
    loop = next(iter(loops), None)
    size = RANKS * STEPS if loop is not None else max((len(operand.points) for operand in known), default=1)
    places = [(index // STEPS, index % STEPS) if loop is not None else (index, 0) for index in range(size)]
    points = tuple(_applied(function, [operand.at(*place) for operand in known]) for place in places)
    if all(point is UNKNOWN for point in points):
        return None
    return Known(points, loop, any(operand.assumed for operand in known))


def _applied(function: Callable[..., Any], arguments: list[Any]) -> Any:
    if any(argument is UNKNOWN for argument in arguments) or not _is_small(arguments):
        return UNKNOWN
    try:
        result = function(*arguments)
    except Exception:
        return UNKNOWN
    return result if _is_small([result]) else UNKNOWN


_INTEGER, _TEXT, _PARTS = 2**64, 4096, 512
"""No count, seed or path of a training script is longer; a script that squares a number in a loop may be read too."""


def _is_small(values: list[Any]) -> bool:
    """Whether these take little memory and time, with all that tuples among them hold."""
    left, stack = _PARTS, list(values)
    while stack:
        value, left = stack.pop(), left - 1
        if left < 0:
            return False
        if isinstance(value, int):
            if abs(value) >= _INTEGER:
                return False
        elif isinstance(value, str | bytes):
            if len(value) > _TEXT:
                return False
        elif isinstance(value, tuple | list):
            if len(value) > left:
                return False
            stack += value
    return True


@dataclass(eq=False, slots=True)
class Value:
    """Something that the script holds. Two names for one object are one `Value`.

    Args:
        kind: what it is; ``unknown`` if that cannot be read.
        labels: what went into it.
        name: of an API, class or function: its full dotted name; of what such an API made: the API's.
        known: what it is exactly.
        fields: attributes, the arguments that it was made with, and a dict's values by key; of what was chosen by a
            test: that ``test``, what it is ``if`` that holds, and ``else``; of ``x is None`` or a size: ``of`` what.
        items: the elements of a list or tuple, as far as they are known.
        options: of kind ``either``: what it may be.
        code: of a function or class of the script: where it is defined (`calls.Function`, `calls.Class`).
        length: how many elements, on each rank.
        line: where it was made, and of what can be named, in which file: ``path``.
    """

    kind: str = "unknown"
    labels: frozenset[str] = frozenset()
    name: str = ""
    known: Known | None = None
    fields: dict[str, Value] = field(default_factory=dict)
    items: list[Value] | None = None
    options: tuple[Value, ...] = ()
    code: Any = None
    length: Known | None = None
    line: int = 0
    path: str = ""

    def __repr__(self) -> str:
        told = ", ".join(str(part) for part in (self.name, self.known and self.known.points[:2], *self.labels) if part)
        return f"<{self.kind} {told}>"

    @property
    def varies(self) -> bool:
        """Whether it is not the same on all ranks."""
        return not VARYING.isdisjoint(self.labels)

    @property
    def may_vary(self) -> bool:
        """Whether it cannot be said to be the same on all ranks: it varies, or some part of it does."""
        return self.varies or "partly" in self.labels

    @property
    def is_none(self) -> bool:
        return self.only is None

    @property
    def only(self) -> Any:
        """What it is exactly, everywhere and for certain; else `UNKNOWN`."""
        return self.known.only if self.known is not None and not self.known.assumed else UNKNOWN

    @property
    def default(self) -> Any:
        """As `only`, or what it is by default."""
        return self.known.only if self.known is not None else UNKNOWN

    def each(self) -> Iterator[Value]:
        """What it may be, without ``None``; itself, if that is one thing."""
        yield from (option for option in self.options if not option.is_none) if self.options else (self,)

    def of_kind(self, *kinds: str) -> Value | None:
        """It, or what it may be, if that is of one of these kinds."""
        return next((option for option in self.each() if option.kind in kinds), None)

    def truth(self, rank: int) -> bool | None:
        """Whether it counts as true on that rank; ``None``: not known."""
        if self.known is not None and self.known.assumed and self.known.only is not UNKNOWN:
            return None
        if self.known is not None:
            points = self.known.points if self.known.loop is None else (UNKNOWN,)
            point = points[rank if len(points) > 1 else 0]
            return None if point is UNKNOWN else bool(point)
        if self.options:
            truths = {option.truth(rank) for option in self.options}
            return truths.pop() if len(truths) == 1 else None
        return True if self.kind in TRUE else None

    def decided(self) -> bool | None:
        """As `truth`, on every rank and whatever the command line."""
        if self.known is not None and self.known.assumed:
            return None
        truths = {self.truth(rank) for rank in range(RANKS)}
        return truths.pop() if len(truths) == 1 else None


TRUE: Final = words(
    "module ddp optimizer scheduler scaler sampler loader function class instance device group generator parser "
    "namespace context python_module"
)


def constant(value: Any, labels: Iterable[str] = ()) -> Value:
    """A value that is the same on all ranks."""
    return Value("scalar", frozenset(labels), known=Known((value,)))


NONE: Final = constant(None)
