"""Faults scripted in a sentence, so that losing a worker can be rehearsed on one's own job.

``kill worker=1 step=3; stop worker=0 step=7``: statements between ``;`` or line ends, each an action and then
``key=value``. What happens is real: a signal that the worker sends to itself, or code that does not return.

Actions:
    kill        SIGKILL, as from the kernel when memory runs out
    stop        SIGSTOP: it is there and does nothing
    crash       SIGSEGV, as from a bug in C code
    term        SIGTERM, as from a cluster that wants its machine back
    usr1        SIGUSR1, as from Slurm's ``--signal``
    interrupt   SIGINT, as from Ctrl-C
    hang        a loop in Python that never ends
    spin        a call of C code that never returns and holds the interpreter's lock, so that no thread goes on
    raise       RuntimeError

Keys:
    worker=N    the worker with this rank at that moment
    step=N      counted from 1; at ``evaluate`` and ``save``, and where it may be left out: that step or a later one
    at=PLACE    default ``step``
    lane=N      at ``step`` and ``evaluate``: when the worker begins this lane, not its first one
    times=N     how often; default 1

Places:
    step        the worker begins its first micro-batch of the step
    exchange    its backward passes are done, the exchange of gradients is under way
    update      just before the optimizers' update
    body        after the step, in the body of the loop
    evaluate    the first micro-batch of an evaluation
    save        while a checkpoint is written
    reform      after a loss, between meeting the others and connecting anew (here and below step may be left out)
    copy        while it sends state to another worker, or receives it
    join        it is a replacement, about to be admitted

>>> faults = Faults.parse("kill worker=1 step=3; stop worker=0 step=7 at=update")
>>> faults == Faults().kill(worker=1, step=3).stop(worker=0, step=7, at="update")
True
>>> str(faults)
'kill worker=1 step=3; stop worker=0 step=7 at=update'
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, Required, TypedDict, Unpack, get_args

from paceline.errors import ConfigError, did_you_mean

__all__ = ["Action", "Fault", "Faults", "Place"]

Action = Literal["kill", "stop", "crash", "term", "usr1", "interrupt", "hang", "spin", "raise"]
Place = Literal["step", "exchange", "update", "body", "evaluate", "save", "reform", "copy", "join"]

_FROM_THAT_STEP_ON = {"evaluate", "save", "reform", "copy", "join"}
_WITHOUT_A_STEP = {"reform", "copy", "join"}
_WITH_LANES = {"step", "evaluate"}
_RANGES = {"worker": range(10**6), "step": range(1, 10**12), "lane": range(10**6), "times": range(1, 1001)}
_KEYS = ("worker", "step", "lane", "at", "times")
_EXAMPLE = "kill worker=1 step=3"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One statement; checked when made. The module's tables say what its parts mean.

    Raises:
        ConfigError: parts that do not go together.

    >>> str(Fault(action="kill", worker=1, step=3, times=2))
    'kill worker=1 step=3 times=2'
    """

    action: Action
    worker: int
    step: int | None = None
    lane: int | None = None
    at: Place = "step"
    times: int = 1

    def __post_init__(self) -> None:
        for name, value, known in (("action", self.action, get_args(Action)), ("place", self.at, get_args(Place))):
            if value not in known:
                raise _error(f"an unknown {name} {value!r}", "a known one", did_you_mean(str(value), known))
        for name, possible in _RANGES.items():
            value = getattr(self, name)
            may_lack = value is None and name in ("step", "lane")
            if not may_lack and (type(value) is not int or value not in possible):
                raise _not_whole(name, value)
        if self.step is None and self.at not in _WITHOUT_A_STEP:
            raise _error(
                f"no step in {str(self)!r}",
                "step=N, counted from 1, unless at=reform, at=copy or at=join",
                "Write, for example, " + _EXAMPLE,
            )
        if self.lane is not None and self.at not in _WITH_LANES:
            raise _error(
                f"a lane at={self.at} in {str(self)!r}",
                "lane=N only with at=step, which is the default, or at=evaluate",
                f"Leave out lane={self.lane}",
            )

    def __str__(self) -> str:
        given = {"worker": self.worker, "step": self.step, "lane": self.lane}
        words = [self.action, *(f"{key}={value}" for key, value in given.items() if value is not None)]
        words += [f"at={self.at}"] * (self.at != "step") + [f"times={self.times}"] * (self.times != 1)
        return " ".join(words)

    def matches(self, place: str, worker: int, step: int | None, lane: int | None) -> bool:
        """Whether this is its moment."""
        if place != self.at or worker != self.worker or (self.lane is not None and lane != self.lane):
            return False
        if self.step is None or step == self.step:
            return True
        return self.at in _FROM_THAT_STEP_ON and step is not None and step > self.step


class _Where(TypedDict, total=False):
    worker: Required[int]
    step: int
    lane: int
    at: Place
    times: int


@dataclass(frozen=True)
class Faults:
    """What shall go wrong, and when; ``str`` of it is the sentence.

    Made by `parse`, or by a call for each action, which returns the faults with one more. An *execution* setting: no
    bit of a result may depend on it.

    >>> Faults().kill(worker=1, step=3).unfired(Path("nowhere"))
    ['kill worker=1 step=3']
    """

    statements: tuple[Fault, ...] = ()
    _fired: dict[str, object] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def parse(cls, text: str | None) -> Faults:
        """Reads a sentence; ``None``: no faults.

        Raises:
            ConfigError: for every mistake in it.
        """
        if text is None:
            return cls()
        statements = [words for statement in re.split(r"[;\n]", text) if (words := statement.split())]
        if not statements:
            raise _error("an empty text", "one or more statements", f"Write, for example, {_EXAMPLE}, or leave it out")
        return cls(tuple(_read(words) for words in statements))

    def __str__(self) -> str:
        return "; ".join(map(str, self.statements))

    def kill(self, **where: Unpack[_Where]) -> Faults:
        """With one SIGKILL more."""
        return self._with("kill", where)

    def stop(self, **where: Unpack[_Where]) -> Faults:
        """With one SIGSTOP more."""
        return self._with("stop", where)

    def crash(self, **where: Unpack[_Where]) -> Faults:
        """With one SIGSEGV more."""
        return self._with("crash", where)

    def term(self, **where: Unpack[_Where]) -> Faults:
        """With one SIGTERM more."""
        return self._with("term", where)

    def usr1(self, **where: Unpack[_Where]) -> Faults:
        """With one SIGUSR1 more."""
        return self._with("usr1", where)

    def interrupt(self, **where: Unpack[_Where]) -> Faults:
        """With one SIGINT more."""
        return self._with("interrupt", where)

    def hang(self, **where: Unpack[_Where]) -> Faults:
        """With one endless loop in Python more."""
        return self._with("hang", where)

    def spin(self, **where: Unpack[_Where]) -> Faults:
        """With one endless call in C more."""
        return self._with("spin", where)

    def raise_(self, **where: Unpack[_Where]) -> Faults:
        """With one RuntimeError more."""
        return self._with("raise", where)

    def _with(self, action: Action, where: _Where) -> Faults:
        return Faults((*self.statements, Fault(action=action, **where)))

    def fire(
        self, place: Place, *, worker: int, step: int | None = None, lane: int | None = None, once: Path | None
    ) -> None:
        """Does what is due at this moment of this worker, unless it was done before. Cheap when nothing is.

        Args:
            place: where the caller is; the module's table has them.
            worker: its rank now.
            step: that is at work, or was finished last in the body, an evaluation, or a save; counted from 1.
            lane: whose micro-batch begins.
            once: directory in which a file marks what was done, before it is done: a step that is redone, or a process
                that is started again, does not meet the fault again. ``None``: this object remembers.

        Raises:
            RuntimeError: for the action ``raise``.
        """
        if not self.statements:
            return
        for number, fault in enumerate(self.statements, start=1):
            if fault.matches(place, worker, step, lane) and self._claim(number, fault, once):
                _ACTIONS[fault.action](fault)

    def unfired(self, once: Path) -> list[str]:
        """The statements that have not been done as often as asked, by the marks in ``once``."""
        return [
            str(fault)
            for number, fault in enumerate(self.statements, start=1)
            if not all((once / mark).exists() for mark in _marks(number, fault))
        ]

    @property
    def workers(self) -> int:
        """The fewest workers of a run in which there is one for each statement; 0 without statements."""
        return max((fault.worker + 1 for fault in self.statements), default=0)

    @property
    def stops(self) -> int:
        """How often they ask a run to save and stop, so that it has to be started again."""
        return sum(fault.times for fault in self.statements if fault.action in ("term", "usr1", "interrupt"))

    def check(self, *, workers: int, lanes: int, steps: int | None) -> None:
        """Raises `ConfigError` for a fault that a run of this size never meets.

        Args:
            workers: the most that the run has at any time.
            lanes: of its recipe.
            steps: how many it runs; ``None``: not known.
        """
        for fault in self.statements:
            limits = {
                "worker": (fault.worker, workers - 1),
                "lane": (fault.lane, lanes - 1),
                "step": (fault.step, steps),
            }
            for name, (value, last) in limits.items():
                if value is not None and last is not None and value > last:
                    first = 1 if name == "step" else 0
                    raise ConfigError(
                        "cannot use the faults",
                        found=f"{name}={value} in {str(fault)!r}, and no such {name} in this run",
                        needed=f"{first} <= {name} <= {last}",
                        fix=f"Use {name}={last} or below, or a run with more {name}s",
                    )

    def _claim(self, number: int, fault: Fault, once: Path | None) -> bool:
        """Whether the caller, and nobody else, shall act now."""
        claim = self._remember if once is None else lambda mark: _create(once, mark, str(fault))
        return any(claim(mark) for mark in _marks(number, fault))

    def _remember(self, mark: str) -> bool:
        me = object()
        return self._fired.setdefault(mark, me) is me


def _marks(number: int, fault: Fault) -> list[str]:
    """The file for each time that a statement is to be done.

    The statement is in the name, so that another sentence for the same run is not taken for done.
    """
    check = zlib.crc32(str(fault).encode())
    return [f"fault-{number}-{fired}-{check:08x}" for fired in range(1, fault.times + 1)]


def _create(directory: Path, mark: str, text: str) -> bool:
    """Whether the file is new. Its text is for people."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with (directory / mark).open("x", encoding="utf-8") as file:
            file.write(f"{text}\nprocess {os.getpid()}, {time.time():.6f}\n")
    except FileExistsError:
        return False
    return True


def _hang() -> NoReturn:
    while True:
        time.sleep(0.1)


def _raise(fault: Fault) -> NoReturn:
    raise RuntimeError(f"asked for by the fault {str(fault)!r}")


# What may not go on for one instruction more is sent to this very thread; what a handler answers, to the process.
_ACTIONS: Mapping[Action, Callable[[Fault], object]] = {
    "kill": lambda _: signal.raise_signal(signal.SIGKILL),
    "stop": lambda _: signal.raise_signal(signal.SIGSTOP),
    "crash": lambda _: signal.raise_signal(signal.SIGSEGV),
    "term": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "usr1": lambda _: os.kill(os.getpid(), signal.SIGUSR1),
    "interrupt": lambda _: os.kill(os.getpid(), signal.SIGINT),
    "hang": lambda _: _hang(),
    "spin": lambda _: sum(itertools.repeat(0)),  # does not even look for signals, as many a loop in C
    "raise": _raise,
}


def _read(words: Sequence[str]) -> Fault:
    action, *pairs = words
    if action not in get_args(Action):
        near = did_you_mean(action, get_args(Action))
        raise _error(f"an unknown action {action!r} in {' '.join(words)!r}", "an action, then key=value", near)
    given: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise _error(
                f"{pair!r} in {' '.join(words)!r}",
                "key=value, without spaces around =, and ; between statements",
                f"Write, for example, {_EXAMPLE}",
            )
        if key not in _KEYS:
            raise _error(f"an unknown key {key!r} in {' '.join(words)!r}", "a known one", did_you_mean(key, _KEYS))
        if key in given:
            raise _error(
                f"{key} twice in {' '.join(words)!r}", "each key once", "Write two statements, with ; between them"
            )
        if key == "at":
            given[key] = value
        elif value.isascii() and value.isdecimal() and len(value) < 20:  # CPython refuses thousands of digits
            given[key] = int(value)
        else:
            raise _not_whole(key, value)
    if "worker" not in given:
        raise _error(f"no worker in {' '.join(words)!r}", "worker=N, counted from 0", f"Write, for example, {_EXAMPLE}")
    return Fault(action=action, **given)  # type: ignore[arg-type]  # known by now


def _not_whole(key: str, value: object) -> ConfigError:
    return _error(
        f"{key}={value!s:.40}",
        f"a whole number from {_RANGES[key][0]} to {_RANGES[key][-1]}",
        f"Write, for example, {key}=1, with ; between statements",
    )


def _error(found: str, needed: str, fix: str) -> ConfigError:
    return ConfigError("cannot read the faults", found=found, needed=needed, fix=fix)
