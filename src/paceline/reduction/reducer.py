"""The gradients of one step: lanes accumulate into flat views, buckets leave during the last backward.

Every lane takes the same path, whether first, last, only or empty: its flat buffers are zeroed, each ``param.grad`` is
pointed at its view, backward accumulates. (Letting a lone lane start from ``grad=None`` gives -0.0 where the view gives
+0.0.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.lanes import lanes_of, most_lanes
from paceline.reduction.buckets import LaneSums, assign
from paceline.reduction.exchange import Exchange
from paceline.reduction.tree import fold
from paceline.team import Pending, Team

__all__ = ["LOSS", "WEIGHT", "Reducer"]

LOSS, WEIGHT = 0, 1
"""Columns of the table that has one row per lane."""


class _NotYet(Tensor):
    """What ``param.grad`` is in the loop over a step: a part of a gradient on its way. Whoever touches it is told.

    Clipping or scaling it there, as a loop of one worker may, would change another part on each number of workers.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._guards.TracingContext.try_get() is not None:  # torch's compiler looks at all that parameters have
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        raise UsageError(
            "cannot touch gradients here",
            found="the loop over the step, in which they are a part of the sum",
            needed="them whole, behind the loop and before step.update",
            fix="Clip with step.update(optimizer, max_norm=...); read or change gradients behind the loop",
        )


class Reducer:
    """Reduces the gradients of ``parameters`` over all lanes of a team.

    One step is: for each lane of this worker `begin_lane`, and around each backward `backward`; then `finish`.

    Args:
        parameters: those that require a gradient, the same on every worker and in the same order.
        lanes: of the recipe.
        bucket_bytes: size of one exchange.
        gradients: see `Exchange`.
        compress: see `Exchange`.
        overlap: full buckets leave during the last backward; otherwise all leave in `finish`.
    """

    def __init__(
        self,
        team: Team,
        parameters: Sequence[nn.Parameter],
        *,
        lanes: int,
        bucket_bytes: int,
        gradients: Literal["exact", "allreduce"],
        compress: Literal["none", "bf16"] = "none",
        overlap: bool = True,
    ) -> None:
        self._team, self._parameters, self._lanes = team, list(parameters), lanes
        self.reduced = frozenset(parameters)
        """The parameters whose gradients become those of the whole team."""
        self.lanes = lanes_of(team.rank, team.world_size, lanes)
        self._buckets = assign(self._parameters, bucket_bytes)
        self._bucket_of = {index: at for at, bucket in enumerate(self._buckets) for index in bucket.members}
        self._sums = LaneSums(self._parameters, self._buckets, lanes)
        self._exchange = Exchange(team, lanes, gradients, compress)
        self._views: list[Tensor] = []
        self._not_yet = [
            torch.empty(1, dtype=p.dtype, device=p.device).as_strided(p.shape, (0,) * p.dim()).as_subclass(_NotYet)
            for p in self._parameters
        ]
        rows = most_lanes(team.world_size, lanes)  # every worker gathers the same shape
        self.table = torch.zeros(rows, 2, dtype=torch.float64, device=team.device)
        """This worker's lanes: summed loss and summed weight. The step fills it in."""
        self._call = ""
        self._in_lane, self._expecting = False, False
        self._gathered = torch.empty(0)
        self._divisor = torch.empty(0)
        self._pending: list[Pending[None]] = []
        self._overlap, self._overlapping = overlap, False
        self._waiting_for: list[set[int]] = []
        self._launched = 0
        self.used = [False] * len(self._parameters)
        """Which parameters got a gradient from this worker's lanes."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._accumulated, index))
            for index, parameter in enumerate(self._parameters)
        ]

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        """For each bucket the sizes of its parameters; the same on every worker, or the exchange breaks."""
        return tuple(tuple(self._parameters[index].numel() for index in bucket.members) for bucket in self._buckets)

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            if type(parameter.grad) is _NotYet:
                parameter.grad = None

    def begin_step(self, call: str) -> None:
        """Forgets the step before. ``call`` is the step's name for the team, see `Team.open`."""
        self._call = call
        self._sums.reset()
        self.table.zero_()
        self.used = [False] * len(self._parameters)
        self._pending, self._overlapping, self._launched = [], False, 0
        self._waiting_for = [set(bucket.members) for bucket in self._buckets]

    def begin_lane(self, lane: int) -> None:
        """From now on backward accumulates for ``lane``. The lanes of a worker come in order, the empty ones too."""
        self._views = self._sums.begin(lane).views
        self._in_lane = True
        self._point_grads(self._not_yet)

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Around each backward of a lane; ``last``: of the last lane, so that full buckets may leave during it."""
        self._point_grads(self._views)
        if last and self._overlap:
            self._send_table()
            self._overlapping = True
        self._expecting = True
        try:
            yield
        finally:
            self._expecting = False
            self._point_grads(self._not_yet)

    def finish(self) -> Tensor:
        """After the last backward: waits until every ``param.grad`` is the global sum divided by the global weight.

        Returns:
            The table of all lanes, shape ``(lanes, 2)``, float64, on the team's device. Collective.
        """
        self._in_lane = False
        if not self._overlapping:
            self._send_table()
        while self._launched < len(self._buckets):
            self._launch()
        self._pending.append(self._team.submit(self._exchange.finish))
        for pending in self._pending:
            pending.wait()
        self._overlapping = False  # a backward outside of the step sends nothing
        self._views = self._sums.result.views
        self._point_grads(self._views)
        return self._gathered

    def drop_unused(self, used: Tensor) -> None:
        """A parameter that no lane of any worker used has no gradient, as in plain torch: AdamW would decay it."""
        for index in (~used).nonzero().flatten().tolist():
            self._parameters[index].grad = None

    def _point_grads(self, grads: Sequence[Tensor]) -> None:
        for parameter, grad in zip(self._parameters, grads, strict=True):
            if parameter.grad is not grad:
                parameter.grad = grad

    def _accumulated(self, index: int, parameter: Tensor) -> None:
        """After each accumulation into a parameter's gradient, in the thread that runs backward."""
        if self._in_lane and not self._expecting:
            raise UsageError(
                "cannot count this gradient",
                found=f"loss.backward() inside {self._call}, for a parameter {tuple(parameter.shape)}",
                needed="step.backward(loss, weight=...), once for each micro-batch",
                fix="Add up losses first; for gradients of inputs, as in a penalty, use torch.autograd.grad",
            )
        view = self._views[index]
        if parameter.grad is not view:  # create_graph=True accumulates out of place
            assert parameter.grad is not None
            view.copy_(parameter.grad.detach())
            parameter.grad = view
        self.used[index] = True
        if self._overlapping:
            bucket = self._bucket_of[index]
            if bucket < self._launched:
                raise UsageError(
                    "cannot reduce the gradients of this step",
                    found=f"another gradient of a parameter {tuple(parameter.shape)} when its sum was on its way",
                    needed="a last backward that reaches each parameter once",
                    fix="Add up losses before step.backward; recompute shared parts with use_reentrant=False; or set "
                    "execution.overlap: false",
                )
            self._waiting_for[bucket].discard(index)
            while self._launched < len(self._buckets) and not self._waiting_for[self._launched]:
                self._launch()

    def _launch(self) -> None:
        """The next bucket, in bucket order: every worker must issue the same exchanges in the same order."""
        parts, into = self._sums.parts(self._launched), self._sums.result.flats[self._launched]
        self._launched += 1
        self._pending.append(self._team.submit(lambda: self._exchange.reduce(parts, into, self._divisor)))

    def _send_table(self) -> None:
        """Losses and weights go first: they are known before the last backward, and the division needs the weight."""

        def job() -> None:
            gathered = self._team.open(self._call, self.table.flatten()).view(-1, *self.table.shape)
            rows = []
            for rank in range(self._team.world_size):
                mine = lanes_of(rank, self._team.world_size, self._lanes)
                rows.append(gathered[rank, : len(mine)])
            self._gathered = torch.cat(rows)
            weights = [((lane, lane + 1), self._gathered[lane, WEIGHT]) for lane in range(self._lanes)]
            ((_, self._divisor),) = fold(self._lanes, weights, torch.add)

        self._pending.append(self._team.submit(job))
