"""Workers as threads of one process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.determinism import configure_thread
from paceline.errors import TeamError
from paceline.team.team import Team

__all__ = ["ThreadTeam"]

T = TypeVar("T")
_LOST = object()


class ThreadTeam(Team):
    """Workers as threads of one process, over queues: the same calls without processes. Made by `ThreadTeam.of`."""

    def __init__(self, rank: int, world_size: int, mail: dict[tuple[int, int], queue.Queue[Any]]) -> None:
        super().__init__(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            device=torch.device("cpu"),
            threads=torch.get_num_threads(),
        )
        self._mail = mail

    @classmethod
    def of(cls, world_size: int) -> list[ThreadTeam]:
        """One team member for each of ``world_size`` threads."""
        mail: dict[tuple[int, int], queue.Queue[Any]] = {
            (a, b): queue.Queue() for a in range(world_size) for b in range(world_size)
        }
        return [cls(rank, world_size, mail) for rank in range(world_size)]

    def _post(self, rank: int, value: Any) -> None:
        self._mail[self.rank, rank].put(value)

    def _take(self, rank: int) -> Any:
        try:
            value = self._mail[rank, self.rank].get(timeout=30)
        except queue.Empty:
            value = _LOST
        if value is _LOST:
            self._mail[rank, self.rank].put(_LOST)  # for whatever else waits for that worker
            raise TeamError(f"worker {self.rank} lost touch with worker {rank}")
        return value

    def swap(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Callable[[], None]:
        for rank, tensor in sends:
            self._post(rank, tensor.clone())

        def wait() -> None:
            for rank, tensor in receives:
                tensor.copy_(self._take(rank))

        return wait

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(self.all_gather(tensor).sum(0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        for rank in range(self.world_size):
            self._post(rank, tensor.clone())
        return torch.stack([self._take(rank) for rank in range(self.world_size)])

    @staticmethod
    def run(world_size: int, work: Callable[[Team], T], timeout_s: float = 60.0) -> list[T]:
        """Runs ``work(team)`` in one thread per worker and returns the results in rank order.

        Raises:
            The first exception by time, an echo (`TeamError`) only when there is nothing else.
        """
        teams = ThreadTeam.of(world_size)
        results: dict[int, T] = {}
        failures: list[BaseException] = []

        def body(team: ThreadTeam) -> None:
            configure_thread(1)
            try:
                results[team.rank] = work(team)
            except BaseException as error:  # every failure of a thread must reach the caller
                failures.append(error)
                for rank in range(world_size):
                    team._post(rank, _LOST)

        threads = [threading.Thread(target=body, args=(team,), daemon=True) for team in teams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
        for team in teams:
            team.close()
        if failures:
            raise next((error for error in failures if not isinstance(error, TeamError)), failures[0])
        if len(results) < world_size:
            raise TeamError(
                "cannot finish", found=f"workers {sorted(set(range(world_size)) - set(results))} still at work"
            )
        return [results[rank] for rank in range(world_size)]
