"""Hooks around functions and methods of torch, put in from tables.

A hook is a generator function: it gets the call, does its part, yields once, gets the result, does the rest:

    def saved(call):
        number = call.recorder.tell("save", path=call["f"])
        yield
        call.recorder.done(number)

What it raises is told as a ``fault`` and goes no further, since a hook must not be noticed; but for `RefusedError`, in
place of the call. The function itself is called once, with the arguments it was given unless the hook replaces some
(`Call.put`), and returns and raises what it does.

[Note: nested calls] torch's functions call one another. Of hooks with the same `scope` only the outermost call is seen:
those inside of it are torch's own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, NamedTuple

from paceline.doctor.watching.probe.recorder import Recorder

__all__ = ["Call", "Hook", "Hooked", "install", "on_audit"]

Hook = Callable[["Call"], Generator[None, Any, None]]


class Hooked(NamedTuple):
    """A row of a table of hooks: ``Hooked("torch.utils.data", "DataLoader.__iter__", hook)``."""

    module: str
    name: str
    hook: Hook
    scope: str | None = None
    """Calls inside of others of the same scope are not seen; ``None``: each call is."""


class Call:
    """One call of a hooked function."""

    def __init__(
        self,
        recorder: Recorder,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        signature: inspect.Signature | None,
    ) -> None:
        self.recorder, self.function, self.args, self.kwargs = recorder, function, args, kwargs
        self._signature = signature
        self.error: BaseException | None = None

    def __getitem__(self, name: str) -> Any:
        """An argument by name, or its default; ``None`` when there is none of that name."""
        if name in self.kwargs:
            return self.kwargs[name]
        if self._signature is None:
            return None
        bound = self._signature.bind_partial(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.arguments.get(name)

    def put(self, **changed: Any) -> None:
        """Replaces arguments, by name."""
        assert self._signature is not None
        bound = self._signature.bind_partial(*self.args, **self.kwargs)
        bound.arguments.update(changed)
        self.args, self.kwargs = bound.args, bound.kwargs

    @property
    def owner(self) -> Any:
        """The object whose method was called."""
        return self.args[0]


_active = threading.local()


def install(recorder: Recorder, table: Iterable[Hooked]) -> None:
    """Puts hooks in. What is not there, in this version of torch, is passed over."""
    for row in table:
        try:
            owner = importlib.import_module(row.module)
            *path, name = row.name.split(".")
            for part in path:
                owner = getattr(owner, part)
            static = isinstance(inspect.getattr_static(owner, name), staticmethod)
            function = getattr(owner, name)
        except (ImportError, AttributeError):
            continue
        wrapped = _wrapped(recorder, function, row)
        setattr(owner, name, staticmethod(wrapped) if static else wrapped)


def on_audit(recorder: Recorder, *tables: Mapping[str, Callable[..., None]]) -> None:
    """From now on calls what a table has by the name of an audit event, with its arguments, before that is done. What
    is done by these calls themselves is not looked at.
    """
    actions: dict[str, list[Callable[..., None]]] = {}
    for table in tables:
        for event, action in table.items():
            actions.setdefault(event, []).append(action)
    looking = threading.local()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in actions or getattr(looking, "now", False):
            return
        looking.now = True
        try:
            for action in actions[event]:
                with recorder.unnoticed():
                    action(*arguments)
        finally:
            looking.now = False

    sys.addaudithook(hook)


def _wrapped(recorder: Recorder, function: Callable[..., Any], row: Hooked) -> Callable[..., Any]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        signature = None
    hook, scope = row.hook, row.scope

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        depths = _active.__dict__
        if scope is not None:
            if depths.get(scope):
                return function(*args, **kwargs)
            depths[scope] = True
        try:
            this = Call(recorder, function, args, kwargs, signature)
            running = hook(this)
            alive = _advance(recorder, running.__next__)
            try:
                result = function(*this.args, **this.kwargs)
            except BaseException as error:
                this.error = error
                if alive:
                    _advance(recorder, functools.partial(running.send, None))
                raise
            if alive:
                _advance(recorder, functools.partial(running.send, result))
            return result
        finally:
            if scope is not None:
                depths[scope] = False

    return call


def _advance(recorder: Recorder, step: Callable[[], Any]) -> bool:
    """Whether the hook goes on."""
    with recorder.unnoticed(), contextlib.suppress(StopIteration):
        step()
        return True
    return False
