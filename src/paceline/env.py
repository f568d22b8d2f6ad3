"""Who am I in the team? The only reader of the environment.

Three launchers are understood: torchrun's variables, which Paceline's own supervisor sets too (so a plain script runs
under either), and Slurm's ``srun``. Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError

__all__ = ["WorkerEnv", "become", "begun_again", "for_template", "for_worker", "read", "restarts"]

_REPORT_DIR = "PACELINE_REPORT_DIR"
_MEMBER = "PACELINE_MEMBER"
_RESTARTS = "PACELINE_RESTARTS"
_LINK_FD = "PACELINE_LINK_FD"
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class WorkerEnv:
    """The place of this process in a team that somebody else started.

    Args:
        rank: 0 to ``world_size - 1``.
        world_size: workers of the whole run.
        local_rank: number of the worker on its machine; its GPU.
        master_addr: where the workers meet.
        master_port: TCP port of the key-value store there. Unused by a team of one.
        store_hosted: the launcher already serves that store, so that every worker is a client; else worker 0 serves.
        report_dir: where a failing worker leaves its report for the supervisor; ``None`` under other launchers.
        restarts: how often the launcher has started this team before. Keys in a hosted store outlive a restart, so
            they need this number in their names.
        link: descriptor of this worker's end of the sockets to Paceline's supervisor, see `paceline.link`.
        member: the supervisor's number for this process, which no other ever has.
    """

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    store_hosted: bool = False
    report_dir: Path | None = None
    restarts: int = 0
    link: int | None = None
    member: int = 0


def read(environ: Mapping[str, str] | None = None) -> WorkerEnv | None:
    """This process's place in a team, or ``None`` when nobody started it as a worker.

    Args:
        environ: in place of the process's own environment.

    Raises:
        ConfigError: the environment contradicts itself, e.g. names 4 workers and no rank.
    """
    env = os.environ if environ is None else environ
    if "RANK" in env or "WORLD_SIZE" in env:
        return _from_torchrun(env)
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and _number(env, "SLURM_STEP_NUM_TASKS", default=1) > 1:
        return _from_slurm(env)
    return None


def restarts(environ: Mapping[str, str] | None = None) -> int:
    """How often the launcher (Paceline's own, torchrun or Slurm) has started this run before; 0 the first time."""
    env = os.environ if environ is None else environ
    counts = (_RESTARTS, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return max(_number(env, name, default=0) for name in counts)


def begun_again(environ: Mapping[str, str] | None = None) -> bool:
    """Whether Paceline's own supervisor has started this team anew, since none of the one before was left."""
    return _number(os.environ if environ is None else environ, _RESTARTS, default=0) > 0


def for_template() -> dict[str, str]:
    """The environment of the process that workers are forked from; torch reads some of it when it is imported."""
    env = dict(os.environ)
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a connection that is cut, as failover does, is told at length
    return env


def for_worker(member: int, slot: int, workers: int, *, port: int, report_dir: Path, restarts: int) -> dict[str, str]:
    """The whole environment of a worker started by this process.

    Args:
        member: the worker's number, which no other ever has.
        slot: its place among the ``workers``: rank and local rank, until losses move the ranks.
        workers: of a whole team.
        port: of the store on the loopback interface.
        report_dir: where the worker leaves its report.
        restarts: how often the team has been started before.
    """
    env = dict(os.environ)
    for name in _LAUNCHER_VARIABLES:
        env.pop(name, None)
    env |= {"RANK": str(slot), "WORLD_SIZE": str(workers), "LOCAL_RANK": str(slot)}
    env |= {_REPORT_DIR: str(report_dir), _MEMBER: str(member)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env[_RESTARTS] = str(restarts)
    # One machine: no other may reach in.
    env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return env


def _from_torchrun(env: Mapping[str, str]) -> WorkerEnv:
    alone = env.get("WORLD_SIZE") == "1"
    wanted = _LAUNCHER_VARIABLES[:3] if alone else _LAUNCHER_VARIABLES
    missing = [name for name in wanted if not env.get(name)]
    if missing:
        raise ConfigError(
            "cannot tell which worker this is",
            found=", ".join(f"{name}={env[name]}" for name in wanted if env.get(name)) or "empty RANK and WORLD_SIZE",
            needed=f"{', '.join(missing)} too",
            fix="Start workers with `paceline train -n N` or torchrun, or unset RANK and WORLD_SIZE to run alone",
        )
    rank, world_size, local_rank = (_number(env, name) for name in _LAUNCHER_VARIABLES[:3])
    _check_rank("RANK", rank, "WORLD_SIZE", world_size)
    _check_rank("LOCAL_RANK", local_rank, "WORLD_SIZE", world_size)
    report_dir = env.get(_REPORT_DIR)
    return WorkerEnv(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(env, "MASTER_PORT", default=29500),  # torch's own default
        store_hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        report_dir=Path(report_dir) if report_dir else None,
        restarts=restarts(env),
        link=_number(env, _LINK_FD) if env.get(_LINK_FD) else None,
        member=_number(env, _MEMBER, default=0),
    )


def _from_slurm(env: Mapping[str, str]) -> WorkerEnv:
    rank, world_size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    _check_rank("SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", world_size)
    addr = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", ""))
    if env.get("MASTER_PORT"):
        port = _number(env, "MASTER_PORT")
    elif reserved := re.match(r"\d+", env.get("SLURM_STEP_RESV_PORTS", "")):  # srun --resv-ports
        port = int(reserved[0])
    else:  # the same on every node of the job, and another for each job of a shared node
        port = 15000 + _number(env, "SLURM_JOB_ID") % 10000
    return WorkerEnv(
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, "SLURM_LOCALID"),
        master_addr=addr,
        master_port=port,
        restarts=restarts(env),
    )


def _first_host(nodes: str) -> str:
    """The first host of a Slurm node list.

    >>> _first_host("gpu[003-007,012],login1")
    'gpu003'
    >>> _first_host("login1,gpu[003-007]")
    'login1'
    """
    match = re.match(r"([^,\[\s]+)(?:\[(\d+)[^\]]*\]([^,\s]*))?", nodes)
    if match is None:
        raise ConfigError(
            "cannot tell where the workers meet",
            found=f"SLURM_STEP_NODELIST={nodes!r}",
            needed="a list of nodes",
            fix="Set MASTER_ADDR to the host of worker 0",
        )
    return "".join(part or "" for part in match.groups())


def _number(env: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = env.get(name)
    if not text and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdigit():
        raise ConfigError(
            "cannot tell which worker this is",
            found=f"{name}={text!r}",
            needed="a whole number >= 0",
            fix=f"Correct or unset {name}",
        )
    return int(text)


def _check_rank(name: str, rank: int, size_name: str, world_size: int) -> None:
    if rank >= world_size:
        raise ConfigError(
            "cannot tell which worker this is",
            found=f"{name}={rank}, {size_name}={world_size}",
            needed=f"0 <= {name} < {size_name}",
            fix="Start workers with `paceline train -n N` or torchrun",
        )


def become(environ: Mapping[str, str], *, link: int) -> None:
    """Makes ``environ`` this process's whole environment, as that of a worker with a link to its supervisor.

    Args:
        environ: as `for_worker` gives it.
        link: descriptor of this process's end of the link.
    """
    os.environ.clear()
    os.environ.update(environ)
    os.environ[_LINK_FD] = str(link)
