"""Who a process is, from the variables of each launcher; a contradiction is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import env
from paceline.errors import ConfigError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "123456",
    "SLURM_RESTART_COUNT": "1",
}


def test_nobody_started_it() -> None:
    assert env.read({"PATH": "/bin"}) is None
    assert env.restarts({}) == 0


def test_torchrun() -> None:
    assert env.read(TORCHRUN) == env.WorkerEnv(
        rank=5, world_size=8, local_rank=1, master_addr="node0", master_port=29501, store_hosted=True, restarts=2
    )
    own_store = env.read(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert own_store is not None and not own_store.store_hosted


def test_slurm() -> None:
    assert env.read(SLURM) == env.WorkerEnv(
        rank=3, world_size=4, local_rank=1, master_addr="gpu07", master_port=18456, restarts=1
    )
    reserved = env.read(SLURM | {"SLURM_STEP_RESV_PORTS": "12000-12003", "MASTER_ADDR": "head"})
    assert reserved is not None and (reserved.master_addr, reserved.master_port) == ("head", 12000)


def test_torchrun_inside_slurm_wins() -> None:
    worker = env.read(SLURM | TORCHRUN)
    assert worker is not None and worker.rank == 5


@pytest.mark.parametrize("lacking", ["SLURM_STEP_ID", "SLURM_PROCID"])
def test_a_batch_script_without_srun_is_alone(lacking: str) -> None:
    assert env.read({name: value for name, value in SLURM.items() if name != lacking}) is None


def test_a_step_of_one_task_is_alone_but_remembers_restarts() -> None:
    single = SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert env.read(single) is None
    assert env.restarts(single) == 1


@pytest.mark.parametrize(
    ("environ", "beat"),
    [
        ({"WORLD_SIZE": "4"}, "RANK"),
        ({"RANK": "0"}, "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"}, "MASTER_PORT"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8"),
        (TORCHRUN | {"RANK": "one"}, "RANK='one'"),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'"),
        (TORCHRUN | {"LOCAL_RANK": "9"}, "LOCAL_RANK=9"),
        (SLURM | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST=''"),
    ],
)
def test_contradictions_are_refused(environ: dict[str, str], beat: str) -> None:
    with pytest.raises(ConfigError) as error:
        env.read(environ)
    assert beat in str(error.value)
    assert error.value.fix


def test_a_worker_reads_what_its_supervisor_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    worker = env.read(env.for_worker(7, 1, 3, port=4711, report_dir=tmp_path, restarts=2))
    assert worker == env.WorkerEnv(
        rank=1,
        world_size=3,
        local_rank=1,
        master_addr="127.0.0.1",
        master_port=4711,
        store_hosted=True,
        report_dir=tmp_path,
        restarts=2,
        member=7,
    )


def test_only_our_own_supervisor_begins_again(tmp_path: Path) -> None:
    for restarts, again in ((0, False), (1, True)):
        environ = env.for_worker(0, 0, 1, port=1, report_dir=tmp_path, restarts=restarts)
        assert (env.begun_again(environ), env.restarts(environ)) == (again, restarts)
    assert not env.begun_again({"TORCHELASTIC_RESTART_COUNT": "3"})


def test_no_other_machine_reaches_into_a_team_of_one_machine(tmp_path: Path) -> None:
    environ = env.for_worker(0, 0, 1, port=1, report_dir=tmp_path, restarts=0)
    assert (environ["MASTER_ADDR"], environ["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
