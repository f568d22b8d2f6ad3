"""What calls into torch do to values: what a loader gives, what a collective makes the same, what a forward leaves."""

from __future__ import annotations

import ast
import operator
from dataclasses import replace
from typing import Final

from paceline.doctor.reading.builtin import Builtins
from paceline.doctor.reading.flows import carried, detached, joined, labels_of, part_labels
from paceline.doctor.reading.knowledge import MEAN_LOSSES, Api, speaks_of_ranks
from paceline.doctor.reading.meaning import TENSORS, Calculation, calculated, computed, content, named
from paceline.doctor.reading.objects import bound, method_of, submodules
from paceline.doctor.reading.values import (
    NONE,
    ORDERS,
    RANKS,
    UNKNOWN,
    VARYING,
    Known,
    Value,
    combined,
    constant,
    words,
)

__all__ = ["Effects", "numbered", "picks", "seeded"]

_DRAWS: Final = words(
    "rand randn randint randperm normal bernoulli multinomial rand_like randn_like randint_like poisson"
)
_COPIED: Final = words("module ddp parameter buffer list tuple dict namespace instance")
_FILLED: Final = ("tensor", "tensors", "tensor_list", "output_tensor", "object_list", "output", "gather_list")
"""Of collectives: what holds the same on all ranks afterwards."""
_SIZED: Final = _DRAWS | words("zeros ones empty full")
_DRAWS_INTO: Final = words("uniform_ normal_ bernoulli_ random_ exponential_ log_normal_ cauchy_ geometric_")
_FIXED: Final = words("zeros_ ones_ constant_ eye_ dirac_")
_ELEMENTWISE: Final = words(
    "clone detach float double half bfloat16 long int bool cpu contiguous type_as square abs neg sqrt exp log sin cos "
    "tan tanh relu sigmoid sign floor ceil round clamp clip masked_fill logical_not softmax log_softmax pin_memory"
)
_BY_DIMENSION: Final = words(
    "sum mean prod std var norm max min amax amin argmax argmin all any unsqueeze squeeze flip flatten cumsum sort "
    "argsort topk softmax log_softmax"
)
"""As long as before, along any dimension but the first."""


class Effects(Builtins):
    """What known APIs give."""

    def forward(self, module: Value, arguments: list[Value], keywords: dict[str, Value], node: ast.AST) -> Value:
        """Calls a module. Its result carries which call it came from, to be found again in a loss."""
        if module.name.rpartition(".")[2] in MEAN_LOSSES:
            return self._loss(module.fields, [*arguments, *keywords.values()])
        if not self.spend():
            return Value("tensor", labels_of([*arguments, *keywords.values()]))
        event = self.event("forward", node, subject=module, arguments={**numbered(arguments), **keywords})
        graph = frozenset({"graph"}) if event.with_grad else frozenset({"eval"})
        labels = labels_of([*arguments, *keywords.values()]) | graph
        if not self.inside:
            labels |= {f"forward:{event.number}"}
            self.forward_from = len(event.under)
        elif len(self.inside) == 2:  # a part of what DDP wraps
            labels |= {f"part:{self.trace.identity(module)}"}
        self.inside.append(module)
        try:
            result = self._run_forward(module, arguments, keywords, node)
        finally:
            self.inside.pop()
        if result is None:
            result = Value("tensor", length=arguments[0].length if arguments else None)
        event.result = relabelled(result, labels, without=frozenset({"divided", "sum", "count", "own-mean"}))
        return event.result

    def _run_forward(
        self, module: Value, arguments: list[Value], keywords: dict[str, Value], node: ast.AST
    ) -> Value | None:
        if module.kind == "ddp":
            inner = module.fields.get("module", Value("module"))
            return self.forward(inner.of_kind("module", "ddp") or Value("module"), arguments, keywords, node)
        if (method := method_of(module, "forward")) is not None:
            return self.call(bound(method, module), arguments, keywords, node)
        if module.name == "torch.nn.Sequential":
            result = arguments[0] if arguments else Value("tensor")
            for part in submodules(module):
                result = self.forward(part, [result], {}, node)
            return result
        return None

    def _loss(self, options: dict[str, Value], parts: list[Value]) -> Value:
        reduction, ignores = options.get("reduction"), "ignore_index" in options
        how = reduction.only if reduction is not None else "mean"
        labels = labels_of(parts) - {"sum", "mean"}
        if how in ("mean", "sum"):
            labels |= {how}
        if how == "mean" and ignores:
            labels |= {"mean-of-some"}
        return Value("tensor", labels)

    def batch(self, loader: Value, node: ast.AST) -> Value:
        """What a loader gives; the same on all ranks if nothing shards or shuffles it differently."""
        dataset = loader.fields.get("dataset", Value())
        given = [loader.fields[name] for name in ("sampler", "batch_sampler") if name in loader.fields]
        samplers = [s for value in given if (s := value.of_kind("sampler", "unknown", "instance")) is not None]
        labels = set(labels_of((dataset,)) & VARYING)
        if is_sharded(samplers) or "rank" in labels:
            labels |= {"data", "shard"}
        elif samplers or dataset.kind == "unknown":
            labels |= {"data"}
        shuffle = loader.fields.get("shuffle")
        if shuffle is not None and shuffle.default is not False and self.seeds.get("torch"):
            labels |= {"data"}
        if "shard" not in labels and dataset.kind == "stream":
            labels |= labels_of([self._drawn(dataset, "__iter__", [], node)]) & (VARYING | {"shard"})
        labels |= self._dataset_labels(dataset, node)
        made = Value("batch", frozenset(labels))
        drawn = [self._indices(sampler, node) for sampler in samplers]
        self.event("batch", node, subject=loader, arguments=numbered(drawn), result=made)
        return made

    def _dataset_labels(self, dataset: Value, node: ast.AST) -> frozenset[str]:
        """Of what it reads for one sample: a dataset may shard itself."""
        return labels_of([self._drawn(dataset, "__getitem__", [Value()], node)]) & {"rank"}

    def _indices(self, sampler: Value, node: ast.AST) -> Value:
        """What a sampler of the script's own gives; ``escaped`` if something went into it of which nothing is known."""
        before = self.unknown_calls
        indices = self._drawn(sampler, "__iter__", [], node)
        return indices if self.unknown_calls == before else Value(labels=indices.labels | {"escaped"})

    def _drawn(self, dataset: Value, name: str, arguments: list[Value], node: ast.AST) -> Value:
        method = method_of(dataset, name)
        if method is None:
            return Value()
        mark = len(self.trace.events)
        made = self.call(bound(method, dataset), arguments, {}, node)
        if made.kind == "lazy":
            made = self.run_lazily(made, node)
        del self.trace.events[mark:]  # in the loader's workers, not here
        return made

    # --- APIs by name

    def known_call(
        self, name: str, known: Api, arguments: dict[str, Value], positional: list[Value], node: ast.AST
    ) -> Value:
        """A call of which the tables know something."""
        labels = labels_of(content((), arguments))
        if known.role == "checkpoint" and positional:
            self.event(known.role, node, name=name, arguments=arguments)
            return self.call(positional[0], positional[1:], {}, node)
        result = self._made(name, known, arguments, positional, labels)
        result.line = result.line or getattr(node, "lineno", 0)
        if known.role:
            self.event(known.role, node, name=name, arguments=arguments, result=result)
        if known.role == "scheduler" and (curve := arguments.get("lr_lambda")) is not None and curve.kind == "function":
            arguments["rates"] = self.call(curve, [Value()], {}, node)
        elif known.role == "loader":
            self._seed_workers(arguments)
        elif known.role == "collective":
            self._agree(name, arguments)
        elif known.role == "seed":
            self._seed(name, next(iter(arguments.values()), NONE))
        elif known.role == "shuffle" and positional:
            stream = "numpy" if name.startswith("numpy") else "python"
            positional[0].labels |= self.seeds.get(stream, frozenset()) | {"shuffled"}
        return result

    def _made(
        self, name: str, known: Api, arguments: dict[str, Value], positional: list[Value], labels: frozenset[str]
    ) -> Value:
        match name:
            case "torch.distributed.get_rank" if not arguments.get("group", NONE).is_none:
                return Value("unknown", frozenset({"rank"}))
            case "torch.distributed.get_rank":
                return Value("scalar", frozenset({"rank", "global_rank"}), known=Known((0, 1)))
            case "torch.distributed.get_world_size":
                return Value("scalar", frozenset({"world", "world-multiple"}), "world size", Known((RANKS,)))
            case "torch.distributed.is_initialized":
                return constant(self.trace.any("init") or self.spawned)
            case "torch.distributed.is_available":
                return constant(True)
            case "torch.cuda.is_available":
                return self.overrides.setdefault("has cuda", Value("unknown", name=name))
            case "torch.cuda.device_count":
                return Value("unknown", frozenset({"devices"}), name)
            case "torch.initial_seed" | "torch.utils.data.get_worker_info":
                return Value("unknown", frozenset({"worker-seed"}), name)
            case "torch.nn.Sequential":
                return self._module(name, numbered(positional))
            case "torch.nn.ModuleList" | "torch.nn.ModuleDict":
                held = arguments.get("modules", Value())
                fields = dict(held.fields) if held.items is None else numbered(held.items)
                module = self._module(name, fields)
                module.length, module.labels = held.length, module.labels | (held.labels & {"some", "open"})
                return module
            case "copy.deepcopy":
                return _copied(arguments.get("x", Value()), {})
            case "copy.copy":
                value = arguments.get("x", Value())
                return replace(value, fields=dict(value.fields))
            case "torch.utils.data.random_split" | "sklearn.model_selection.train_test_split":
                return self._split(name, arguments)
            case "torch.set_grad_enabled":
                return Value("context", name="no_grad" if arguments.get("mode", NONE).only is False else "grad_mode")
        if known.makes == "first":
            return next(iter(arguments.values()), Value())
        if known.makes == "context":
            short = {"no_grad": "no_grad", "inference_mode": "no_grad", "Join": "join"}
            last = name.rpartition(".")[2]
            return Value("context", name=short.get(last, last), fields=dict(arguments))
        if known.makes == "module":
            return self._module(name, dict(arguments))
        if known.makes == "generator":
            unseeded = not arguments and not name.startswith("torch")
            return Value("generator", frozenset({"rng"}) if unseeded else seeded(labels), name)
        if known.makes in ("dataset", "sampler", "loader"):
            length = self._length(name, arguments, positional)
            return Value(
                known.makes,
                labels & (VARYING | ORDERS),
                name,
                fields=dict(arguments),
                length=length,
            )
        if known.makes == "parameter":
            return Value("parameter", frozenset({"drawn"}) if labels & VARYING else frozenset(), fields=dict(arguments))
        if not known.makes:
            return Value("unknown", labels, name, fields=dict(arguments))
        return Value(known.makes, labels & VARYING, name, fields=dict(arguments))

    def _module(self, name: str, fields: dict[str, Value]) -> Value:
        return Value("module", self.drawn(), name, fields=fields)

    def drawn(self) -> frozenset[str]:
        """Of weights that are drawn now. DDP makes them equal, so that the model itself does not differ."""
        return frozenset({"drawn"}) if self.seeds.get("torch") else frozenset()

    def _length(self, name: str, arguments: dict[str, Value], positional: list[Value]) -> Known | None:
        first = positional[0].length if positional else None
        match name:
            case "torch.utils.data.TensorDataset":
                return first
            case "torch.utils.data.Subset":
                return arguments["indices"].length if "indices" in arguments else None
            case "torch.utils.data.DistributedSampler":
                drop = arguments.get("drop_last", NONE).default is True
                return combined(lambda n: n // RANKS if drop else -(-n // RANKS), first)
            case "torch.utils.data.DataLoader":
                if (batches := arguments.get("batch_sampler", NONE).of_kind("sampler")) is not None:
                    return batches.length
                sampler = arguments.get("sampler", NONE).of_kind("sampler")
                dataset = arguments.get("dataset", NONE)
                count = sampler.length if sampler is not None else dataset.length
                return _batches(count, arguments)
            case "torch.utils.data.BatchSampler":
                return _batches(first, arguments)
        return first if name.startswith("torch.utils.data.") and "Sampler" in name else None

    def _split(self, name: str, arguments: dict[str, Value]) -> Value:
        source = next(iter(arguments.values()), Value())
        if name.startswith("torch"):
            generator = arguments.get("generator")
            drawn = generator.labels & VARYING if generator else self.seeds.get("torch", frozenset())
        else:
            state = arguments.get("random_state")
            drawn = state.labels & VARYING if state is not None and not state.is_none else self.seeds["numpy"]
        labels = labels_of((source,)) & VARYING | drawn | ({"drawn-apart"} if drawn else set())
        sizes = arguments["lengths"].items if "lengths" in arguments else None
        whole = sizes is not None and "some" not in arguments["lengths"].labels
        lengths = [size.known if isinstance(size.only, int) else None for size in sizes or []] if whole else [None]
        parts = [Value("dataset", labels, name, fields={"dataset": source}, length=length) for length in lengths]
        return Value("list", labels if whole else labels | {"some"}, items=parts, length=None)

    # --- numbers that are drawn, tensors that are made

    def tensor_call(self, name: str, positional: list[Value], keywords: dict[str, Value], node: ast.AST) -> Value:
        """Any other function of torch or numpy: a tensor made of its arguments."""
        parent, _, last = name.rpartition(".")
        operands = content(positional, keywords)
        if parent == "torch.nn.functional" and last in MEAN_LOSSES:
            return self._loss(keywords, operands)
        if (calculation := named(last)) is not None and len(operands) >= 2:
            return self._calculated(calculation, last, operands, node)
        labels = computed(last, operands)
        if parent == "torch.nn.init" and positional:
            drawn = self._drawn_from(keywords) if last not in _FIXED else frozenset()
            self.changed_in_place(positional[0], Value(labels=labels | drawn), node)
            return positional[0]
        if last in _DRAWS and parent == "torch":
            labels |= self._drawn_from(keywords)
        elif parent in ("numpy.random", "random"):
            stream = "numpy" if parent.startswith("numpy") else "python"
            return picks(last, labels | self.seeds[stream]) or Value("unknown", labels | self.seeds[stream], name)
        return Value("tensor", labels, length=_length_of(parent, last, positional))

    def _calculated(self, calculation: Calculation, name: str, operands: list[Value], node: ast.AST) -> Value:
        """``torch.div(a, b)``, ``a.div(b)``; ``a.div_(b)`` and ``torch._foreach_div_(all, b)`` change the first."""
        left, right = operands[:2]
        made = calculated(calculation, left, right, getattr(node, "lineno", 0))
        if not name.endswith("_") or name.endswith("__"):
            return made
        for part in (left, *(left.items or ())) if left.kind in ("list", "tuple") else (left,):
            self.changed_in_place(part, made, node)
        return left

    def tensor_method(
        self, value: Value, name: str, arguments: list[Value], keywords: dict[str, Value], node: ast.AST
    ) -> Value:
        """Any method of a tensor, or of something unknown."""
        operands = [value, *content(arguments, keywords)]
        is_tensor = value.kind in TENSORS or bool(value.labels & {"graph", "eval", "gradient"})
        if is_tensor and (calculation := named(name)) is not None and len(operands) >= 2:
            return self._calculated(calculation, name, operands, node)
        if name in ("size", "numel", "dim"):
            return self._size(value, name, arguments)
        labels = computed(name, operands) if is_tensor else computed(name, [Value(labels=part_labels(value))])
        if not is_tensor:
            labels |= carried(operands[1:]) | speaks_of_ranks(name)
            labels |= {"exists"} if name in ("exists", "is_file", "is_dir") else frozenset()
        if name in _DRAWS_INTO:
            labels |= self._drawn_from(keywords)
        if name.endswith("_") and not name.startswith("_") and (is_tensor or value.kind == "unknown"):
            if value.kind != "grad" or name not in ("zero_", "detach_", "requires_grad_"):
                self.changed_in_place(value, Value(labels=detached(labels)), node)
            return value
        if name in ("item", "tolist"):
            return Value("unknown", labels)
        if name in ("chunk", "split", "tensor_split") and arguments and (is_tensor or "own-size" in value.labels):
            count = _chunks if name == "chunk" else lambda n, k: -(-n // k)
            parts = combined(count, value.length, arguments[0].known)
            piece = Value("tensor", labels - {"own-size"})  # they are of one size, but for what is left over
            return Value("list", labels | {"some"}, items=[piece], length=parts)
        kind = "tensor" if value.kind in TENSORS else "unknown"
        along = arguments[0].default if arguments else keywords.get("dim", NONE).default
        keeps = name in _ELEMENTWISE or (name in _BY_DIMENSION and isinstance(along, int) and along > 0)
        return Value(kind, labels, length=value.length if keeps else None)

    def _drawn_from(self, keywords: dict[str, Value]) -> frozenset[str]:
        """Of random numbers: by the generator that they are asked from."""
        generator = keywords.get("generator")
        return self.seeds.get("torch", frozenset()) if generator is None else generator.labels & VARYING

    def _size(self, value: Value, name: str, arguments: list[Value]) -> Value:
        where = arguments[0].default if arguments else UNKNOWN
        length = value.length if where == 0 or (name == "numel" and value.kind == "tensor") else None
        if length is not None and length.only is not UNKNOWN:
            own = frozenset({"size"})
        else:
            own = value.labels & {"rank"} | {"size"}
        known = length if name == "size" else None
        return Value("scalar" if known else "unknown", own, known=known)

    # --- what ranks agree on, and how random numbers are seeded

    def _agree(self, name: str, arguments: dict[str, Value]) -> None:
        source = next((arguments[n] for n in ("tensor", "input_tensor", "obj") if n in arguments), None)
        for parameter in _FILLED:
            if (value := arguments.get(parameter)) is None:
                continue
            if parameter == "tensor" and name.rpartition(".")[2] in ("all_gather", "gather", "scatter"):
                continue
            has_graph = source is not None and "graph" in source.labels and ".nn." not in name and not self._no_grad()
            is_gathered = "gather" in name and has_graph
            for part in (value, *(value.items or ())):
                agreed(part, {"reduced", "gathered"} if is_gathered else {"reduced"})

    def _no_grad(self) -> bool:
        return any(context.name == "no_grad" for context in self.within)

    def _seed_workers(self, arguments: dict[str, Value]) -> None:
        """What a loader's workers seed their generators with."""
        start = arguments.get("worker_init_fn", NONE)
        if start.kind not in ("function", "partial"):
            return
        mark, seeds = len(self.trace.events), dict(self.seeds)
        self.call(start, [Value(labels=frozenset({"worker"}))], {}, ast.Pass())
        done = [event for event in self.trace.events[mark:] if event.role == "seed"]
        del self.trace.events[mark:]
        self.seeds = seeds
        for event in done:
            self.event("worker_seed", event.node, name=event.name, arguments=event.arguments).path = event.path

    def _seed(self, name: str, value: Value) -> None:
        labels = seeded(labels_of((value,)) | self.implied())
        own = {"torch": "torch", "numpy": "numpy", "random": "python"}.get(name.split(".")[0])
        self.seeds.update(dict.fromkeys([own] if own is not None else self.seeds, labels))


def seeded(labels: frozenset[str]) -> frozenset[str]:
    """Of the numbers of a generator whose seed is made of that."""
    return frozenset({"rng"} if labels & VARYING else ())


def picks(name: str, labels: frozenset[str]) -> Value | None:
    """What a generator gives that puts what there is into an order, or picks some of it; ``None``: it does neither."""
    if name not in ("sample", "permutation", "choice", "choices", "permuted"):
        return None
    return Value("list" if name == "sample" else "tensor", labels | {"shuffled"})


def agreed(value: Value, labels: set[str]) -> None:
    """It is the same on all ranks from now on."""
    if value is NONE or value.is_none:
        return
    value.labels = (value.labels - VARYING - {"shard"}) | labels
    for chosen in ("if", "else"):
        if (part := value.fields.get(chosen)) is not None and part.kind in ("scalar", "unknown", "tensor"):
            agreed(part, labels)
    if value.known is not None:
        value.known, value.kind = None, "unknown"


def _copied(value: Value, copies: dict[int, Value]) -> Value:
    """A deep copy: modules and their parameters, and what holds them; each once, however often it is held."""
    if (made := copies.get(id(value))) is not None:
        return made
    if value.options:
        return joined([_copied(option, copies) for option in value.options])
    if value.kind not in _COPIED:
        return value
    made = copies[id(value)] = replace(value)
    made.fields = {n: held if n == "__class__" else _copied(held, copies) for n, held in value.fields.items()}
    made.items = [_copied(item, copies) for item in value.items] if value.items is not None else None
    return made


def is_sharded(samplers: list[Value]) -> bool:
    """Whether one of these gives each rank samples of its own."""
    return any(
        sampler.name == "torch.utils.data.DistributedSampler"
        or "rank" in sampler.labels
        or is_sharded([inner for inner in sampler.fields.get("sampler", NONE).each() if inner.kind == "sampler"])
        for sampler in samplers
    )


def relabelled(value: Value, labels: frozenset[str], without: frozenset[str], depth: int = 3) -> Value:
    """The same tensor, or tuple or dict of tensors, with other labels."""
    if value.kind in ("module", "ddp", "function", "class") or depth == 0:
        return value
    items = None
    if value.items is not None:
        items = [relabelled(item, labels, without, depth - 1) for item in value.items[:64]]
    fields = value.fields
    if value.kind == "dict":
        fields = {name: relabelled(held, labels, without, depth - 1) for name, held in fields.items()}
    options = tuple(relabelled(option, labels, without, depth - 1) for option in value.options)
    if value.is_none:
        return value
    kind = "tensor" if value.kind in ("unknown", "scalar") else value.kind
    made = (value.labels - without) | (labels - without)
    return Value(kind, made, value.name, None, fields, items, options, value.code, value.length, value.line)


def _length_of(parent: str, name: str, arguments: list[Value]) -> Known | None:
    """How many rows a new tensor has."""
    if not arguments:
        return None
    first = arguments[0]
    if parent in ("torch", "numpy") and name == "arange":
        bounds = [bound.known for bound in arguments[:3]]
        return combined(lambda *parts: len(range(*parts)), *bounds)
    if parent in ("torch", "numpy") and name in ("linspace", "logspace"):
        return combined(operator.index, arguments[2].known) if len(arguments) > 2 else None
    if parent in ("torch", "numpy") and name in _SIZED:
        shape = next((a for a in arguments if a.items), first) if name == "randint" else first
        return combined(operator.index, shape.items[0].known if shape.items else shape.known)
    made_of = first.kind == "tensor" or name in ("tensor", "as_tensor", "stack", "from_numpy")
    return first.length if made_of and name not in ("cat", "concat", "unique") else None


def _batches(count: Known | None, arguments: dict[str, Value]) -> Known | None:
    size = arguments["batch_size"].known if "batch_size" in arguments else Known((1,))
    drop = arguments.get("drop_last", NONE).default is True
    return combined(lambda n, b: n // operator.index(b) if drop else -(-n // operator.index(b)), count, size)


def _chunks(length: int, parts: int) -> int:
    return -(-length // -(-length // parts))


def numbered(values: list[Value]) -> dict[str, Value]:
    """As fields of something that has them by number."""
    return {str(index): value for index, value in enumerate(values)}
