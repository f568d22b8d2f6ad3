"""Calls: into the script's own functions and classes, and into APIs that the tables know."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from paceline.doctor.reading.arithmetic import content
from paceline.doctor.reading.builtin import builtin
from paceline.doctor.reading.containers import container_method
from paceline.doctor.reading.flows import carried, detached, doubted, joined, labels_of, picked
from paceline.doctor.reading.forwards import forward
from paceline.doctor.reading.instances import call_super, instantiate, super_of
from paceline.doctor.reading.knowledge import (
    KEPT,
    LIBRARIES,
    METHODS,
    Api,
    api,
    may_agree,
    names_a_rank,
    speaks_of_ranks,
)
from paceline.doctor.reading.lookup import bound, class_field, method_of
from paceline.doctor.reading.machine import HARD_PRESSED, READ_ENOUGH, Class, Frame, Function, Scope, Started
from paceline.doctor.reading.objects import Objects
from paceline.doctor.reading.program import Program
from paceline.doctor.reading.seeds import picks, seeded
from paceline.doctor.reading.surroundings import environment_call, parser_call, spawn
from paceline.doctor.reading.torch_calls import known_call, tensor_call, tensor_method
from paceline.doctor.reading.trace import Call
from paceline.doctor.reading.values import NONE, VARYING, Known, Value, numbered

__all__ = ["Calls", "doubted_by_name"]

MAX_FRAMES: Final = 24
_MINDED: Final = ("module", "ddp", "loader", "sampler", "optimizer", "dataset", "stream")


class Calls(Objects):
    """Calls of all kinds."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._times_read: Counter[int] = Counter()

    def call(self, function: Value, arguments: list[Value], keywords: dict[str, Value], node: ast.AST) -> Value:
        if {"test", "if", "else"} <= function.fields.keys() and function.options:
            return self._call_either(function, arguments, keywords, node)
        if function.options:
            return joined([self.call(option, arguments, keywords, node) for option in list(function.each())[:3]])
        match function.kind:
            case "function":
                return self._call_function(function, arguments, keywords, node)
            case "class":
                return instantiate(self, function, arguments, keywords, node)
            case "api":
                return self._call_api(function.name, arguments, keywords, node)
            case "module" | "ddp":
                return forward(self, function, arguments, keywords, node)
            case "bound":
                return self.call_method(function.fields["self"], function.name, arguments, keywords, node)
            case "partial":
                held, given, named = function.code
                return self.call(held, [*given, *arguments], {**named, **keywords}, node)
        if isinstance(function.code, Class) and (method := method_of(function, "__call__")) is not None:
            return self.call(bound(method, function), arguments, keywords, node)
        return self._call_unknown("", [function, *arguments], keywords, node)

    def _call_either(self, function: Value, arguments: list[Value], keywords: dict[str, Value], node: ast.AST) -> Value:
        """``log = print if rank == 0 else silent``: each is called where it was chosen."""
        found: list[Value] = []

        def arm(chosen: Value) -> Callable[[], None]:
            return lambda: found.append(NONE if chosen.is_none else self.call(chosen, arguments, keywords, node))

        test = function.fields["test"]
        self.branch(test, node, (arm(function.fields["if"]), arm(function.fields["else"])))
        return found[0] if len(found) == 1 else picked(test, found[0], found[1])

    def call_method(
        self, receiver: Value, name: str, arguments: list[Value], keywords: dict[str, Value], node: ast.AST
    ) -> Value:
        if receiver.options:
            found = [self.call_method(option, name, arguments, keywords, node) for option in list(receiver.each())[:4]]
            return joined(found) if found else Value()
        if receiver.kind in ("api", "python_module") or (receiver.kind == "class" and receiver.code is not None):
            return self.call(self.attribute(receiver, name, node), arguments, keywords, node)
        if receiver.kind == "super":
            return call_super(self, receiver, name, arguments, keywords, node)
        own = receiver.fields.get(name, Value())
        is_itself = own.kind == "bound" and own.name == name and own.fields["self"] is receiver
        if own.kind != "unknown" and not is_itself:
            return self.call(self.attribute(receiver, name, node), arguments, keywords, node)
        if (method := method_of(receiver, name)) is not None:
            if receiver.kind == "module" and name == "forward":
                return forward(self, receiver, arguments, keywords, node)
            code: Function = method.code
            owner = receiver.fields.get("__class__", receiver) if code.flavour == "class" else receiver
            return self.call(method if code.flavour == "static" else bound(method, owner), arguments, keywords, node)
        if isinstance(receiver.code, Class) and (held := class_field(receiver, name)) is not None:
            return self.call(held, arguments, keywords, node)
        if (known := METHODS.get(receiver.kind, {}).get(name)) is not None:
            return self.known_method(receiver, name, known, arguments, keywords, node)
        if (made := container_method(self, receiver, name, arguments, keywords)) is not None:
            return made
        return self._other_method(receiver, name, arguments, keywords, node)

    def known_method(
        self,
        receiver: Value,
        name: str,
        known: Api,
        arguments: list[Value],
        keywords: dict[str, Value],
        node: ast.AST,
    ) -> Value:
        given = {**dict(zip(known.parameters, arguments, strict=False)), **keywords}
        result = Value(known.makes or "unknown", receiver.labels & VARYING, name, fields={"owner": receiver})
        match known.makes:
            case "self":
                result = receiver
            case "first":
                result = arguments[0] if arguments else Value()
            case "tensor":
                result = replace(receiver)
                if name == "detach":
                    result = Value("tensor", detached(receiver.labels), length=receiver.length)
            case "context":
                result = Value("context", name=name, fields={"owner": receiver})
            case "module" | "optimizer":
                result = Value(known.makes)
        if receiver.kind == "module" and known.makes in ("modules", "parameters", "state_dict"):
            for field in receiver.fields:
                self.on_read(receiver, field)
        if name == "register_buffer" and isinstance(buffer := given.get("name", NONE).only, str):
            maybe = {"maybe"} if any(condition.ranks == {0, 1} for condition in self.conditions()) else set()
            labels = labels_of([given.get("tensor", NONE)]) - VARYING  # DDP makes them equal
            result = Value("buffer", labels | maybe, buffer)
            self.write(receiver.fields, buffer, result)
        elif name in ("register_parameter", "add_module", "append") and given:
            held = list(given.values())
            key = held[0].only if len(held) > 1 else len(receiver.fields)
            self.write(receiver.fields, str(key), held[-1])
        elif name == "apply" and arguments and arguments[0].kind == "function":
            self.call(arguments[0], [Value("module")], {}, node)
        elif receiver.kind == "generator" and name == "manual_seed":
            receiver.labels |= seeded(labels_of(given.values()))
        elif name == "backward" and "graph" not in receiver.labels and receiver.kind == "tensor":
            receiver.labels |= {"graph"}
        if known.role == "backward":
            self._backward(receiver, given, node)
        elif known.role:
            self.event(known.role, node, name=name, subject=receiver, arguments=given, result=result)
        return result

    def _backward(self, loss: Value, given: dict[str, Value], node: ast.AST) -> None:
        event = self.event("backward", node, subject=loss, arguments=given)
        if not given.get("gradient", NONE).is_none:
            event.labels |= {"divided"}  # scaled there, by who knows what

    def _other_method(
        self, receiver: Value, name: str, arguments: list[Value], keywords: dict[str, Value], node: ast.AST
    ) -> Value:
        given = {**numbered(arguments), **keywords}
        if receiver.kind == "parser":
            return parser_call(receiver, name, arguments, keywords)
        if name == "backward":
            self._backward(receiver, {**dict(zip(("gradient",), arguments, strict=False)), **keywords}, node)
        elif name in ("cuda", "to"):
            result = Value(receiver.kind, receiver.labels, receiver.name, fields=receiver.fields, items=receiver.items)
            role = "cuda" if name == "cuda" else "place"
            self.event(role, node, subject=receiver, arguments={"device": arguments[0]} if arguments else given)
            return result
        elif name == "set_epoch":
            self.event("set_epoch", node, subject=receiver, arguments={"epoch": arguments[0]} if arguments else given)
        elif name in ("glob", "iterdir", "rglob") and receiver.kind != "tensor":
            return Value("list", receiver.labels | {"listing", "some"}, items=[Value("path")])
        elif name in ("write_text", "write_bytes") and receiver.kind == "path" and given:
            written = {"obj": next(iter(given.values())), "f": receiver}
            self.event("save", node, name=name, subject=receiver, arguments=written)
        elif name == "save_pretrained":
            self.event(
                "save",
                node,
                name=name,
                subject=receiver,
                arguments={"obj": receiver, "f": next(iter(given.values()), NONE)},
            )
        elif name in ("shuffle",) and arguments and receiver.kind == "generator":
            arguments[0].labels |= receiver.labels & VARYING | {"shuffled"}
        if receiver.kind == "generator":
            labels = receiver.labels & VARYING | labels_of(arguments)
            return picks(name, labels) or Value("unknown", labels)
        if receiver.kind in ("unknown", "instance") and receiver.name.split(".")[0] not in LIBRARIES:
            _escape(given.values())
        if receiver.kind in ("optimizer", "loader", "sampler", "module", "ddp", "unknown", "instance"):
            self._call_back(arguments, keywords, node)
        made = tensor_method(self, receiver, name, arguments, keywords, node)
        if receiver.kind in ("unknown", "instance", "api") and may_agree(name):
            made.labels = doubted(made.labels) - {"shard"}
        return made

    # --- APIs

    def _call_api(self, name: str, arguments: list[Value], keywords: dict[str, Value], node: ast.AST) -> Value:
        if name == "builtins.super":
            return Value("super", fields=super_of(self, arguments))
        if name in KEPT and arguments:
            return arguments[0]
        if name == "functools.wraps":  # what it is given lends its name only
            return Value()
        if name == "functools.partial" and arguments:
            return Value("partial", labels_of(arguments), code=(arguments[0], arguments[1:], keywords))
        if name.startswith(("os.environ", "os.getenv", "os.putenv")):
            return environment_call(self, name, arguments, keywords, node)
        if name.startswith("sys.path.") and arguments:
            self._search_also(name, arguments)
            return NONE
        if name in ("argparse.Namespace", "types.SimpleNamespace"):
            return Value("namespace", fields=dict(keywords))
        if (known := api(name)) is not None:
            given = {**dict(zip(known.parameters, arguments, strict=False)), **keywords}
            for index, extra in enumerate(arguments[len(known.parameters) :]):
                given[f"*{index}"] = extra
            made = builtin(self, name, arguments, keywords, node)
            if made is None:
                made = known_call(self, name, known, given, arguments, node)
                if known.role in ("spawn", "process"):
                    spawn(self, known.role, given, node)
            elif known.role:
                self.event(known.role, node, name=name, arguments=given, result=made)
            return made
        if (made := builtin(self, name, arguments, keywords, node)) is not None:
            return made
        return self._call_unknown(name, arguments, keywords, node)

    def _search_also(self, name: str, arguments: list[Value]) -> None:
        """``sys.path.insert(0, ...)``: imports find what lies there, if that can be read."""
        given = arguments[-1].items if name == "sys.path.extend" and arguments[-1].items else arguments[-1:]
        for folder in given:
            if isinstance(path := folder.default, str):
                self.program.search(Path(path), first=name == "sys.path.insert")

    def _call_unknown(self, name: str, arguments: list[Value], keywords: dict[str, Value], node: ast.AST) -> Value:
        top = name.split(".")[0]
        if top in ("torch", "numpy"):
            last = name.rpartition(".")[2]
            if top == "torch" and last[:1].islower():
                self._call_back(arguments, keywords, node)
            return tensor_call(self, name, arguments, keywords, node)
        if top == "random":
            return tensor_call(self, name, arguments, keywords, node)
        given = [*arguments, *keywords.values()]
        if top not in LIBRARIES:
            self.unknown_calls += 1
            _escape(given)
        self._call_back(arguments, keywords, node)
        if keywords.get("download") is not None:
            self.event("dataset", node, name=name, arguments=keywords)
        if "seed" in name.rpartition(".")[2].lower():
            self.seeds.update(
                dict.fromkeys(self.seeds, frozenset())
            )  # by whatever it does with what it is given: nothing can be said of them
        last = name.rpartition(".")[2]
        labels = carried(content(arguments, keywords)) | speaks_of_ranks(last)
        labels = doubted(labels) - {"shard"} if may_agree(last) else labels
        return Value("path" if name.startswith(("pathlib.", "os.path.")) else "unknown", labels, name)

    def _call_back(self, arguments: list[Value], keywords: dict[str, Value], node: ast.AST) -> None:
        """Functions handed to somebody else are called by it, with who knows what; ``atexit.register(destroy)``."""
        for value in [*arguments, *keywords.values()]:
            if value.kind == "function" and len(self.frames) < 8:
                self._call_function(value, [], {}, node, unknown=True)
            elif value.kind == "api" and value.name == "torch.distributed.destroy_process_group":
                self.event("destroy", node, name=value.name)

    # --- the script's functions and classes

    def _call_function(
        self,
        function: Value,
        arguments: list[Value],
        keywords: dict[str, Value],
        node: ast.AST,
        *,
        unknown: bool = False,
    ) -> Value:
        code: Function = function.code
        running = sum(frame.code is code.node for frame in self.frames)
        self._times_read[id(code.node)] += 1
        if self._is_read_enough(code.node):
            self.trace.whole = False
            return Value(labels=carried([*arguments, *keywords.values()]))
        if len(self.frames) >= MAX_FRAMES or running >= 2 or not self.spend():
            return Value(labels=carried([*arguments, *keywords.values()]))
        if code.owner is not None and code.flavour != "static":
            arguments = [code.owner, *arguments]
        names = _bound_parameters(code, arguments, keywords, unknown=unknown)
        scope = Scope(names, code.scope.module, code.scope)
        if code.yields:
            labels = carried([*arguments, *keywords.values()])
            return Value("lazy", labels, function.name, code=Started(code, scope, tuple(self.loops)))
        call = Call(self.path, node, code.owner)
        return self._run(code, scope, call=call)[0]

    def _is_read_enough(self, node: ast.AST) -> bool:
        """Whether a function has been read often, and there is little time left."""
        return self._times_read[id(node)] > READ_ENOUGH and self.is_short(HARD_PRESSED)

    def _run(
        self,
        code: Function,
        scope: Scope,
        on_yield: Callable[[Value], None] | None = None,
        call: Call | None = None,
    ) -> tuple[Value, list[Value]]:
        """Walks a function's body; what it returns, and what it yields."""
        frame = Frame(scope, code.node, depth=len(self.levels), on_yield=on_yield, call=call)
        self.frames.append(frame)
        if code.ranks is not None:
            only = Value("scalar", frozenset({"rank", "global_rank"}), known=code.ranks)
            frame.level.append(self.condition(only, True, code.node))
        self.levels.append(frame.level)
        self.within += code.contexts
        try:
            if isinstance(code.node, ast.Lambda):
                return self.evaluate(code.node.body), []
            self.execute(code.node.body)
            return _returned(frame), frame.yielded
        finally:
            del self.within[len(self.within) - len(code.contexts) :]
            self.levels.pop()
            self.frames.pop()

    def run_lazily(self, value: Value, node: ast.AST) -> Value:
        if not isinstance(value.code, Started):
            return Value(labels=value.labels)
        code = value.code.function
        if sum(frame.code is code.node for frame in self.frames) >= 2 or len(self.frames) >= MAX_FRAMES:
            return Value(labels=value.labels)
        outer = self.loops
        self.loops = list(value.code.loops)  # it goes on where it stopped, however often it is asked
        try:
            _, yielded = self._run(code, value.code.fresh())
        finally:
            self.loops = outer
        return joined(yielded) if yielded else Value(labels=value.labels)


def _escape(values: Iterable[Value]) -> None:
    """Somebody who is not known has these now, and may do anything to them."""
    for value in values:
        for option in value.each():
            if option.kind in _MINDED:
                option.labels |= {"escaped"}


def doubted_by_name(name: str, value: Value) -> Value:
    """What a variable holds of which only its name tells that it may differ between ranks; else the value itself."""
    unclear = value.kind == "unknown" and value.known is None and not value.labels & {"rank", "partly"}
    return Value(labels=value.labels | {"partly"}, name=value.name) if unclear and names_a_rank(name) else value


def _bound_parameters(
    code: Function, arguments: list[Value], keywords: dict[str, Value], *, unknown: bool
) -> dict[str, Value]:
    parameters = code.node.args
    positional = [parameter.arg for parameter in (*parameters.posonlyargs, *parameters.args)]
    names = dict(zip(positional, arguments, strict=False))
    rest = dict(keywords)
    for name in (*positional, *(parameter.arg for parameter in parameters.kwonlyargs)):
        if name in rest:
            names[name] = rest.pop(name)
        elif name not in names:
            names[name] = Value() if unknown else code.defaults.get(name) or Value(labels=labels_of(rest.values()))
    names = {name: doubted_by_name(name, value) for name, value in names.items()}
    if parameters.vararg is not None:
        extra = arguments[len(positional) :]
        names[parameters.vararg.arg] = Value("tuple", items=extra, length=Known((len(extra),)))
    if parameters.kwarg is not None:
        names[parameters.kwarg.arg] = Value("dict", frozenset({"open"}) if unknown else frozenset(), fields=rest)
    if code.home is not None:
        names.setdefault("__class__", code.home)
    return names


def _returned(frame: Frame) -> Value:
    """One value for all that a function may return, each under its own conditions."""
    if not frame.returns:
        return NONE
    own = frame.returns
    if len(own) == 1:
        return own[0][0]
    result, _ = own[-1]
    for value, conditions in reversed(own[:-1]):
        deciding = [condition for condition in conditions if condition.value.labels or condition.value.known]
        if not deciding:
            result = joined((value, result))
            continue
        last = deciding[-1]
        result = picked(last.value, value, result) if last.holds else picked(last.value, result, value)
    return result
