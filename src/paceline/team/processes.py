"""Workers as processes, joined by torch.distributed."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # first imported after init_process_group it would keep the group alive at exit
from torch import Tensor

from paceline.env import WorkerEnv
from paceline.errors import TeamError, UsageError
from paceline.team.team import Team

__all__ = ["TorchTeam"]


class TorchTeam(Team):
    """Processes joined by torch.distributed: gloo on CPU, nccl on CUDA (nccl: written with care, not yet run).

    Args:
        env: this worker's place, from its launcher.
        timeout_s: seconds after which a wait for another worker is an error.
    """

    def __init__(self, env: WorkerEnv, device: torch.device, *, threads: int, timeout_s: float) -> None:
        refuse_second_group()
        super().__init__(
            rank=env.rank,
            world_size=env.world_size,
            local_rank=env.local_rank,
            device=device,
            threads=threads,
        )
        self._env, self._timeout_s = env, timeout_s
        with self._reaching():
            store = self._store(is_master=env.rank == 0 and not env.store_hosted)
            # A restarted launch, or a second run in these processes, meets the same store again: its keys must be new.
            made = store.add(f"paceline/{env.restarts}/teams of {env.rank}", 1)
            self._connect(store, f"paceline/{env.restarts}/{made}")

    def _store(self, *, is_master: bool = False) -> dist.TCPStore:  # type: ignore[name-defined]
        return dist.TCPStore(  # type: ignore[attr-defined]
            self._env.master_addr,
            self._env.master_port,
            self._env.world_size,
            is_master=is_master,
            timeout=datetime.timedelta(seconds=self._timeout_s),
            wait_for_workers=False,
        )

    def _connect(
        self,
        store: dist.TCPStore,  # type: ignore[name-defined]
        name: str,
        within_s: float | None = None,
    ) -> None:
        """Joins the group ``name``, as ``rank`` of ``world_size``.

        Args:
            within_s: all come at once; ``None``: as late as the timeout. For one that dies while it connects gloo waits
                up to five times as long, trying again and again, and nothing can end that.
        """
        timeout = datetime.timedelta(seconds=self._timeout_s)
        cuda = self.device.type == "cuda"
        # torch numbers its groups in their keys, and counts one whose making was interrupted: on that worker alone.
        dist.distributed_c10d._world.group_count = 0
        with self._reaching():
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                device_id=self.device if cuda else None,
                store=dist.PrefixStore(name, store),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.world_size,
                timeout=timeout if within_s is None or cuda else datetime.timedelta(seconds=within_s),
            )
            if within_s is not None and not cuda:
                dist.distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Around calls of torch.distributed only: elsewhere a RuntimeError is a bug, here it is a lost worker."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            raise self._lost(_cause(error)) from error

    def _lost(self, cause: str) -> BaseException:
        """What to raise when the others cannot be reached."""
        return TeamError(
            f"worker {self.rank} lost touch with the others",
            found=cause,
            needed=f"all {self.world_size} workers alive and answering within {self._timeout_s:g} s",
            fix="Look for the first worker that failed, or raise execution.timeout_s",
        )

    def swap(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Callable[[], None]:
        if not sends and not receives:
            return lambda: None
        ops = [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in sends]
        ops += [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in receives]
        with self._reaching():
            works = dist.batch_isend_irecv(ops)

        def wait() -> None:
            with self._reaching():
                for work in works:
                    if self.device.type == "cuda":
                        work.wait()
                    else:  # which else keeps the timeout that the group was made with
                        work.wait(datetime.timedelta(seconds=self._timeout_s))

        return wait

    def all_reduce(self, tensor: Tensor) -> None:
        with self._reaching():
            dist.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        with self._reaching():
            dist.all_gather_single(gathered.view(-1), tensor.contiguous().view(-1))
        return gathered

    def close(self) -> None:
        super().close()
        self._destroy()

    def _destroy(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _abort(self) -> None:
        """Ends what is at work in the group, from another thread. gloo cannot, see [Note: why sockets are cut]."""
        if self.device.type == "cuda" and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()


def _cause(error: BaseException) -> str:
    """The first sentence of what torch says, without the line of its source."""
    line = re.sub(r"^\[[^\]]*\] *", "", str(error).strip().splitlines()[0])
    return re.split(r"\. (?=[A-Z])|\.$", line)[0]


def refuse_second_group() -> None:
    """Raises `UsageError` when this process is in a process group already."""
    if dist.is_initialized():
        raise UsageError(
            "cannot join the team",
            found="a process group in this process already",
            needed="one at a time",
            fix="Call run.close() before the next paceline.Run, and leave out torch.distributed.init_process_group",
        )
